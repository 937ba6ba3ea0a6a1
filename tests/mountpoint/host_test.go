//go:build linux

package mountpoint

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// metadataServices are the addresses at which clouds have their metadata and credentials: EC2, ECS and EKS.
var metadataServices = []string{"169.254.169.254", "169.254.170.2", "169.254.170.23"}

// A client knows everything from its command line and the mount's credentials endpoint. It never asks the node's identity.
func TestNoMetadataServiceIsAsked(t *testing.T) {
	needFuse(t)
	if !isolate.Inside() {
		t.Skip("needs a network of its own")
	}
	var connections atomic.Int32
	for i, address := range metadataServices {
		if err := addAddress(fmt.Sprintf("lo:%d", i+10), address); err != nil {
			t.Fatal(err)
		}
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", address+":80")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.NotFoundHandler(), ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				connections.Add(1)
			}
		}}
		go func() { _ = s.Serve(l) }()
		t.Cleanup(func() { s.Close() })
	}
	// The listeners work.
	answer, err := http.Get("http://" + metadataServices[0])
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	before := connections.Load()
	if before == 0 {
		t.Fatal("a connection is not counted")
	}

	b := newBench(t)
	b.put(t, "volume/f", "f")
	m := mount(t, b.invocation(t), b.keys, nil)
	if got, err := os.ReadFile(m.at("f")); string(got) != "f" {
		t.Errorf("read %q, %v", got, err)
	}
	m.unmount(t)
	for _, refused := range []bool{true, false} {
		keys := b.keys
		if !refused {
			keys = nil
		}
		if code, output := failed(t, b.invocation(t), keys, refused, "AWS_MAX_ATTEMPTS=2"); code != 1 {
			t.Errorf("a client without credentials has the exit code %d\n%s", code, output)
		}
	}
	if n := connections.Load() - before; n != 0 {
		t.Errorf("the client connected %d times", n)
	}
}

// addAddress gives an address to a loopback interface of this network namespace.
func addAddress(name, address string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	alias, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := alias.SetInet4Addr(net.ParseIP(address).To4()); err != nil {
		return err
	}
	return unix.IoctlIfreq(fd, unix.SIOCSIFADDR, alias)
}

// The program is static: it needs /proc, /dev/urandom and CA certificates, and no library. Where there are libraries that the C library or
// the AWS runtime would load, which are built for the C library of the host, it does not load them. It logs to no socket.
func TestTheClientUsesNothingOfTheHost(t *testing.T) {
	b := newOwnBench(t)
	b.put(t, "volume/f", "f")
	for name, libraries := range map[string][]string{
		"modules of nsswitch.conf": {"libnss_compat.so.2"},
		"libnuma":                  {"libnuma.so", "libnuma.so.1"},
	} {
		t.Run(name, func(t *testing.T) { usesNothing(t, b, libraries) })
	}
}

// usesNothing mounts with a client in a root directory that has libraries of these names.
func usesNothing(t *testing.T, b *bench, libraries []string) {
	t.Helper()
	in := b.invocation(t)
	root := openDir(t)
	for _, dir := range []string{"proc", "dev", "etc/ssl/certs", "tmp", "lib"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "dev/urandom"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/proc", "/dev/urandom"} {
		if err := unix.Mount(name, filepath.Join(root, name), "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(filepath.Join(root, name), unix.MNT_DETACH) })
	}
	copyFile(t, in.Binary, filepath.Join(root, "client"))
	for name, content := range map[string]string{
		"etc/hosts":         "127.0.0.1 service.test\n",
		"etc/nsswitch.conf": "hosts: compat files\npasswd: compat\ngroup: compat\n",
		"etc/resolv.conf":   "nameserver 127.0.0.1\n",
	} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ca, _, err := s3server.WriteCert(openDir(t))
	if err != nil {
		t.Fatal(err)
	}
	copyFile(t, ca, filepath.Join(root, "etc/ssl/certs/ca-certificates.crt")) // the AWS runtime does not start without one
	// A module of the C library, with all that it needs, under each of the names.
	for _, name := range libraries {
		copyFile(t, needLibrary(t, "libnss_compat.so.2"), filepath.Join(root, "lib", name))
	}
	copyFile(t, needLibrary(t, "libc.so.6"), filepath.Join(root, "lib", "libc.so.6"))
	copyFile(t, needLoader(t), filepath.Join(root, "lib", filepath.Base(needLoader(t))))
	log, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(root, "dev/log"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if err := os.Chmod(filepath.Join(root, "dev/log"), 0o777); err != nil {
		t.Fatal(err)
	}

	in.Binary, in.StateDir, in.CacheDir = "/client", "/tmp", "/tmp"
	in.Endpoint = strings.Replace(in.Endpoint, "127.0.0.1", "service.test", 1)
	m := mount(t, in, b.keys, func(cmd *exec.Cmd) {
		cmd.SysProcAttr.Chroot, cmd.Dir = root, "/"
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH=/lib")
	})
	if got, err := os.ReadFile(m.at("f")); string(got) != "f" {
		t.Errorf("read %q, %v", got, err)
	}
	want(t, "append", os.Chmod(m.at("f"), 0o600), unix.EPERM) // is logged
	maps, err := os.ReadFile(proc(m.cmd.Process.Pid, "maps"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if fields := strings.Fields(line); len(fields) > 5 && strings.Contains(fields[5], ".so") {
			t.Errorf("it loaded %s", fields[5])
		}
	}
	m.unmount(t)
	if err := log.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	message := make([]byte, 1000)
	if n, err := log.Read(message); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it logged %q to /dev/log, %v", message[:n], err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = rig.WriteProgram(to, data) // the loader is executed, too
	}
	if err != nil {
		t.Fatal(err)
	}
}

// needLibrary returns the path of a library of this machine.
func needLibrary(t *testing.T, name string) string {
	t.Helper()
	for _, pattern := range []string{"/lib/*-linux-gnu/", "/lib64/", "/usr/lib64/", "/usr/lib/"} {
		if found, err := filepath.Glob(pattern + name); err == nil && len(found) > 0 {
			return found[0]
		}
	}
	t.Skipf("needs the library %s", name)
	return ""
}

func needLoader(t *testing.T) string {
	t.Helper()
	return needLibrary(t, map[string]string{"amd64": "ld-linux-x86-64.so.2", "arm64": "ld-linux-aarch64.so.1"}[runtime.GOARCH])
}

// threads returns the names of a process's threads, sorted.
func threads(t *testing.T, pid int) []string {
	t.Helper()
	files, err := filepath.Glob(proc(pid, "task/*/comm"))
	if err != nil || len(files) == 0 {
		t.Fatalf("the threads of %d: %v", pid, err)
	}
	names := make([]string, 0, len(files))
	for _, file := range files {
		if name, err := os.ReadFile(file); err == nil {
			names = append(names, strings.TrimSpace(string(name)))
		}
	}
	slices.Sort(names)
	return names
}

// private returns a process's private memory in bytes.
func private(t *testing.T, pid int) (bytes int) {
	t.Helper()
	rollup, err := os.ReadFile(proc(pid, "smaps_rollup"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(rollup)) {
		var kib int
		if name, value, ok := strings.Cut(line, ":"); ok && (name == "Private_Clean" || name == "Private_Dirty") {
			if _, err := fmt.Sscan(value, &kib); err != nil {
				t.Fatal(err)
			}
			bytes += kib << 10
		}
	}
	return bytes
}

// maxPrivate is how many bytes of memory an idle client may have for itself.
const maxPrivate = 6200 << 10

// A node has a client for every mount: one that was not used has few threads and little memory of its own. Clients share the memory of
// the program's file, so there are two.
func TestAnIdleMountIsSmall(t *testing.T) {
	b := newOwnBench(t)
	in := b.invocation(t)
	other := mount(t, in, b.keys, nil)
	m := mount(t, in, b.keys, nil)
	time.Sleep(time.Second)
	names, bytes := threads(t, m.cmd.Process.Pid), private(t, m.cmd.Process.Pid)
	t.Logf("%d KiB, %d threads: %q", bytes>>10, len(names), names)
	if bytes > maxPrivate {
		t.Errorf("it has %d bytes of private memory, more than %d", bytes, maxPrivate)
	}
	loops := 0
	for _, name := range names {
		known := false
		for _, prefix := range []string{"AwsEventLoop", "AwsHostResolver", "fuse-worker", "mem-pool", "report", "s3-csi-mountpoi"} {
			known = known || strings.HasPrefix(name, prefix)
		}
		if !known {
			t.Errorf("it has a thread %q", name)
		}
		if strings.HasPrefix(name, "AwsEventLoop") {
			loops++
		}
	}
	// One for requests and one for their data for each Gbit/s of the default.
	if loops > 20 || len(names) > 32 {
		t.Errorf("it has %d threads, %d of them event loops", len(names), loops)
	}
	m.unmount(t)
	other.unmount(t)
}
