package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// maxSocketPath is the maximum length of a socket path: the size of sockaddr_un.sun_path without its terminating zero (unix(7)).
const maxSocketPath = 107

type endpoint struct{ network, address string }

// parseEndpoint reads unix:///path, unix:/path, /path, tcp://127.0.0.1:port, tcp://[::1]:port and tcp://localhost:port.
func parseEndpoint(s string) (endpoint, error) {
	if strings.HasPrefix(s, "/") {
		s = "unix://" + s
	}
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		// Relative paths are refused: in "unix://relative", CSI clients may read a host name.
		path = strings.TrimPrefix(path, "//")
		if err := checkAbsolute(path); err != nil {
			return endpoint{}, fmt.Errorf("socket path: %w (want unix:///path/to/csi.sock)", err)
		}
		if len(path) > maxSocketPath {
			return endpoint{}, fmt.Errorf("socket path %q has %d bytes, the maximum is %d", path, len(path), maxSocketPath)
		}
		return endpoint{"unix", path}, nil
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "tcp" || u.Host == "" || (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.User != nil {
		return endpoint{}, fmt.Errorf("%q is neither unix:///path nor tcp://127.0.0.1:port", s)
	}
	if err := checkHostPort(u.Host); err != nil {
		return endpoint{}, err
	}
	if host := u.Hostname(); host != "localhost" {
		if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
			return endpoint{}, fmt.Errorf("%q is not a loopback address, but the CSI protocol has no authentication, so anyone who can reach this port could "+
				"delete volumes; use a UNIX socket, or 127.0.0.1 behind an authenticating proxy", host)
		}
	}
	return endpoint{"tcp", u.Host}, nil
}

// Listen opens a CSI endpoint. A UNIX socket has mode 0600, regardless of the umask. A stale socket of an exited driver is replaced. If
// another process listens on the socket, or the file is not a socket, Listen returns an error. cleanup closes the listener, and removes
// the socket if it is still the one that Listen created.
//
// A lock on the file <socket>.lock, which is held until cleanup, prevents that two drivers serve one socket.
func Listen(ctx context.Context, where string) (lis net.Listener, cleanup func() error, err error) {
	e, err := parseEndpoint(where)
	if err != nil {
		return nil, nil, fmt.Errorf("endpoint %s: %w", where, err)
	}
	if e.network == "unix" {
		lis, cleanup, err = listenUnix(ctx, e.address)
	} else {
		lis, cleanup, err = listenLoopback(ctx, e.address)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("listen on %s: %w", where, err)
	}
	return lis, cleanup, nil
}

func listenLoopback(ctx context.Context, address string) (net.Listener, func() error, error) {
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, nil, err
	}
	// A resolver can give "localhost" any address.
	if a, ok := lis.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		return nil, nil, errors.Join(fmt.Errorf("%s resolved to %s, which is not a loopback address", address, lis.Addr()), lis.Close())
	}
	return lis, func() error { return closeListener(lis) }, nil
}

func listenUnix(ctx context.Context, path string) (_ net.Listener, _ func() error, err error) {
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, nil, err
	}
	unlock := func() error { return errors.Join(os.Remove(lock.Name()), lock.Close()) }
	defer func() {
		if err != nil {
			err = errors.Join(err, unlock())
		}
	}()
	if err := removeStale(ctx, path); err != nil {
		return nil, nil, err
	}
	private := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// bind(2) gives the file the mode of the socket's inode, so it never has a wider mode. umask(2) would affect the whole
		// process.
		var chmod error
		err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmod)
	}}
	lis, err := private.Listen(ctx, "unix", path)
	if err != nil {
		return nil, nil, err
	}
	if u, ok := lis.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // the path may be another process's socket by then
	}
	made, err := os.Lstat(path)
	if err != nil {
		return nil, nil, errors.Join(err, lis.Close())
	}
	return lis, func() error {
		err := closeListener(lis)
		if now, statErr := os.Lstat(path); statErr == nil && os.SameFile(made, now) {
			err = errors.Join(err, os.Remove(path))
		}
		return errors.Join(err, unlock())
	}, nil
}

// closeListener closes a listener that a gRPC server may have closed already.
func closeListener(lis net.Listener) error {
	if err := lis.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// removeStale removes a socket on which no process listens.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is not a socket but %s and is not replaced: remove it, or set another --endpoint", path, fileKind(info.Mode()))
	}
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(fmt.Errorf("another process listens on %s: stop it first", path), conn.Close())
	}
	// Only a refused connection proves that no process listens. Another error may be a full backlog, for example.
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%s exists and may be in use: %w", path, err)
	}
	return os.Remove(path)
}

func fileKind(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m.IsRegular():
		return "a regular file"
	case m.Type() == fs.ModeSymlink:
		return "a symbolic link"
	}
	return "a special file"
}

// lockFile creates and locks the file, or fails at once if the file is locked. The holder of the lock may remove the file.
func lockFile(path string) (*os.File, error) {
	for range 100 {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("directory %s does not exist: create it, or mount it into the container", filepath.Dir(path))
		}
		if err != nil {
			return nil, fmt.Errorf("create the socket's lock file: %w", err)
		}
		ok, err := osfile.TryLock(f)
		if err == nil && !ok {
			err = fmt.Errorf("another driver serves this socket, because it holds the lock %s: stop that driver first", path)
		}
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		// If the previous holder removed the file after it was opened here, this lock protects nothing: try again.
		ours, err1 := f.Stat()
		named, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && os.SameFile(ours, named) {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("lock %s: another process keeps removing the file", path)
}
