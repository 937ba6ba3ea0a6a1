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

	"github.com/s3-csi/s3-csi-driver/pkg/flock"
)

// maxSocketPath is what fits into sockaddr_un.sun_path with its final zero (unix(7)).
const maxSocketPath = 107

type endpoint struct{ network, address string }

// parseEndpoint reads unix:///path, unix:/path, /path, tcp://127.0.0.1:port, tcp://[::1]:port and tcp://localhost:port.
func parseEndpoint(s string) (endpoint, error) {
	if strings.HasPrefix(s, "/") {
		s = "unix://" + s
	}
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		// "unix://relative" would be a host name in a URL; CSI clients disagree about it, so it is refused.
		path = strings.TrimPrefix(path, "//")
		if err := checkAbsolute(path); err != nil {
			return endpoint{}, fmt.Errorf("the socket's path: %w (want unix:///path/to/csi.sock)", err)
		}
		if len(path) > maxSocketPath {
			return endpoint{}, fmt.Errorf("the socket's path %q has %d bytes, and Linux allows %d", path, len(path), maxSocketPath)
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
			return endpoint{}, fmt.Errorf("%q is not a loopback address: the CSI protocol has no authentication, and whoever reaches this port can delete volumes; use a UNIX socket, or 127.0.0.1 behind a proxy that authenticates", host)
		}
	}
	return endpoint{"tcp", u.Host}, nil
}

// Listen opens a CSI endpoint. A UNIX socket is made with mode 0600, whatever the umask. A socket that a dead driver left
// is replaced; one that somebody listens on, and a file that is not a socket, are left alone and are errors. cleanup
// closes the listener, and removes the socket if it is still the one that Listen made.
//
// Two drivers that start at once are told apart by a lock on the file <socket>.lock, which the winner holds until cleanup.
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
		// bind(2) gives the file the mode of the socket's own inode: no moment with a wider mode, and no umask(2), which
		// is the whole process's.
		var chmod error
		err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmod)
	}}
	lis, err := private.Listen(ctx, "unix", path)
	if err != nil {
		return nil, nil, err
	}
	if u, ok := lis.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // it would go by name, even if the name is somebody else's by then
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

// closeListener closes what a gRPC server may have closed before.
func closeListener(lis net.Listener) error {
	if err := lis.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// removeStale takes away a socket that nobody listens on.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket but %s; it is not removed: move it away, or choose another --endpoint", path, fileKind(info.Mode()))
	}
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(fmt.Errorf("another process listens on %s; it is not taken over: stop that process first", path), conn.Close())
	}
	// Only a refusal proves that nobody listens. A full backlog, for one, is a sign of life.
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%s exists and cannot be told to be dead: %w", path, err)
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

// lockFile makes the file and locks it, or fails at once if somebody holds it. Whoever holds the lock may remove the file.
func lockFile(path string) (*os.File, error) {
	for range 100 {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("the directory %s does not exist: create it, or mount it into the container", filepath.Dir(path))
		}
		if err != nil {
			return nil, fmt.Errorf("make the socket's lock file: %w", err)
		}
		ok, err := flock.TryLock(f)
		if err == nil && !ok {
			err = fmt.Errorf("another driver serves this socket and holds the lock %s: stop that driver first", path)
		}
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		// A holder that ended between our open and our lock has removed the file: what we hold then has no name.
		ours, err1 := f.Stat()
		named, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && os.SameFile(ours, named) {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s changes all the time: is another process removing it?", path)
}
