//go:build linux

package host

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// A mount namespace that belongs to a user namespace below the driver's is entered with mounts that the kernel has locked:
// their flags cannot be cleared there and what they cover cannot be uncovered (mount_namespaces(7), "Restrictions on mount
// namespaces"). A clone that the driver attaches there has no locks, and the root of the user namespace may remount it with
// other flags or unmount it. So nothing is replaced there by a clone that would be a restriction less.

// restrictions are the mount flags that the kernel locks. Read-only is not among them, because stricterThan judges it by the
// file system.
var restrictions = []string{"nosuid", "nodev", "noexec", "noatime", "nodiratime"}

// stricterThan returns the options that keep a container from something that it could do with a clone of source, of which it
// can clear all flags of the clone's own: "ro", unless the file system itself is read-only, and what the source does not have.
func (m Mount) stricterThan(source Mount) string {
	var more []string
	if hasOption(m.Options, "ro") && !hasOption(source.SuperOptions, "ro") {
		more = append(more, "ro")
	}
	for _, option := range restrictions {
		if hasOption(m.Options, option) && !hasOption(source.Options, option) {
			more = append(more, option)
		}
	}
	return strings.Join(more, ",")
}

// refuseWithoutLocks is nil where every clone that would be attached in a lesser user namespace allows no more than the mount
// that it replaces. It changes nothing. The calling thread is in that namespace.
func (r *replacement) refuseWithoutLocks(in inside) error {
	if hasOption(r.like.Options, "ro") && !hasOption(r.Living.SuperOptions, "ro") {
		return fault.Errorf(fault.Unsupported, "it is a read-only mount in a user namespace, where its replacement could be made "+
			"writable; restart the container")
	}
	if more := r.dead.stricterThan(r.Living); more != "" {
		locked, err := in.isLocked(r.dead)
		if err != nil {
			return err
		}
		if locked {
			return fault.Errorf(fault.Unsupported, "it is a mount in a user namespace with the restriction %s, which its container could "+
				"take off the replacement; restart the container", more)
		}
	}
	return refuseChildren(r.below, 0)
}

// isLocked reports whether the kernel has locked one of a mount's flags that a FUSE source does not have. The lock is the clone's
// too, also for a process with all capabilities (can_change_locked_flags in fs/namespace.c).
func (in inside) isLocked(m Mount) (bool, error) {
	f, err := in.open(m)
	if err != nil {
		return false, err
	}
	defer f.Close()
	fd, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return true, nil //nolint:nilerr // it is unbindable, or has locked children
	}
	defer unix.Close(fd)
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NODIRATIME})
	if err != nil && !errors.Is(err, unix.EPERM) {
		return false, fmt.Errorf("finding out whether the mount is locked: %w", err)
	}
	return err != nil, nil
}

// refuseChildren is refuseWithoutLocks for what is mounted below.
func refuseChildren(children []*child, depth int) error {
	for _, c := range children {
		if c.clone == nil {
			continue // nothing else than the mount itself can be put there
		}
		if more := c.mount.stricterThan(c.from); more != "" {
			return fault.Errorf(fault.Unsupported, "%s (%s, %s) is mounted below it in a user namespace, where its container could take "+
				"the restriction (%s) off the replacement; restart the container", c.mount.Mountpoint, c.mount.Source, c.mount.Options, more)
		}
		if depth > 0 { // whether it is locked cannot be found out, because no path leads to what it is mounted on
			return fault.Errorf(fault.Unsupported, "%s (%s) is mounted two levels below it in a user namespace, where its container could "+
				"unmount the replacement to see what is under it; restart the container", c.mount.Mountpoint, c.mount.Source)
		}
		if err := refuseChildren(c.below, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// refuseLockedChildren is nil where none of the children that have to be cloned is locked to its place. The calling thread is
// in the mount's namespace.
func (r *replacement) refuseLockedChildren(dead *os.File) error {
	if len(r.below) == 0 {
		return nil
	}
	// The kernel refuses a clone without the children where that would uncover what a locked one covers (has_locked_children
	// in fs/namespace.c). The clone is attached nowhere and goes with its descriptor.
	fd, err := unix.OpenTree(int(dead.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err == nil {
		unix.Close(fd)
		return nil
	}
	if !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("finding out whether mounts below it are locked: %w", err)
	}
	return fault.Errorf(fault.Unsupported, "mounts below it are locked to their places in a user namespace, where their container could "+
		"unmount the replacements to see what is under them; restart the container")
}
