//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// moveBeneath is MOVE_MOUNT_BENEATH of include/uapi/linux/mount.h, since Linux 6.5.
const moveBeneath = 0x200

// replacement is what takes the place of one dead mount.
type replacement struct {
	*living
	dead Mount     // as it is seen
	like Mount     // dead, with the flags that the replacement has
	tree mountTree // of the dead mount's namespace
	held *held
	// stack are the dead mounts that go, from the top: dead, and those that lie under it and are just like it.
	stack []Mount
	// settled: a living mount lies under the stack already, because an earlier run was killed after it attached it.
	settled Mount
	clone   *os.File // attached nowhere
	below   []*child
}

// replace plans the replacement of a dead mount.
func (l *living) replace(tree mountTree, dead Mount, readOnly bool) *replacement {
	r := &replacement{living: l, dead: dead, like: dead, tree: tree, held: hold(), stack: []Mount{dead}}
	if readOnly {
		r.like.Options += ",ro"
	}
	for len(r.tree.below(dead)) == 0 { // what is mounted below has to go onto the new one, beneath the one it is on
		under, ok := tree.under(dead)
		if !ok || under.Root != dead.Root {
			break
		}
		if sameDevice(under, l.Living) {
			r.settled = under
			break
		}
		if !l.isDead(under) || under.Options != dead.Options {
			break
		}
		dead = under
		r.stack = append(r.stack, dead)
	}
	return r
}

// prepare makes the clone and finds what goes below it. All that a client has to answer is asked here, before anything
// is changed.
func (r *replacement) prepare(ctx context.Context) (err error) {
	if r.settled.ID != 0 {
		return nil
	}
	if r.clone, err = r.living.clone(ctx, r.held, r.like); err != nil {
		return err
	}
	base := r.stack[len(r.stack)-1]
	if r.below, err = r.children(ctx, base, r.clone); err != nil || len(r.below) == 0 {
		return err
	}
	// An earlier run was killed while it moved children onto one that cannot be reached any more.
	under, ok := r.tree.under(base)
	if !ok || !sameDevice(under, r.Living) {
		return nil
	}
	if second, ok := r.tree.under(under); ok && sameDevice(second, r.Living) {
		return fault.Errorf(fault.Precondition, "what is mounted below it could not be moved to a living mount twice; restart the pod")
	}
	moved, err := r.children(ctx, under, r.clone)
	r.below = append(r.below, moved...)
	return err
}

// carryOut puts the clone in the place of the dead mount, in whose namespace the calling thread is; false where there
// was nothing to do any more.
func (r *replacement) carryOut(ctx context.Context, in inside) (bool, error) {
	if in.lesser {
		if err := r.refuseWithoutLocks(in); err != nil {
			return false, err
		}
	}
	err := r.putInPlace(ctx, in)
	if errors.Is(err, errHidden) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return r.settle(ctx, in, err)
	}
	return err == nil, err
}

// putInPlace is carryOut where the dead mount is as it was when it was planned.
func (r *replacement) putInPlace(ctx context.Context, in inside) error {
	// Those on top of one that is just like them hide nothing; so none is left below the living one.
	base := len(r.stack) - 1
	for i, dead := range r.stack {
		if i == base && r.settled.ID == 0 {
			break
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := in.detachOne(dead); err != nil {
			return err
		}
	}
	if r.settled.ID != 0 {
		return in.setPropagation(r.settled, propagationOf(r.dead))
	}
	dead, err := in.open(r.stack[base])
	if err != nil {
		return err
	}
	defer dead.Close()
	if same, err := sameType(dead, r.clone); err != nil {
		return err
	} else if !same {
		return fault.Errorf(fault.NotFound, "what it shows was a directory and is a file in the volume now, or the other way round")
	}
	if hasOption(r.dead.Options, idMapped) {
		if err := in.mapLike(dead, r.clone); err != nil {
			return err
		}
	}
	if in.lesser {
		if err := r.refuseLockedChildren(dead); err != nil {
			return err
		}
	}
	if err := r.openChildren(in, dead); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // the last moment for it: from here on it is finished
		return err
	}
	beneath, err := r.attach(dead)
	if err != nil {
		return err
	}
	failpoint.Here("swap.attached")
	if err := moveChildren(r.below); err != nil {
		return err
	}
	failpoint.Here("swap.moved")
	if beneath {
		// While the new one is still shared where its parent is, so that the dead one goes in the parent's peers and
		// slaves too.
		if err := in.detach(dead, r.stack[base]); err != nil {
			return err
		}
		failpoint.Here("swap.detached")
	}
	return setPropagation(int(r.clone.Fd()), propagationOf(r.dead))
}

// settle finds out what became of a dead mount that is not where it was.
func (r *replacement) settle(ctx context.Context, in inside, cause error) (bool, error) {
	mounts, err := in.mounts(ctx)
	if err != nil {
		return false, err
	}
	tree := newTree(mounts)
	if still, ok := tree.byID[r.dead.ID]; ok && sameDevice(still, r.dead) && still.Source == r.dead.Source {
		top := tree.top(still)
		switch {
		case sameDevice(top, r.Living):
			return false, nil
		case top.ID == still.ID:
			return false, cause
		}
		return false, fault.Errorf(fault.Precondition, "%w (%s); unmount that one", errHidden, top.Source)
	}
	for _, m := range mounts {
		if m.Mountpoint != r.dead.Mountpoint || !sameDevice(m, r.Living) || m.Root != r.dead.Root || tree.top(m).ID != m.ID {
			continue
		}
		// Its parent is a peer of another one's, or it was a child of one, and it was replaced with that.
		return true, in.setPropagation(m, propagationOf(r.dead))
	}
	return false, nil // its owner has unmounted it
}

// setPropagation sets a mount's propagation type.
func (in inside) setPropagation(m Mount, propagation uint64) error {
	f, err := in.open(m)
	if err != nil {
		return err
	}
	defer f.Close()
	return setPropagation(int(f.Fd()), propagation)
}

// attach puts the clone beneath the dead mount, or on top of it where that cannot be.
func (r *replacement) attach(dead *os.File) (beneath bool, err error) {
	const here = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if !r.onTop {
		err = unix.MoveMount(int(r.clone.Fd()), "", int(dead.Fd()), "", here|moveBeneath)
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			return false, fmt.Errorf("attaching the living mount beneath the dead one: %w", err)
		}
		// The kernel is older than 6.5; or the dead mount is locked, because it was there when the user namespace was
		// made; or the parent propagates to it. On top, what is under both is not seen either, but the dead mount
		// cannot be reached any more, not to detach it either.
	}
	// Nothing propagates from a private mount, so that copies in other namespaces, which may be read-only, are not replaced with it.
	if err := setPropagation(int(dead.Fd()), unix.MS_PRIVATE); err != nil {
		return false, err
	}
	if err := unix.MoveMount(int(r.clone.Fd()), "", int(dead.Fd()), "", here); err != nil {
		return false, fmt.Errorf("attaching the living mount on the dead one: %w", err)
	}
	return false, nil
}

// sameType tells whether both are directories, or neither is.
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
