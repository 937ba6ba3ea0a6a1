package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// nsHandle is a mount namespace that the calling thread has entered. This process's /proc stays open in it, because a container may
// have no /proc, and its own would not show this thread.
type nsHandle struct {
	proc int
	// inUserNS means that the namespace belongs to a user namespace below this process's, whose root may change mounts that are
	// not locked.
	inUserNS bool
	pids     []int // processes of the namespace, if it is not the Namespace's
}

type namespaceRef struct {
	n     *Namespace
	other *otherNamespace // nil: the Namespace itself, and no more is known
	pid   int             // identifies the namespace in messages and results
	owner string
	name  string // for messages: " in the mount namespace of sh (pid 12)"
}

func (n *Namespace) refTo(o *otherNamespace) namespaceRef {
	return namespaceRef{n, o, o.pids[0], o.owner, " in the mount namespace of " + processName(o.pids[0])}
}

// do is Namespace.Do in the referenced namespace, always on a thread of its own. If no process of the namespace runs any more, the
// error is errEnded.
func (r namespaceRef) do(ctx context.Context, what string, fn func(h nsHandle) error) error {
	if r.other != nil { // its processes choose where its paths lead, also through their own file systems
		ctx = For(ctx, accountOf(r.pid))
	}
	h := nsHandle{proc: -1}
	enter := func() (err error) {
		if h.proc, err = unix.Open(proc.Dir, openDir, 0); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				unix.Close(h.proc)
			}
		}()
		switch {
		case r.other == nil && r.n.foreign:
			return enterHost()
		case r.other == nil:
			return unix.Unshare(unix.CLONE_FS) // the thread needs a working directory of its own here, too
		}
		ns, err := r.other.enter(h.proc)
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		h.pids = r.other.pids
		h.inUserNS, err = belongsBelow(h.proc, ns)
		return err
	}
	return r.n.runCall(ctx, what, enter, func() error {
		defer unix.Close(h.proc)
		return fn(h)
	})
}

// timeLimit returns the time for work in the namespace, for which one for this process's own is given.
func (r namespaceRef) timeLimit(own time.Duration) time.Duration {
	if r.other == nil {
		return own
	}
	return min(own, otherBound)
}

// belongsBelow reports whether a user namespace below this process's owns a mount namespace.
func belongsBelow(procDir, ns int) (bool, error) {
	owner, err := unix.IoctlRetInt(ns, unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return false, nil // neither this process's user namespace nor one below it
	}
	if err != nil {
		return false, fmt.Errorf("finding the user namespace that owns the mount namespace: %w", err)
	}
	defer unix.Close(owner)
	var theirs, ours unix.Stat_t
	if err := unix.Fstat(owner, &theirs); err != nil {
		return false, fmt.Errorf("finding the user namespace that owns the mount namespace: %w", err)
	}
	if err := unix.Fstatat(procDir, "self/ns/user", &ours, 0); err != nil {
		return false, fmt.Errorf("finding this process's user namespace: %w", err)
	}
	return theirs.Ino != ours.Ino || theirs.Dev != ours.Dev, nil
}

// mounts reads the namespace's mount table, as seen from its root directory.
func (h nsHandle) mounts(ctx context.Context) ([]Mount, error) {
	file := tableFile{dir: h.proc, path: "thread-self/mountinfo"}
	if h.pids != nil {
		file.limit = maxTable
	}
	table, err := file.parse(ctx)
	return table.mounts, err
}

// errHidden means that no path leads to a mount.
var errHidden = errors.New("it is hidden below another mount")

// open opens the root of a mount, which must be the top one on its mount point, without a request to its file system. A container
// can change what the path leads to, so the mount's id and device are checked; the kernel may have reused the id alone.
func (h nsHandle) open(m Mount) (*os.File, error) {
	fd, err := unix.Open(m.Mountpoint, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", m.Mountpoint, err)
	}
	f := os.NewFile(uintptr(fd), m.Mountpoint)
	if err := h.check(f, m); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// openMount is nsHandle.open in a namespace with this process's /proc.
func openMount(m Mount) (*os.File, error) {
	procDir, err := unix.Open(proc.Dir, openDir, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(procDir)
	return nsHandle{proc: procDir}.open(m)
}

// check returns nil if a descriptor is on the mount m, else errHidden.
func (h nsHandle) check(f *os.File, m Mount) error {
	info, err := readAt(h.proc, "self/fdinfo/"+strconv.Itoa(int(f.Fd())))
	if err != nil {
		return err
	}
	if id, ok := fdinfoMountID(string(info)); !ok || id != m.ID {
		return errHidden
	}
	st, err := cachedStat(f)
	if err != nil {
		return err
	}
	if st.Dev_major != m.Major || st.Dev_minor != m.Minor {
		return errHidden
	}
	return nil
}

// cachedStat returns what the kernel knows of a file without a request to its file system: the device and the type.
func cachedStat(f *os.File) (unix.Statx_t, error) {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, 0, &st)
	if err != nil {
		return st, fmt.Errorf("finding the device of %s: %w", f.Name(), err)
	}
	return st, nil
}

// detach detaches the mount that f was opened on, if it is still the top one on its mount point. umount2 always takes the top mount
// of a path, also of a descriptor's. A mount that was stacked after the check is detached instead; only a process that may mount
// there can cause that, and only to its own mount.
func (h nsHandle) detach(f *os.File, m Mount) error {
	top, err := h.open(m)
	if err != nil {
		return err
	}
	top.Close()
	if err := unix.Fchdir(h.proc); err != nil { // only this thread's working directory
		return fmt.Errorf("changing to %s: %w", proc.Dir, err)
	}
	if err := unix.Unmount("self/fd/"+strconv.Itoa(int(f.Fd())), unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching the mount: %w", err)
	}
	return nil
}

func readAt(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return io.ReadAll(f)
}
