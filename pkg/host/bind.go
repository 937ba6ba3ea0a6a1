//go:build linux

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

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// threadMountinfo shows the namespace that the calling thread is in.
const threadMountinfo = "/proc/thread-self/mountinfo"

// BindAttrs are a bind mount's own flags; nosuid and nodev are always set.
type BindAttrs struct {
	ReadOnly, NoExec bool
	// Shared makes it the first of a peer group: what binds it may be its slave. Container runtimes refuse a HostToContainer mount of
	// what is private.
	Shared bool
}

// Bind mounts what source shows on target; call it inside Do. Both are O_PATH descriptors opened in the same
// namespace, so that no file system is asked anything: the source may be a subdirectory, and dead. What is mounted
// below the source is not taken along. The new mount is complete, with its flags, before anybody can see it. Nothing is
// propagated to it, and unless it is Shared nothing from it.
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
	fd, err := unix.OpenTree(int(source.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("cloning the mount: %w", err)
	}
	defer unix.Close(fd) // a clone that was not attached goes with its descriptor
	attr := unix.MountAttr{Attr_set: set, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("setting mount flags: %w", err)
	}
	if err := unix.MoveMount(fd, "", int(target.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attaching the mount: %w", err)
	}
	// Attached below a shared mount it became shared itself; the descriptor is still the same mount.
	return setPropagation(fd, propagation)
}

// setPropagation sets the propagation type of the mount that fd was opened on.
func setPropagation(fd int, propagation uint64) error {
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: propagation}); err != nil {
		return fmt.Errorf("setting mount propagation: %w", err)
	}
	return nil
}

// Unmount unmounts the top mount at path, which must have no user left (else unix.EBUSY); call it inside Do. It is
// never lazy, so that success means that the mount is gone here. Symbolic links are followed in all but the last
// component. What is no mount point is unix.EINVAL, a missing path unix.ENOENT.
func Unmount(target string) error {
	if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmounting %s: %w", target, err)
	}
	return nil
}

// Detach unmounts the top mount at path lazily; call it inside Do. It is for mounts of file systems whose client has exited, of
// which nothing can be lost. What is no mount point is unix.EINVAL, a missing path unix.ENOENT.
func Detach(path string) error {
	if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching %s: %w", path, err)
	}
	return nil
}

// UnmountTarget is Unmount for a target path: symbolic links are refused below root as OpenTarget refuses them.
func UnmountTarget(root, target string) error {
	parent, name, err := openParent(root, target)
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := unix.Unmount(fdPath(parent)+"/"+name, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmounting %s: %w", target, err)
	}
	return nil
}

// SharedMountpoint makes a directory a mount point of its own that shares what is mounted below it, in a peer group of its
// own. Whoever has a copy of those mounts then loses it when the original is unmounted, even where no mount table shows the
// copy: systemd moves the root of a sandboxed service over the old one, whose mounts nobody can reach any more, and copies
// there that nothing is propagated to keep their clients alive for as long as the service runs. Call it inside Do; repeating
// it changes nothing. The directory must exist.
func SharedMountpoint(dir string) error {
	f, err := OpenDir(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	mounts, err := readMounts(context.Background(), threadMountinfo)
	if err != nil {
		return err
	}
	place, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("resolving %s: %w", dir, err)
	}
	top, err := mountOf(f, mounts)
	if err != nil {
		return err
	}
	if isSelfBind(top, place, mounts) {
		if sharesAlone(top, mounts) {
			return nil
		}
		// Left by somebody who died in between, or by an older driver. Private first, for a group of its own: in that of the
		// mount around it, everything would be mounted a second time below this one.
		if err := setPropagation(int(f.Fd()), unix.MS_PRIVATE); err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
		return wrapDir(dir, setPropagation(int(f.Fd()), unix.MS_SHARED))
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Mountpoint, place+"/") {
			return fault.Errorf(fault.Precondition, "%s is to be a mount point of its own, "+
				"but %s (%s) is mounted below it already and would be hidden; unmount it", dir, m.Mountpoint, m.Source)
		}
	}
	return wrapDir(dir, bind(f, f, 0, unix.MS_SHARED))
}

// wrapDir names the directory in an error of SharedMountpoint.
func wrapDir(dir string, err error) error {
	if err != nil {
		return fmt.Errorf("making %s a mount point of its own: %w", dir, err)
	}
	return nil
}

// sharesAlone tells whether a mount is shared in another group than the mount that it is mounted on.
func sharesAlone(m Mount, mounts []Mount) bool {
	group := peerGroup(m)
	return len(m.Optional) == 1 && group != "" && !slices.ContainsFunc(mounts, func(p Mount) bool { return p.ID == m.Parent && peerGroup(p) == group })
}

// isSelfBind tells whether top is a bind of the directory place on itself.
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

// MountID is the id of the mount that a descriptor was opened on, as in Mount.ID. Nothing on the file system is asked.
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

// mountOf finds the mount that a descriptor was opened on.
func mountOf(f *os.File, mounts []Mount) (Mount, error) {
	id, err := MountID(f)
	if err != nil {
		return Mount{}, err
	}
	for _, m := range mounts {
		if m.ID == id {
			return m, nil
		}
	}
	return Mount{}, fault.Errorf(fault.Busy, "mount %d of %s is not in the mount table (unmounted meanwhile?)", id, f.Name())
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
