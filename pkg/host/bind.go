package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// threadMountinfo shows the calling thread's mount namespace.
const threadMountinfo = "/proc/thread-self/mountinfo"

// BindAttrs are a bind mount's own flags; nosuid and nodev are always set.
type BindAttrs struct {
	ReadOnly, NoExec bool
	// Shared makes it the first mount of a peer group, so that binds of it can be its slaves. Container runtimes refuse
	// HostToContainer mounts of a private mount.
	Shared bool
}

// Bind mounts the directory source on target; call it inside Do. Both are O_PATH descriptors opened in the same namespace, so there
// is no request to a file system: the source may be a subdirectory, and stale. Mounts below the source are not included. The new
// mount has all its flags before a process can see it. No mount propagates to it, and none from it unless it is Shared.
func Bind(source, target *os.File, attrs BindAttrs) error {
	set := uint64(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	if attrs.ReadOnly {
		set |= unix.MOUNT_ATTR_RDONLY
	}
	if attrs.NoExec {
		set |= unix.MOUNT_ATTR_NOEXEC
	}
	propagation := uint64(unix.MS_PRIVATE)
	if attrs.Shared {
		propagation = unix.MS_SHARED
	}
	if err := bind(source, target, set, propagation); err != nil {
		return fmt.Errorf("binding %s to %s: %w", source.Name(), target.Name(), err)
	}
	return nil
}

// bind clones the mount of source, sets attributes, attaches it to target and gives it the propagation type.
func bind(source, target *os.File, set uint64, propagation uint64) error {
	fd, err := cloneTree(source)
	if err != nil {
		return fmt.Errorf("cloning the mount: %w", err)
	}
	defer unix.Close(fd) // an unattached clone is removed with its descriptor
	attr := unix.MountAttr{Attr_set: set, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("setting mount flags: %w", err)
	}
	if err := moveMount(fd, target, 0); err != nil {
		return fmt.Errorf("attaching the mount: %w", err)
	}
	// Attaching it below a shared mount made it shared, too. The descriptor still refers to it.
	return setPropagation(fd, propagation)
}

// cloneTree makes an unattached clone of the mount of a file. Its root is the file. The clone is in the peer group of the original.
func cloneTree(f *os.File) (fd int, err error) {
	return unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
}

// moveMount attaches a mount to a directory or file.
func moveMount(fd int, to *os.File, flags int) error {
	return unix.MoveMount(fd, "", int(to.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH|flags)
}

// setPropagation sets the propagation type of the mount that fd was opened on.
func setPropagation(fd int, propagation uint64) error {
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: propagation}); err != nil {
		return fmt.Errorf("setting mount propagation: %w", err)
	}
	return nil
}

// SharedMountpoint makes an existing directory a shared mount point in a peer group of its own. Copies of the mounts below it, in
// other mount namespaces, are then unmounted with the originals. That includes copies that no mount table shows: systemd moves the
// root of a sandboxed service over the old one, whose mounts cannot be reached any more. Without propagation, such copies would
// keep their clients running as long as the service runs. Call it inside Do; it is idempotent.
func SharedMountpoint(dir string) error {
	f, err := OpenDir(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	top, mounts, err := findMount(context.Background(), f)
	if err != nil {
		return err
	}
	place, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("resolving %s: %w", dir, err)
	}
	switch {
	case !isSelfBind(top, place, mounts):
		for _, m := range mounts {
			if strings.HasPrefix(m.Mountpoint, place+"/") {
				return fault.Errorf(fault.Precondition, "%s must become a mount point, "+
					"which would hide %s (%s); unmount that first", dir, m.Mountpoint, m.Source)
			}
		}
		err = bind(f, f, 0, unix.MS_SHARED)
	case !sharesAlone(top, mounts):
		// An earlier call was killed in between. It is made private first, to get its own group: in the group of the mount
		// around it, every mount below would appear twice.
		if err = setPropagation(int(f.Fd()), unix.MS_PRIVATE); err == nil {
			err = setPropagation(int(f.Fd()), unix.MS_SHARED)
		}
	}
	if err != nil {
		return fmt.Errorf("making %s a shared mount point: %w", dir, err)
	}
	return nil
}

// sharesAlone reports whether a mount is shared, in another group than its parent mount.
func sharesAlone(m Mount, mounts []Mount) bool {
	return len(m.Optional) == 1 && m.Shared() &&
		!slices.ContainsFunc(mounts, func(p Mount) bool { return p.ID == m.Parent && p.peerGroup() == m.peerGroup() })
}

// isSelfBind reports whether top is a bind of the directory place on itself.
func isSelfBind(top Mount, place string, mounts []Mount) bool {
	if top.Mountpoint != place {
		return false
	}
	for _, m := range mounts {
		if m.ID != top.Parent || m.Major != top.Major || m.Minor != top.Minor {
			continue
		}
		rel, err := filepath.Rel(m.Mountpoint, place)
		return err == nil && path.Join(m.Root, rel) == top.Root
	}
	return false
}

// MountID returns the id of the mount that a descriptor was opened on, as in Mount.ID, without a request to the file system.
func MountID(f *os.File) (int, error) {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return 0, fmt.Errorf("finding the mount of %s: %w", f.Name(), err)
	}
	if id, ok := fdinfoMountID(string(info)); ok {
		return id, nil
	}
	return 0, fmt.Errorf("finding the mount of %s: its fdinfo has no mnt_id: %w", f.Name(), errors.ErrUnsupported)
}

// findMount returns the mount that a descriptor was opened on, and the mount table of the calling thread's namespace.
func findMount(ctx context.Context, f *os.File) (Mount, []Mount, error) {
	mounts, err := readMounts(ctx, threadMountinfo)
	if err != nil {
		return Mount{}, nil, err
	}
	id, err := MountID(f)
	if err != nil {
		return Mount{}, nil, err
	}
	for _, m := range mounts {
		if m.ID == id {
			return m, mounts, nil
		}
	}
	return Mount{}, nil, fault.Errorf(fault.Busy, "mount %d of %s is not in the mount table; it was probably unmounted", id, f.Name())
}

// fdinfoMountID reads mnt_id from the text of a fdinfo file, proc_pid_fdinfo(5).
func fdinfoMountID(info string) (int, bool) {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			id, err := strconv.Atoi(strings.TrimSpace(value))
			return id, err == nil
		}
	}
	return 0, false
}

const (
	// firstUnmountRetry and lastUnmountRetry bound the doubling interval between attempts to unmount a busy mount.
	firstUnmountRetry = 5 * time.Millisecond
	lastUnmountRetry  = 250 * time.Millisecond
	// usersTimeout bounds the search for the users of a busy mount, which runs after the caller's deadline.
	usersTimeout = 300 * time.Millisecond
)

// Unmount unmounts the top mount at target, which must be unused (else unix.EBUSY); call it inside Do. It is never lazy, so
// success means that the mount is gone from this namespace. Symbolic links are followed in all but the last component. The
// error is unix.EINVAL if target is not a mount point and unix.ENOENT if it does not exist.
func Unmount(target string) error { return unmount(target, target, 0) }

// Detach unmounts the top mount at target lazily; call it inside Do. Use it only for file systems whose client has exited,
// where no data can be lost. Its errors are those of Unmount, except unix.EBUSY.
func Detach(target string) error { return unmount(target, target, unix.MNT_DETACH) }

// UnmountTarget is Unmount for a target path: it refuses symbolic links below root, as OpenTarget does.
func UnmountTarget(root, target string) error { return unmountTarget(root, target, 0) }

// RemoveMountPoint detaches everything that is mounted on a directory of the driver's own, and removes the directory, which may be missing.
// Call it inside Do.
func RemoveMountPoint(dir string) error {
	for {
		err := Detach(dir)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// DetachTarget is Detach for a target path: it refuses symbolic links below root, as OpenTarget does.
func DetachTarget(root, target string) error { return unmountTarget(root, target, unix.MNT_DETACH) }

func unmountTarget(root, target string, flags int) error {
	parent, name, err := openParent(root, target)
	if err != nil {
		return err
	}
	defer parent.Close()
	return unmount(fdPath(parent)+"/"+name, target, flags)
}

// unmount unmounts a path, which errors name target.
func unmount(path, target string, flags int) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW|flags)
	switch {
	case err == nil:
		return nil
	case flags&unix.MNT_DETACH != 0:
		return fmt.Errorf("detaching %s: %w", target, err)
	}
	return fmt.Errorf("unmounting %s: %w", target, err)
}

// UnmountWhenIdle calls once, which is Unmount or UnmountTarget for m, until it succeeds. While the mount is busy it retries
// with backoff until ctx ends. It then returns a fault.Busy that names the processes that use the mount. Each attempt is a Do of
// its own, on the account of ctx. A path that is no longer a mount point (unix.EINVAL) counts as success, and any other error
// is returned at once.
func (n *Namespace) UnmountWhenIdle(ctx context.Context, m Mount, once func() error) error {
	busy := false
	for wait := firstUnmountRetry; ; wait = min(2*wait, lastUnmountRetry) {
		err := n.Do(ctx, "unmounting "+m.Mountpoint, once)
		busy = busy || errors.Is(err, unix.EBUSY)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL):
			return nil
		case !errors.Is(err, unix.EBUSY) && (!busy || ctx.Err() == nil): // ctx may have ended during a later attempt
			return fmt.Errorf("unmounting %s: %w", m.Mountpoint, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		if ctx.Err() == nil {
			continue
		}
		return fault.Errorf(fault.Busy, "unmounting %s: it is in use by %s", m.Mountpoint, n.describeUsers(ctx, m))
	}
}

// describeUsers names the processes that use a mount and this driver's own overdue calls on it. It runs after ctx has ended.
func (n *Namespace) describeUsers(ctx context.Context, m Mount) string {
	ctx, cancel := context.WithTimeout(For(context.WithoutCancel(ctx), ""), usersTimeout)
	defer cancel()
	users, _ := n.Users(ctx, m)
	for _, call := range n.OverdueCalls() {
		if strings.Contains(call, m.Mountpoint) {
			users = append(users, "this driver, in a call that the client does not answer: "+call)
		}
	}
	if len(users) == 0 {
		return "processes that this driver cannot see"
	}
	return strings.Join(users, ", ")
}
