package osfile

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// answer listens like the driver and answers each connection with the next message and the files that belong to it.
func answer(t *testing.T, path string, messages []string, files ...*os.File) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	var oob []byte
	if len(files) > 0 {
		var fds []int
		for _, f := range files {
			fds = append(fds, int(f.Fd()))
		}
		oob = unix.UnixRights(fds...)
	}
	go func() {
		for _, m := range messages {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if m != "" {
				_, _, _ = c.(*net.UnixConn).WriteMsgUnix([]byte(m), oob, nil)
			}
			c.Close()
		}
	}()
}

func openFile(t *testing.T, path string) *os.File {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("needs %s: %v", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestReceiveFuse(t *testing.T) {
	fuse, null := openFile(t, "/dev/fuse"), openFile(t, os.DevNull)
	for name, tc := range map[string]struct {
		messages []string
		files    []*os.File
		err      string // "": none
	}{
		"descriptor":         {[]string{`{"volumeName":"v"}`}, []*os.File{fuse}, ""},
		"after a restart":    {[]string{"", "", `{}`}, []*os.File{fuse}, ""},
		"refused":            {[]string{`{"error":"another client"}`}, nil, "another client"},
		"no descriptor":      {[]string{`{}`}, nil, "0 descriptors"},
		"two":                {[]string{`{}`}, []*os.File{fuse, fuse}, "2 descriptors"},
		"another file":       {[]string{`{}`}, []*os.File{null}, "not of /dev/fuse"},
		"not JSON":           {[]string{"x"}, []*os.File{fuse}, "driver's message"},
		"refused with a fd":  {[]string{`{"error":"no"}`}, []*os.File{fuse}, "no"},
		"longer than it may": {[]string{`{"error":"` + strings.Repeat("x", 600) + `"}`}, nil, "driver's message"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			answer(t, path, tc.messages, tc.files...)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			fd, err := ReceiveFuse(ctx, path)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) || ctx.Err() != nil {
					t.Fatalf("%d, %v", fd, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("flags %x, %v: other programs inherit it", flags, err)
			}
		})
	}
}

func TestReceiveWaitsForTheSocketUntilItsContextEnds(t *testing.T) {
	fuse, path := openFile(t, "/dev/fuse"), filepath.Join(t.TempDir(), "s")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := ReceiveFuse(ctx, path); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, unix.ENOENT) {
		t.Errorf("without a socket: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		fd, err := ReceiveFuse(context.Background(), path)
		unix.Close(fd)
		done <- err
	}()
	answer(t, path, []string{`{}`}, fuse)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A driver that never answers does not hold a program longer than it waits.
func TestReceiveIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := ReceiveFuse(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestEncodeFitsTheReadersBuffer(t *testing.T) {
	for _, m := range []FuseMessage{
		{}, {VolumeName: "csi-1"}, {Error: strings.Repeat("x", 5000)}, {Error: strings.Repeat("\x01", 5000)}, {VolumeName: strings.Repeat("v", 600)},
	} {
		b := m.Encode()
		got, err := decode(b)
		if err != nil || len(b) > maxMessage || (got.Error == "") != (m.Error == "") {
			t.Errorf("%q: %v", b, err)
		}
	}
}

func FuzzTake(f *testing.F) {
	f.Add([]byte(`{"volumeName":"v"}`), []byte{})
	f.Add([]byte(`{"error":"x"}`), make([]byte, 32))
	f.Add([]byte(``), []byte{16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0})
	f.Fuzz(func(t *testing.T, message, oob []byte) {
		if fds, err := Rights(oob); err == nil && len(fds) > 0 {
			t.Skip("numbers of descriptors that this process may have")
		}
		if fd, err := take(message, oob); err == nil {
			t.Fatalf("descriptor %d of a message without one", fd)
		}
	})
}
