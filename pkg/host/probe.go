package host

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ReadRoot opens a directory and reads its first entries through the mount. That proves that the client answers and reaches its
// bucket; stat and statfs prove neither. The errno stays in the chain. Like Statfs, it is bounded by ctx and blocks at most one
// thread for a directory.
func (n *Namespace) ReadRoot(ctx context.Context, dir string) error {
	_, err := n.probe(ctx, "reading directory "+dir, func() (any, error) { return nil, readRoot(dir) })
	return err
}

// Statfs is statfs(2) of a directory, bounded by ctx. Concurrent calls for one directory share one system call. When that is
// overdue, further calls fail at once (fault.Timeout) until it ends, so that an unresponsive file system blocks one thread only.
// The errno stays in the chain.
func (n *Namespace) Statfs(ctx context.Context, dir string) (unix.Statfs_t, error) {
	value, err := n.probe(ctx, "reading the usage of "+dir, func() (any, error) {
		var st unix.Statfs_t
		err := uninterrupted(func() error { return unix.Statfs(dir, &st) })
		if err != nil {
			err = fmt.Errorf("reading the usage of %s: %w", dir, err)
		}
		return st, err
	})
	if err != nil {
		return unix.Statfs_t{}, err
	}
	return value.(unix.Statfs_t), nil //nolint:forcetypeassert // what the function above returns
}

// Answers asks a file system for its usage and for the attributes of its root, which every client answers without its bucket, and which
// kubelet and container runtimes ask for. Both must be answered. The error is that of the attributes: a client may report any error of its
// service as that of the usage, also one that looks like the end of the connection. Only if the root has become unusable, because the
// client changed its type, the end of the connection shows in the usage alone. It is bounded like Statfs.
func (n *Namespace) Answers(ctx context.Context, dir string) error {
	_, err := n.probe(ctx, "asking "+dir, func() (any, error) {
		return nil, uninterrupted(func() error {
			var st unix.Statfs_t
			usage := unix.Statfs(dir, &st)
			if errors.Is(usage, unix.EINTR) {
				return usage
			}
			var attributes unix.Statx_t
			err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &attributes)
			if errors.Is(err, unix.EIO) && (errors.Is(usage, unix.ENOTCONN) || errors.Is(usage, unix.ECONNABORTED)) {
				err = usage // the kernel answers for the root with EIO, with and without a client
			}
			if err != nil {
				return fmt.Errorf("reading the attributes of %s: %w", dir, err)
			}
			return nil
		})
	})
	return err
}

// probe runs fn in the namespace and returns its value. Calls with the same what share one run.
func (n *Namespace) probe(ctx context.Context, what string, fn func() (any, error)) (any, error) {
	if err := n.checkOverdue(ctx, what); err != nil {
		return nil, err
	}
	c, err := n.joinProbe(ctx, what, fn)
	if err == nil {
		err = n.awaitCall(ctx, c)
	}
	if err != nil {
		return nil, err
	}
	return c.value, nil
}

func (n *Namespace) joinProbe(ctx context.Context, what string, fn func() (any, error)) (*call, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c, ok := n.probes[what]; ok {
		if _, overdue := n.overdue[c]; overdue {
			return nil, fault.Errorf(fault.Timeout, "%s: an earlier call has not been answered for %s", what, age(c))
		}
		return c, nil
	}
	c := n.newCall(ctx, what)
	n.probes[what] = c
	n.startCall(c, n.entry(), func() (err error) {
		c.value, err = fn()
		return err
	})
	return c, nil
}

func readRoot(dir string) error {
	var fd int
	if err := uninterrupted(func() (err error) {
		fd, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	}); err != nil {
		return fmt.Errorf("opening %s: %w", dir, err)
	}
	defer unix.Close(fd)
	var buf [4096]byte
	if err := uninterrupted(func() error {
		_, err := unix.Getdents(fd, buf[:])
		return err
	}); err != nil {
		return fmt.Errorf("reading %s: %w", dir, err)
	}
	return nil
}

// uninterrupted repeats a system call that a signal interrupted. Go's runtime sends signals to its threads, and the kernel reports
// them to the FUSE client. The repetitions are bounded, for clients that always return EINTR.
func uninterrupted(call func() error) error {
	for try := 0; ; try++ {
		if err := call(); try == openTries || !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// IsCorruptedMount reports whether an error of a file system call shows a mount that cannot be used any more, as kubelet judges
// it. Unlike kubelet's function it unwraps the error, and it knows ECONNABORTED, the answer of an aborted FUSE connection. EIO
// and EACCES are in the list: a client that is running can return those, too.
func IsCorruptedMount(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && (errno == unix.ECONNABORTED || mountutils.IsCorruptedMnt(errno))
}
