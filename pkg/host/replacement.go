package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// moveBeneath is MOVE_MOUNT_BENEATH of include/uapi/linux/mount.h, since Linux 6.5.
const moveBeneath = 0x200

type replacement struct {
	src   *source
	stale Mount     // the top one on its mount point
	like  Mount     // stale, with the flags that the replacement has
	tree  mountTree // of the stale mount's namespace
	files *openFiles
	// stack are the stale mounts to detach, from the top: stale, and equal ones under it.
	stack []Mount
	// settled is a healthy mount under the stack already, from an earlier run that was killed after it attached that.
	settled Mount
	clone   *os.File // unattached
	below   []*child
}

// replace plans the replacement of a stale mount in the namespace of an owner.
func (src *source) replace(tree mountTree, stale Mount, owner string) *replacement {
	r := &replacement{src: src, stale: stale, like: stale, tree: tree, files: newOpenFiles(), stack: []Mount{stale}}
	if src.swap.ReadOnly != nil && src.swap.ReadOnly(stale, owner) {
		r.like.Options += ",ro"
	}
	for len(r.tree.below(stale)) == 0 { // a mount with children cannot be skipped: they move to the new mount
		under, ok := tree.mountUnder(stale)
		if !ok || under.Root != stale.Root {
			break
		}
		if src.isHealthy(under) {
			r.settled = under
			break
		}
		if !src.isStale(under) || under.Options != stale.Options {
			break
		}
		stale = under
		r.stack = append(r.stack, stale)
	}
	return r
}

// prepare makes the clone and the children for it. All requests to a client are made here, before anything changes.
func (r *replacement) prepare(ctx context.Context) (err error) {
	if r.settled.ID != 0 {
		return nil
	}
	if r.clone, err = r.src.clone(ctx, r.files, r.like); err != nil {
		return err
	}
	base := r.stack[len(r.stack)-1]
	if r.below, err = r.prepareChildren(ctx, base, r.clone); err != nil || len(r.below) == 0 {
		return err
	}
	// An earlier run was killed while it moved children to a mount that cannot be opened any more.
	under, ok := r.tree.mountUnder(base)
	if !ok || !r.src.isHealthy(under) {
		return nil
	}
	if second, ok := r.tree.mountUnder(under); ok && r.src.isHealthy(second) {
		return fault.Errorf(fault.Precondition, "two attempts to move the mounts below it were interrupted; restart the container")
	}
	moved, err := r.prepareChildren(ctx, under, r.clone)
	r.below = append(r.below, moved...)
	return err
}

// replaceStale replaces the stale mount with the clone. The calling thread is in its namespace. It returns false if there was nothing to
// do any more.
func (r *replacement) replaceStale(ctx context.Context, h nsHandle) (bool, error) {
	if h.inUserNS {
		if err := r.refuseWithoutLocks(h); err != nil {
			return false, err
		}
	}
	err := r.attachAndDetach(ctx, h)
	if errors.Is(err, errHidden) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return r.findOutcome(ctx, h, err)
	}
	return err == nil, err
}

// attachAndDetach is replaceStale for a stale mount that has not changed since it was planned. The steps are:
//  1. detach equal stale mounts on top; if an earlier run has attached a replacement already, only set its propagation type,
//  2. check the types, the id-mapping and, in a user namespace below the driver's, the locks,
//  3. attach the clone, beneath the stale mount if the kernel can,
//  4. move the children,
//  5. detach the stale mount, if the clone is beneath it.
//
// From step 3 on it ignores the end of ctx.
func (r *replacement) attachAndDetach(ctx context.Context, h nsHandle) error {
	// They hide nothing but an equal mount. Detaching them leaves none below the replacement.
	base := len(r.stack) - 1
	for i, stale := range r.stack {
		if i == base && r.settled.ID == 0 {
			break
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := h.detachOne(stale); err != nil {
			return err
		}
	}
	if r.settled.ID != 0 {
		return h.setPropagation(r.settled, propagationOf(r.stale))
	}
	stale, err := h.open(r.stack[base])
	if err != nil {
		return err
	}
	defer stale.Close()
	if same, err := sameType(stale, r.clone); err != nil {
		return err
	} else if !same {
		return fault.Errorf(fault.NotFound, "its path in the volume changed from a directory to a file, or vice versa")
	}
	if hasOption(r.stale.Options, idMapped) {
		if err := h.mapLike(stale, r.clone); err != nil {
			return err
		}
	}
	if h.inUserNS {
		if err := r.refuseLockedChildren(stale); err != nil {
			return err
		}
	}
	if err := r.openChildren(h, stale); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // the last check: from here on the replacement is completed
		return err
	}
	beneath, err := r.attach(stale)
	if err != nil {
		return err
	}
	failpoint.Here("swap.attached")
	if err := moveChildren(r.below); err != nil {
		return err
	}
	failpoint.Here("swap.moved")
	if beneath {
		// The clone is still shared if its parent is, so the stale mount goes in the parent's peers and slaves, too.
		if err := h.detach(stale, r.stack[base]); err != nil {
			return err
		}
		failpoint.Here("swap.detached")
	}
	return setPropagation(int(r.clone.Fd()), propagationOf(r.stale))
}

// findOutcome finds out what happened to a stale mount that is not at its mount point any more.
func (r *replacement) findOutcome(ctx context.Context, h nsHandle, cause error) (bool, error) {
	mounts, err := h.mounts(ctx)
	if err != nil {
		return false, err
	}
	tree := newTree(mounts)
	if still, ok := tree.byID[r.stale.ID]; ok && sameDevice(still, r.stale) && still.Source == r.stale.Source {
		top := tree.top(still)
		switch {
		case r.src.isHealthy(top):
			return false, nil
		case top.ID == still.ID:
			return false, cause
		}
		return false, fault.Errorf(fault.Precondition, "%w (%s); unmount that one", errHidden, top.Source)
	}
	for _, m := range mounts {
		if m.Mountpoint != r.stale.Mountpoint || !r.src.isHealthy(m) || m.Root != r.stale.shown() || tree.top(m).ID != m.ID {
			continue
		}
		// It was replaced together with its parent, or with a peer of its parent.
		return true, h.setPropagation(m, propagationOf(r.stale))
	}
	return false, nil // its owner has unmounted it
}

func (h nsHandle) setPropagation(m Mount, propagation uint64) error {
	f, err := h.open(m)
	if err != nil {
		return err
	}
	defer f.Close()
	return setPropagation(int(f.Fd()), propagation)
}

// attach attaches the clone beneath the stale mount, or on top of it if the kernel refuses that.
func (r *replacement) attach(stale *os.File) (beneath bool, err error) {
	if !r.src.swap.onTop {
		err = moveMount(int(r.clone.Fd()), stale, moveBeneath)
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			return false, fmt.Errorf("attaching the healthy mount beneath the stale one: %w", err)
		}
		// The kernel is older than 6.5, or the stale mount is locked because it is older than its user namespace, or the
		// parent propagates to it. On top, the clone hides the stale mount, which then cannot be detached any more.
	}
	// A private mount does not propagate the change to copies in other namespaces, which may be read-only.
	if err := setPropagation(int(stale.Fd()), unix.MS_PRIVATE); err != nil {
		return false, err
	}
	if err := moveMount(int(r.clone.Fd()), stale, 0); err != nil {
		return false, fmt.Errorf("attaching the healthy mount on the stale one: %w", err)
	}
	return false, nil
}

func sameType(a, b *os.File) (bool, error) {
	one, err := cachedStat(a)
	if err != nil {
		return false, err
	}
	other, err := cachedStat(b)
	if err != nil {
		return false, err
	}
	return (one.Mode&unix.S_IFMT == unix.S_IFDIR) == (other.Mode&unix.S_IFMT == unix.S_IFDIR), nil
}

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
