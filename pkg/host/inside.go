//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// inside is a mount namespace seen from a throwaway thread that is in it. A container need not have a /proc, and its
// own does not show this thread, so this process's is kept open.
type inside struct {
	proc int
	// lesser tells that the namespace belongs to a user namespace below this process's: its root may change mounts
	// that were not locked.
	lesser bool
	pids   []int // processes of another namespace than the Namespace's
}

// place is a mount namespace to work in.
type place struct {
	n     *Namespace
	other *otherNamespace // nil: the namespace itself
}

// do runs fn on a thread of its own in the namespace. Otherwise it is Namespace.Do. Where no process leads there any
// more the error is errEnded.
func (p place) do(ctx context.Context, what string, fn func(in inside) error) error {
	if p.other != nil { // its paths lead where its processes like, also through file systems of their own
		ctx = For(ctx, accountOf(p.pid()))
	}
	in := inside{proc: -1}
	enter := func() (err error) {
		if in.proc, err = unix.Open(procDir, openDir, 0); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				unix.Close(in.proc)
			}
		}()
		switch {
		case p.other == nil && p.n.foreign:
			return enterHost()
		case p.other == nil:
			return unix.Unshare(unix.CLONE_FS) // the working directory is to be the thread's own here too
		}
		ns, err := p.other.open()
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		in.pids = p.other.pids
		if in.lesser, err = belongsBelow(ns); err != nil {
			return err
		}
		return enterNamespace(ns)
	}
	return p.n.run(ctx, what, enter, func() error {
		defer unix.Close(in.proc)
		return fn(in)
	})
}

// pid leads to the namespace in messages and results; 0 is the namespace itself.
func (p place) pid() int {
	if p.other == nil {
		return 0
	}
	return p.other.pids[0]
}

// cgroup is the text by which the namespace was picked.
func (p place) cgroup() string {
	if p.other == nil {
		return ""
	}
	return p.other.marked
}

// name is the namespace in messages: " in the mount namespace of sh (pid 12)", or "".
func (p place) name() string {
	if p.other == nil {
		return ""
	}
	return " in the mount namespace of " + processName(p.pid())
}

// belongsBelow tells whether a mount namespace is owned by another user namespace than this process's.
func belongsBelow(ns int) (bool, error) {
	owner, err := unix.IoctlRetInt(ns, unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return false, nil // not this user namespace and not one below it
	}
	if err != nil {
		return false, fmt.Errorf("finding the user namespace that owns the mount namespace: %w", err)
	}
	defer unix.Close(owner)
	var theirs, ours unix.Stat_t
	if err := unix.Fstat(owner, &theirs); err != nil {
		return false, fmt.Errorf("finding the user namespace that owns the mount namespace: %w", err)
	}
	if err := unix.Stat("/proc/self/ns/user", &ours); err != nil {
		return false, fmt.Errorf("finding this process's user namespace: %w", err)
	}
	return theirs.Ino != ours.Ino || theirs.Dev != ours.Dev, nil
}

// mounts is the namespace's mount table, as its root directory shows it.
func (in inside) mounts(ctx context.Context) ([]Mount, error) {
	return stableMounts(ctx, "the mount table", func() ([]byte, error) { return readAt(in.proc, "thread-self/mountinfo") })
}

// errHidden is for a mount that no path leads to.
var errHidden = errors.New("it is hidden below another mount")

// open opens the root of a mount, which must be the top one on its mount point, as a descriptor that asks nothing of
// its file system. The path is the container's to change, so the mount's id and device have to be right; the id alone
// could be another mount's by now.
func (in inside) open(m Mount) (*os.File, error) {
	fd, err := unix.Open(m.Mountpoint, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", m.Mountpoint, err)
	}
	f := os.NewFile(uintptr(fd), m.Mountpoint)
	if err := in.check(f, m); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// check tells whether a descriptor is on a mount: nil, or errHidden.
func (in inside) check(f *os.File, m Mount) error {
	info, err := readAt(in.proc, "self/fdinfo/"+strconv.Itoa(int(f.Fd())))
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

// cachedStat is what the kernel knows of a file without asking its file system: the device and the type.
func cachedStat(f *os.File) (unix.Statx_t, error) {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, 0, &st)
	if err != nil {
		return st, fmt.Errorf("finding the device of %s: %w", f.Name(), err)
	}
	return st, nil
}

// detach detaches the mount that f was opened on, if it is still the top one on its mount point: umount2 takes the top
// one wherever a path ends, also that of a descriptor. What lies on top only since the look just before goes in its
// place; only who may mount there can bring that about, and then to a mount of its own.
func (in inside) detach(f *os.File, m Mount) error {
	top, err := in.open(m)
	if err != nil {
		return err
	}
	top.Close()
	if err := unix.Fchdir(in.proc); err != nil { // the thread's own working directory
		return fmt.Errorf("changing to %s: %w", procDir, err)
	}
	if err := unix.Unmount("self/fd/"+strconv.Itoa(int(f.Fd())), unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching the mount: %w", err)
	}
	return nil
}

// readAt reads a file below a directory that is open.
func readAt(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return io.ReadAll(f)
}

// held are descriptors that are closed when the last of their users is done with them: a call that its caller has
// given up on still uses what it was given.
type held struct {
	mu    sync.Mutex
	users int
	files []*os.File
}

// hold makes an empty set with one user.
func hold() *held { return &held{users: 1} }

// take adds a user, if there still is one.
func (h *held) take() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users == 0 {
		return false
	}
	h.users++
	return true
}

// drop takes a user away.
func (h *held) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users--; h.users > 0 {
		return
	}
	for _, f := range h.files {
		f.Close()
	}
	h.files = nil
}

// add puts a descriptor into the set, for a user.
func (h *held) add(fd int, name string) *os.File {
	f := os.NewFile(uintptr(fd), name)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.files = append(h.files, f)
	return f
}

// using runs fn as a user of all the sets.
func using(fn func() error, sets ...*held) error {
	for i, h := range sets {
		if !h.take() {
			for _, taken := range sets[:i] {
				taken.drop()
			}
			return fault.Errorf(fault.Timeout, "not started: nobody waits for it any more")
		}
	}
	defer func() {
		for _, h := range sets {
			h.drop()
		}
	}()
	return fn()
}
