package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// fusectlMagic is FUSE_CTL_SUPER_MAGIC of the kernel's fs/fuse/control.c.
const fusectlMagic = 0x65735543

// Fusectl is the kernel's control file system for FUSE connections (Documentation/filesystems/fuse.rst). A connection is named by
// its mount's minor device number; the major number of a FUSE mount is 0. The kernel reuses a number as soon as the mount is gone,
// so a number is valid only as long as its mount is in the mount table. It is safe for concurrent use.
type Fusectl struct {
	namespace *Namespace
	dir       string

	mu    sync.Mutex
	found string // where it was found last
}

// NewFusectl uses the control file system where the host has mounted it (usually /sys/fs/fuse/connections). If it is not mounted,
// the first call mounts it on dir, a directory of the driver's own that is made if it does not exist.
func NewFusectl(n *Namespace, dir string) *Fusectl { return &Fusectl{namespace: n, dir: dir} }

// Waiting returns the number of the connection's requests that the client has not answered. ok is false if the connection does not
// exist.
func (f *Fusectl) Waiting(ctx context.Context, minor uint32) (waiting int, ok bool, err error) {
	all, err := f.WaitingAll(ctx, []uint32{minor})
	waiting, ok = all[minor]
	return waiting, ok, err
}

// WaitingAll is Waiting for several connections. Those that do not exist are not in the result. The files belong to the kernel, so
// no client delays the others' numbers.
func (f *Fusectl) WaitingAll(ctx context.Context, minors []uint32) (map[uint32]int, error) {
	return Call(ctx, f.namespace, "reading the waiting requests of FUSE connections", nil, func() (map[uint32]int, error) {
		all := make(map[uint32]int, len(minors))
		for _, minor := range minors {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			n, ok := 0, false
			dir, err := f.connection(ctx, minor)
			if err == nil && dir != "" {
				n, ok, err = readWaiting(path.Join(dir, "waiting"))
			}
			if err != nil {
				return nil, fmt.Errorf("reading the waiting requests of FUSE connection %d: %w", minor, err)
			}
			if ok {
				all[minor] = n
			}
		}
		return all, nil
	})
}

func readWaiting(file string) (waiting int, ok bool, err error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, unix.ENOENT) || err == nil && len(text) == 0 { // the connection ended in between: its open files are empty
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	waiting, err = strconv.Atoi(strings.TrimSpace(string(text)))
	return waiting, err == nil, err
}

// Abort ends a connection: every waiting and every later request fails, which unblocks the processes that wait for them. A missing
// connection is not an error.
func (f *Fusectl) Abort(ctx context.Context, minor uint32) error {
	c, err := f.Open(ctx, minor)
	if err != nil || c == nil {
		return err
	}
	defer c.Close()
	return c.Abort()
}

// Connection is an open FUSE connection. It never becomes another one, though the kernel reuses its number after it has ended.
type Connection struct {
	minor uint32
	dir   *os.File // a location only; the kernel removes its files with the connection
}

// Open opens a connection; nil is that there is none.
func (f *Fusectl) Open(ctx context.Context, minor uint32) (*Connection, error) {
	what := fmt.Sprintf("opening FUSE connection %d", minor)
	return Call(ctx, f.namespace, what, (*Connection).Close, func() (c *Connection, err error) {
		dir, err := f.connection(ctx, minor)
		if err != nil || dir == "" {
			return nil, err
		}
		fd, err := unix.Open(dir, openDir, 0)
		if errors.Is(err, unix.ENOENT) { // it has just ended
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		return &Connection{minor, os.NewFile(uintptr(fd), dir)}, nil
	})
}

// Waiting is Fusectl.Waiting of the connection.
func (c *Connection) Waiting() (waiting int, ok bool, err error) {
	return readWaiting(fdPath(c.dir) + "/waiting")
}

// Abort is Fusectl.Abort of the connection.
func (c *Connection) Abort() error {
	f, err := os.OpenFile(fdPath(c.dir)+"/abort", os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("1")
		f.Close()
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("aborting FUSE connection %d: %w", c.minor, err)
	}
	return nil
}

// Close closes it; nil is permitted.
func (c *Connection) Close() {
	if c != nil {
		c.dir.Close()
	}
}

// maxFinds bounds the searches for the control file system, which another process may unmount after it was found.
const maxFinds = 3

// connection returns a connection's directory, "" if there is no such connection. It runs inside Do.
func (f *Fusectl) connection(ctx context.Context, minor uint32) (string, error) {
	for range maxFinds {
		root, err := f.root(ctx)
		if err != nil {
			return "", err
		}
		dir := path.Join(root, strconv.FormatUint(uint64(minor), 10))
		switch err := unix.Access(dir, unix.F_OK); {
		case err == nil:
			return dir, nil
		case !errors.Is(err, unix.ENOENT):
			return "", fmt.Errorf("looking for FUSE connection %d: %w", minor, err)
		case isFusectl(root):
			return "", nil
		}
	}
	return "", fault.Errorf(fault.Busy, "looking for FUSE connection %d: another process keeps unmounting the control file system", minor)
}

// root finds or mounts the control file system. It runs inside Do.
func (f *Fusectl) root(ctx context.Context) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.found != "" && isFusectl(f.found) {
		return f.found, nil
	}
	mounts, err := readMounts(ctx, threadMountinfo)
	if err != nil {
		return "", err
	}
	for _, m := range mounts {
		// It may be mounted read-only, which prevents aborts, or be hidden below another mount.
		if m.FSType == "fusectl" && m.Root == "/" && !m.ReadOnly() && isFusectl(m.Mountpoint) {
			f.found = m.Mountpoint
			return f.found, nil
		}
	}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return "", fmt.Errorf("creating the mount point of FUSE's control file system: %w", err)
	}
	if err := unix.Mount("fusectl", f.dir, "fusectl", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return "", fault.Errorf(fault.Precondition, "mounting FUSE's control file system on %s (modprobe fuse?): %w", f.dir, err)
	}
	f.found = f.dir
	return f.found, nil
}

func isFusectl(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == fusectlMagic
}
