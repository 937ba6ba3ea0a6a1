package driver

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// socketPath is in a directory with a short name, because Linux limits a socket's path.
func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi") //nolint:usetesting // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "csi.sock")
}

// leaveStaleSocket is what a killed driver leaves behind.
func leaveStaleSocket(t *testing.T, path string) {
	t.Helper()
	lis, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	lis.SetUnlinkOnClose(false)
	if err := lis.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestEndpoint_Forms(t *testing.T) {
	for in, want := range map[string]endpoint{
		"unix:///a/b.sock":      {"unix", "/a/b.sock"},
		"unix:/a/b.sock":        {"unix", "/a/b.sock"},
		"/a/b.sock":             {"unix", "/a/b.sock"},
		"tcp://127.0.0.1:10000": {"tcp", "127.0.0.1:10000"},
		"tcp://[::1]:10000":     {"tcp", "[::1]:10000"},
		"tcp://localhost:0/":    {"tcp", "localhost:0"},
	} {
		if got, err := parseEndpoint(in); err != nil || got != want {
			t.Errorf("%s: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "unix://", "unix://a/b", "unix:a", "a.sock", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:1/x",
		"tcp://0.0.0.0:1",
		"tcp://:1", "tcp://example.com:1", "tcp://192.168.0.1:1", "udp://127.0.0.1:1", "unix:///a/../b", "unix:///a\x00b", "tcp://u:p@127.0.0.1:1"} {
		if got, err := parseEndpoint(in); err == nil {
			t.Errorf("%q gives %v, want an error", in, got)
		}
	}
}

func FuzzEndpointsOutsideLoopbackAreRefused(f *testing.F) {
	for _, s := range []string{"unix:///csi/csi.sock", "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://0:1", "tcp://127.1:1", "/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := parseEndpoint(s)
		if err != nil {
			return
		}
		switch e.network {
		case "unix":
			if !filepath.IsAbs(e.address) || len(e.address) > maxSocketPath {
				t.Errorf("%q gives %q", s, e.address)
			}
		case "tcp":
			host, _, err := net.SplitHostPort(e.address)
			if ip := net.ParseIP(host); err != nil || host != "localhost" && (ip == nil || !ip.IsLoopback()) {
				t.Errorf("%q gives %q", s, e.address)
			}
		default:
			t.Errorf("%q gives network %q", s, e.network)
		}
	})
}

func TestSocket_IsPrivateAndRemoved(t *testing.T) {
	path := socketPath(t)
	old := unix.Umask(0)
	defer unix.Umask(old)
	lis, cleanup, err := Listen(t.Context(), "unix://"+path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := lis.Close(); err != nil { // as a gRPC server does
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("closing the listener must leave the socket to cleanup: %v", err)
	}
	if err := cleanup(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestSocket_StaleOneIsReplaced(t *testing.T) {
	path := socketPath(t)
	leaveStaleSocket(t, path)
	_, cleanup, err := Listen(t.Context(), "unix://"+path)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Errorf("nobody listens on the new socket: %v", err)
	} else if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if err := cleanup(); err != nil {
		t.Error(err)
	}
}

func TestSocket_ServedOneIsNotReplaced(t *testing.T) {
	t.Run("of a driver", func(t *testing.T) {
		path := socketPath(t)
		_, cleanup, err := Listen(t.Context(), "unix://"+path)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := Listen(t.Context(), "unix://"+path); err == nil || !strings.Contains(err.Error(), "another driver serves this socket") {
			t.Errorf("got %v", err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
		if err := cleanup(); err != nil {
			t.Error(err)
		}
	})
	t.Run("of another program", func(t *testing.T) {
		path := socketPath(t)
		lis, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = lis.Close() }()
		if _, _, err := Listen(t.Context(), "unix://"+path); err == nil || !strings.Contains(err.Error(), "another process listens on") {
			t.Errorf("got %v", err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path + ".lock"); err == nil {
			t.Error("the lock file of the failed start is left")
		}
	})
}

func TestSocket_OtherFilesAreNotReplaced(t *testing.T) {
	for what, create := range map[string]func(string) error{
		"a regular file": func(p string) error { return os.WriteFile(p, []byte("data"), 0o600) },
		"a directory":    func(p string) error { return os.Mkdir(p, 0o700) },
		"a symbolic link": func(p string) error {
			leaveStaleSocket(t, p+".real")
			return os.Symlink(p+".real", p)
		},
		"a symbolic link to nothing": func(p string) error { return os.Symlink("elsewhere", p) },
		"a special file":             func(p string) error { return syscall.Mkfifo(p, 0o600) },
	} {
		kind, path := strings.TrimSuffix(what, " to nothing"), socketPath(t)
		if err := create(path); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := Listen(t.Context(), path); err == nil || !strings.Contains(err.Error(), "is not a socket but "+kind) {
			t.Errorf("%s: got %v", what, err)
		}
		if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s was touched: %v", what, err)
		}
	}
}

func TestSocket_CleanupKeepsSuccessors(t *testing.T) {
	path := socketPath(t)
	_, cleanup, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	leaveStaleSocket(t, path) // stands for another program's
	if err := cleanup(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("another process's socket was removed: %v", err)
	}
}

func TestSocket_OnlyOneDriverListens(t *testing.T) {
	for range 20 {
		path := socketPath(t)
		leaveStaleSocket(t, path)
		var won atomic.Int32
		var clean func() error
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				if _, cleanup, err := Listen(t.Context(), path); err == nil {
					won.Add(1)
					clean = cleanup
				}
			})
		}
		group.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d starters listen on one socket", won.Load())
		}
		if conn, err := net.Dial("unix", path); err != nil {
			t.Errorf("the winner cannot be reached: %v", err)
		} else {
			_ = conn.Close()
		}
		if err := clean(); err != nil {
			t.Error(err)
		}
	}
}

func TestSocket_NamesMissingDirectory(t *testing.T) {
	_, _, err := Listen(t.Context(), socketPath(t)+"/csi.sock")
	if err == nil || !strings.Contains(err.Error(), "does not exist: create it") {
		t.Errorf("got %v", err)
	}
}

func TestEndpoint_ListensOnLoopback(t *testing.T) {
	for _, where := range []string{"tcp://127.0.0.1:0", "tcp://localhost:0"} {
		lis, cleanup, err := Listen(t.Context(), where)
		if err != nil {
			t.Fatal(err)
		}
		if !lis.Addr().(*net.TCPAddr).IP.IsLoopback() {
			t.Errorf("%s listens on %s", where, lis.Addr())
		}
		if err := cleanup(); err != nil {
			t.Error(err)
		}
	}
}
