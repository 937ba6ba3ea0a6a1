package host

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// In a mount namespace that belongs to a user namespace below the driver's, the kernel has locked the inherited mounts: their flags
// cannot be cleared, and they cannot be unmounted to expose what they cover (mount_namespaces(7), "Restrictions on mount namespaces").
// A clone that the driver attaches there has no locks: the root of the user namespace may remount it with other flags, or unmount
// it. So the driver does not replace a mount there if the clone would be less restricted.

// stricterThan returns the options of m that a container could remove from a clone of source: "ro", unless the file system itself is
// read-only, and the other locked flags that source does not have.
func (m Mount) stricterThan(source Mount) string {
	var more []string
	if hasOption(m.Options, "ro") && !hasOption(source.SuperOptions, "ro") {
		more = append(more, "ro")
	}
	for _, option := range []string{"nosuid", "nodev", "noexec", "noatime", "nodiratime"} { // which the kernel locks
		if hasOption(m.Options, option) && !hasOption(source.Options, option) {
			more = append(more, option)
		}
	}
	return strings.Join(more, ",")
}

// refuseWithoutLocks returns an error if a clone, attached in a user namespace below the driver's, would allow more than the mount that it
// replaces. It changes nothing. The calling thread is in that namespace.
func (r *replacement) refuseWithoutLocks(h nsHandle) error {
	if hasOption(r.like.Options, "ro") && !hasOption(r.src.swap.Source.SuperOptions, "ro") {
		return fault.Errorf(fault.Unsupported, "it is a read-only mount in a user namespace, whose container could make the "+
			"replacement writable; restart the container")
	}
	if more := r.stale.stricterThan(r.src.swap.Source); more != "" {
		locked, err := h.isLocked(r.stale)
		if err != nil {
			return err
		}
		if locked {
			return fault.Errorf(fault.Unsupported, "it is a mount in a user namespace, whose container could remove the restriction %s "+
				"from the replacement; restart the container", more)
		}
	}
	return refuseChildren(r.below, 0)
}

// isLocked reports whether the kernel has locked a flag of a mount that a FUSE source does not have. A clone keeps the lock, which
// holds for a process with all capabilities, too (can_change_locked_flags in fs/namespace.c).
func (h nsHandle) isLocked(m Mount) (bool, error) {
	f, err := h.open(m)
	if err != nil {
		return false, err
	}
	defer f.Close()
	fd, err := cloneTree(f)
	if err != nil {
		return true, nil // it is unbindable, or has locked children
	}
	defer unix.Close(fd)
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NODIRATIME})
	if err != nil && !errors.Is(err, unix.EPERM) {
		return false, fmt.Errorf("checking whether the mount is locked: %w", err)
	}
	return err != nil, nil
}

func refuseChildren(children []*child, depth int) error {
	for _, c := range children {
		if c.clone == nil {
			continue // only the mount itself can be moved
		}
		if more := c.mount.stricterThan(c.from); more != "" {
			return fault.Errorf(fault.Unsupported, "%s (%s, %s) is mounted below it in a user namespace, whose container could remove the "+
				"restriction %s from the replacement; restart the container", c.mount.Mountpoint, c.mount.Source, c.mount.Options, more)
		}
		if depth > 0 { // its locks are unknown, because no path leads to its mount point
			return fault.Errorf(fault.Unsupported, "%s (%s) is mounted two levels below it in a user namespace, whose container could "+
				"unmount the replacement and access what it covers; restart the container", c.mount.Mountpoint, c.mount.Source)
		}
		if err := refuseChildren(c.below, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// refuseLockedChildren returns an error if one of the children to clone is locked to its mount point. The calling thread is in the
// mount's namespace.
func (r *replacement) refuseLockedChildren(stale *os.File) error {
	if len(r.below) == 0 {
		return nil
	}
	// The kernel refuses a clone without the children if that would uncover what a locked child covers (has_locked_children in
	// fs/namespace.c). The clone is removed with its descriptor.
	fd, err := cloneTree(stale)
	if err == nil {
		unix.Close(fd)
		return nil
	}
	if !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("checking whether mounts below it are locked: %w", err)
	}
	return fault.Errorf(fault.Unsupported, "mounts below it are locked in a user namespace, whose container could unmount the "+
		"replacements and access what they cover; restart the container")
}
