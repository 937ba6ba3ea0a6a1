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
	fd, err := unix.OpenTree(int(source.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("cloning the mount: %w", err)
	}
	defer unix.Close(fd) // an unattached clone is removed with its descriptor
	attr := unix.MountAttr{Attr_set: set, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("setting mount flags: %w", err)
	}
	if err := unix.MoveMount(fd, "", int(target.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attaching the mount: %w", err)
	}
	// Attaching it below a shared mount made it shared, too. The descriptor still refers to it.
	return setPropagation(fd, propagation)
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
		// An earlier call was killed in between. It is made private first, to get its own group: in the group of the mount
		// around it, every mount below would appear twice.
		if err := setPropagation(int(f.Fd()), unix.MS_PRIVATE); err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
		return wrapDir(dir, setPropagation(int(f.Fd()), unix.MS_SHARED))
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Mountpoint, place+"/") {
			return fault.Errorf(fault.Precondition, "%s must become a mount point, "+
				"which would hide %s (%s); unmount that first", dir, m.Mountpoint, m.Source)
		}
	}
	return wrapDir(dir, bind(f, f, 0, unix.MS_SHARED))
}

func wrapDir(dir string, err error) error {
	if err != nil {
		return fmt.Errorf("making %s a shared mount point: %w", dir, err)
	}
	return nil
}

// sharesAlone reports whether a mount is shared, in another group than its parent mount.
func sharesAlone(m Mount, mounts []Mount) bool {
	group := peerGroup(m)
	return len(m.Optional) == 1 && group != "" && !slices.ContainsFunc(mounts, func(p Mount) bool { return p.ID == m.Parent && peerGroup(p) == group })
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
	return Mount{}, fault.Errorf(fault.Busy, "mount %d of %s is not in the mount table; it was probably unmounted", id, f.Name())
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
