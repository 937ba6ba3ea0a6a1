//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Swap says which mounts are replaced by clones of which.
type Swap struct {
	// Living is the top mount on Living.Mountpoint in this namespace, as read from its table: the whole file system
	// (root "/"). It is checked again (id and device) when it is opened.
	Living Mount
	// Dead tells, by their table entries, the mounts that are replaced. Mounts of Living's device are never taken.
	Dead func(Mount) bool
	// Unknown tells mounts that look like dead ones and are reported, fault.Unsupported, but left alone. nil: none.
	Unknown func(Mount) bool
	// ReadOnly reports whether the replacement of a mount is read-only even where the dead one is not. cgroup is the text of
	// /proc/<pid>/cgroup by which the mount's namespace was picked, "" for this namespace. nil: it never is.
	ReadOnly func(m Mount, cgroup string) bool
	// Groups are of mounts that this swap, or one before it, replaces: their slaves become slaves of the replacements. nil: none.
	Groups *Groups
	// Bound is for each look-up inside the living file system, which its client has to answer, and for the work on
	// each mount.
	Bound time.Duration

	onTop bool // as on kernels without MOVE_MOUNT_BENEATH, for tests
}

// Swapped is what became of one mount.
type Swapped struct {
	Mountpoint string // as the namespace shows it
	PID        int    // 0: in the namespace itself; else a process of the mount namespace
	Root       string // which directory (or file) of the file system it shows
	// Err is nil where a living mount is in its place. Else the dead one is left as it was: fault.NotFound where the
	// living file system lacks the directory (or file) that it shows, fault.Precondition where another mount or a
	// mount below it is in the way, fault.Unsupported where the kernel cannot do it, fault.Timeout where the client
	// or the kernel did not answer within the bound.
	Err error
}

// errUnknown is for what Swap.Unknown tells.
var errUnknown = fault.Errorf(fault.Unsupported, "it has the volume's name, but is not known to be of an earlier client of the volume: "+
	"that one's mount was unmounted by someone else, or the name is forged")

// SwapHere replaces mounts of this namespace for which s.Dead and where are true by clones of s.Living, and says what
// became of each. Where nothing is left to do the list is empty.
//
// A replacement shows the same directory of the file system, with the same mount flags and type of propagation (but always
// with nosuid and nodev), and what was mounted below the dead mount is below it. It is attached beneath the dead mount, which is then detached, so
// that nobody ever sees what lies under both. Before Linux 6.5 (and where the kernel refuses, as in a user namespace
// that inherited the mount) it is attached on top: the dead mount stays in the table below it, out of everybody's
// reach, as long as the living one is mounted; such mounts are left out of the list the next time. Where the parent is
// shared, the kernel does the same to the copies of the mount in the parent's peers and slaves.
//
// Processes that have the dead mount as working directory or files open on it keep those, dead. Killed at any point,
// the next run finishes. When ctx ends, what was begun on one mount is finished, the rest is not begun.
func (n *Namespace) SwapHere(ctx context.Context, s Swap, where func(Mount) bool) ([]Swapped, error) {
	l, err := n.openLiving(ctx, s)
	if err != nil {
		return nil, err
	}
	defer l.held.drop()
	mounts, err := n.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	return l.swapIn(ctx, place{n: n}, mounts, where)
}

// SwapElsewhere is SwapHere for the other mount namespaces of which a process satisfies theirs (the text of
// /proc/<pid>/cgroup); all others are left alone. Mounts that go with the host's by propagation are the host's to
// replace. In a namespace that is owned by another user namespace, mounts that are stricter than what they would be
// replaced by (read-only, for example), and those with such a mount, or one that is locked to its place, below them, are
// left as they are, fault.Unsupported: their container could take the restriction off the replacement. So are id-mapped
// ones where the kernel does not tell their mapping, which it does since Linux 6.15, or no process there has it.
func (n *Namespace) SwapElsewhere(ctx context.Context, s Swap, theirs func(cgroup string) bool) ([]Swapped, error) {
	l, err := n.openLiving(ctx, s)
	if err != nil {
		return nil, err
	}
	defer l.held.drop()
	host, err := n.hostView(ctx)
	if err != nil {
		return nil, err
	}
	what := "looking for dead mounts of " + s.Living.Source
	holders, err := n.holders(ctx, what, theirs, func(ns *otherNamespace, mounts []Mount) bool {
		return ns.marked != "" && len(host.foreignTo(mounts, l.concerns)) > 0
	})
	if err != nil {
		return nil, err
	}
	var all []Swapped
	var errs []error
	for _, ns := range holders {
		at := place{n, ns}
		swapped, err := n.swapInOther(ctx, l, at, host)
		all = append(all, swapped...)
		if fault.Is(err, fault.Exhausted) { // that pod's own doing, which is to hold up no other
			all = append(all, Swapped{PID: at.pid(), Err: err})
			continue
		}
		if !errors.Is(err, errEnded) {
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return all, errors.Join(errs...)
}

// swapInOther replaces the mounts of one other namespace.
func (n *Namespace) swapInOther(ctx context.Context, l *living, at place, host hostView) ([]Swapped, error) {
	// Not from /proc/<pid>/mountinfo, whose paths are from that process's root.
	var mounts []Mount
	what := "reading the mount table" + at.name()
	bounded, cancel := context.WithTimeout(ctx, l.Bound)
	defer cancel()
	err := at.do(bounded, what, func(in inside) (err error) {
		mounts, err = in.mounts(bounded)
		return err
	})
	if err != nil {
		return nil, err
	}
	own := map[int]bool{}
	for _, m := range host.foreignTo(mounts, l.concerns) {
		own[m.ID] = true
	}
	return l.swapIn(ctx, at, mounts, func(m Mount) bool { return own[m.ID] })
}

// isDead tells whether a mount is to be replaced, wherever it is.
func (l *living) isDead(m Mount) bool { return !sameDevice(m, l.Living) && l.Dead(m) }

// isUnknown reports whether a mount must be reported and not replaced.
func (l *living) isUnknown(m Mount) bool {
	return l.Unknown != nil && !sameDevice(m, l.Living) && !l.Dead(m) && l.Unknown(m)
}

// concerns reports whether a mount must be replaced or reported.
func (l *living) concerns(m Mount) bool { return l.isDead(m) || l.isUnknown(m) }

// swapIn replaces the dead mounts of one namespace that where picks from its table.
func (l *living) swapIn(ctx context.Context, at place, mounts []Mount, where func(Mount) bool) ([]Swapped, error) {
	tree := newTree(mounts)
	var all []Swapped
	for _, dead := range mounts { // parents come first
		if l.isUnknown(dead) && where(dead) {
			all = append(all, Swapped{Mountpoint: dead.Mountpoint, PID: at.pid(), Root: dead.Root, Err: errUnknown})
		}
		if !l.isDead(dead) || !where(dead) {
			continue
		}
		if top := tree.top(dead); top.ID != dead.ID && (l.isDead(top) || sameDevice(top, l.Living)) {
			continue // it is replaced with the one on top, or was
		}
		if err := ctx.Err(); err != nil {
			return all, fmt.Errorf("replacing dead mounts of %s%s: %w", l.Living.Source, at.name(), err)
		}
		done, err := l.swapOne(ctx, at, tree, dead)
		if errors.Is(err, errEnded) {
			return all, err
		}
		if err != nil {
			err = fmt.Errorf("replacing the dead mount %s of %s%s: %w", dead.Mountpoint, dead.Source, at.name(), err)
		}
		if done || err != nil {
			all = append(all, Swapped{Mountpoint: dead.Mountpoint, PID: at.pid(), Root: dead.Root, Err: err})
		}
	}
	return all, nil
}

// swapOne replaces one dead mount; false where there was nothing to do any more.
func (l *living) swapOne(ctx context.Context, at place, tree mountTree, dead Mount) (bool, error) {
	r := l.replace(tree, dead, l.ReadOnly != nil && l.ReadOnly(dead, at.cgroup()))
	defer r.held.drop()
	if err := r.prepare(ctx); err != nil {
		return false, err
	}
	what := fmt.Sprintf("replacing the dead mount %s%s", dead.Mountpoint, at.name())
	bounded, cancel := context.WithTimeout(ctx, l.Bound)
	defer cancel()
	done := false
	err := at.do(bounded, what, func(in inside) error {
		return using(func() (err error) {
			done, err = r.carryOut(bounded, in)
			return err
		}, r.held)
	})
	if err != nil {
		return false, err
	}
	if done {
		klog.FromContext(ctx).V(2).Info("A dead mount was replaced by a living one", "mountpoint", dead.Mountpoint, "pid", at.pid(), "source", dead.Source, "root", dead.Root)
	}
	return done, nil
}

// mountTree is a mount table by what is mounted on what.
type mountTree struct {
	byID     map[int]Mount
	children map[int][]Mount
}

// newTree makes the tree of a mount table.
func newTree(mounts []Mount) mountTree {
	t := mountTree{byID: make(map[int]Mount, len(mounts)), children: make(map[int][]Mount, len(mounts))}
	for _, m := range mounts {
		t.byID[m.ID] = m
		t.children[m.Parent] = append(t.children[m.Parent], m)
	}
	return t
}

// top is the mount that is seen where m is mounted: m, or the last of those stacked on its root.
func (t mountTree) top(m Mount) Mount {
	for range len(t.byID) { // no stack is longer
		over, ok := t.over(m)
		if !ok {
			break
		}
		m = over
	}
	return m
}

// over is the mount that is stacked on m's root.
func (t mountTree) over(m Mount) (Mount, bool) {
	for _, c := range t.children[m.ID] {
		if c.Mountpoint == m.Mountpoint && c.ID != m.ID {
			return c, true
		}
	}
	return Mount{}, false
}

// under is the mount on whose root m is stacked.
func (t mountTree) under(m Mount) (Mount, bool) {
	u, ok := t.byID[m.Parent]
	return u, ok && u.ID != m.ID && u.Mountpoint == m.Mountpoint
}

// below are the mounts on directories and files of m.
func (t mountTree) below(m Mount) []Mount {
	var below []Mount
	for _, c := range t.children[m.ID] {
		if c.ID != m.ID && c.Mountpoint != m.Mountpoint {
			below = append(below, c)
		}
	}
	return below
}
