package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Swap is the replacement of stale mounts by clones of a healthy one.
type Swap struct {
	// Source is the healthy mount: the top mount on its mount point in this namespace, as read from the mount table, of a whole
	// file system (root "/"). Its id and device are checked again when it is opened.
	Source Mount
	// Stale reports whether a mount, by its line in the mount table, is stale and must be replaced. Mounts of Source's device never
	// are.
	Stale func(Mount) bool
	// Unknown reports whether a mount that looks stale must be reported (fault.Unsupported) and not replaced. nil: no mount.
	Unknown func(Mount) bool
	// ReadOnly reports whether the replacement of a mount must be read-only even if the stale one is not. owner is that of
	// the mount's namespace, "" for this namespace. nil: none must.
	ReadOnly func(m Mount, owner string) bool
	// Groups are the peer groups of mounts that this swap, or one before it, replaces. Their slaves become slaves of the
	// replacements. nil: none.
	Groups *Groups
	// Bound limits each look-up inside the healthy file system, which its client must answer, and the work on each mount.
	Bound time.Duration

	onTop bool // as on kernels without MOVE_MOUNT_BENEATH; for tests
}

// Swapped is the result for one mount.
type Swapped struct {
	Mountpoint string // as seen in the namespace
	PID        int    // 0: in this namespace; else a process of the mount's namespace
	Root       string // the directory (or file) of the file system that it shows
	// Err is nil if the mount was replaced. Otherwise the stale mount is unchanged, and Err is
	//   - fault.NotFound if the healthy file system lacks its directory (or file),
	//   - fault.Precondition if another mount, or a mount below it, prevents the replacement,
	//   - fault.Unsupported if the kernel cannot replace it,
	//   - fault.Timeout if the client or the kernel did not answer within the bound.
	Err error
}

// errUnknown is the result for a mount that Swap.Unknown reports.
var errUnknown = fault.Errorf(fault.Unsupported, "it has the volume's name, but no known client of the volume served it: "+
	"another process unmounted that client's mount, or the name is forged")

// SwapHere replaces the stale mounts of this namespace for which where reports true, and returns the result for each. The list is
// empty if there was nothing to do.
//
// A replacement shows the same directory with the same mount flags (and always nosuid and nodev) and propagation type, and keeps the
// mounts below the stale mount. It is attached beneath the stale mount, which is then detached, so that no process sees what both
// cover. Before Linux 6.5, and if the kernel refuses that (in a user namespace that inherited the mount), it is attached on top. The
// stale mount then stays in the mount table, unreachable, as long as the healthy one is mounted, and later lists leave it out. If the
// parent is shared, the kernel replaces the copies of the mount in the parent's peers and slaves, too.
//
// Processes keep a stale working directory and stale open files. If a run is killed at any point, the next one completes it. When ctx
// ends, a replacement that has begun is completed, and no other begins.
func (n *Namespace) SwapHere(ctx context.Context, s Swap, where func(Mount) bool) ([]Swapped, error) {
	src, err := n.openSource(ctx, s)
	if err != nil {
		return nil, err
	}
	defer src.files.release()
	mounts, err := n.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	return src.swapIn(ctx, namespaceRef{n: n}, mounts, where)
}

// SwapInOtherNamespaces is SwapHere for the other mount namespaces that have one of the owners. Mounts that propagate from the host are
// replaced with the host's.
//
// In a namespace that another user namespace owns, these mounts are not replaced (fault.Unsupported), because their container could
// remove a restriction from the replacement:
//   - mounts that are stricter than their replacement would be (read-only, for example),
//   - mounts with such a mount, or one that is locked to its mount point, below them.
//
// Neither are id-mapped mounts whose mapping the kernel does not report (it does since Linux 6.15), or no process there has.
func (n *Namespace) SwapInOtherNamespaces(ctx context.Context, s Swap, owners Owners) ([]Swapped, error) {
	src, err := n.openSource(ctx, s)
	if err != nil {
		return nil, err
	}
	defer src.files.release()
	host, err := n.hostView(ctx)
	if err != nil {
		return nil, err
	}
	what := "searching for stale mounts of " + s.Source.Source
	held := func(_ *otherNamespace, mounts []Mount) bool {
		return len(host.foreignTo(mounts, src.isStaleOrUnknown)) > 0
	}
	holders, all, err := n.findHolders(ctx, search{what: what, owners: owners, owned: true, needs: src.isStaleOrUnknown, pick: held})
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	err = n.doInEach(holders, func(at namespaceRef) error {
		own := *src // what a look-up for one namespace finds, or waits for, is not the others'
		swapped, err := n.swapInOther(ctx, &own, at, host)
		if err != nil && ctx.Err() == nil && !errors.Is(err, errEnded) { // caused by that namespace
			swapped, err = append(swapped, Swapped{PID: at.pid, Err: err}), nil
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, swapped...)
		return err
	})
	return all, err
}

func (n *Namespace) swapInOther(ctx context.Context, src *source, at namespaceRef, host hostView) ([]Swapped, error) {
	// Not from /proc/<pid>/mountinfo, whose paths begin at that process's root.
	var mounts []Mount
	what := "reading the mount table" + at.name
	bounded, cancel := context.WithTimeout(ctx, at.timeLimit(src.swap.Bound))
	defer cancel()
	err := at.do(bounded, what, func(h nsHandle) (err error) {
		mounts, err = h.mounts(bounded)
		return err
	})
	if err != nil {
		return nil, err
	}
	own := map[int]bool{}
	for _, m := range host.foreignTo(mounts, src.isStaleOrUnknown) {
		own[m.ID] = true
	}
	return src.swapIn(ctx, at, mounts, func(m Mount) bool { return own[m.ID] })
}

func (src *source) isHealthy(m Mount) bool { return sameDevice(m, src.swap.Source) }

func (src *source) isStale(m Mount) bool { return !src.isHealthy(m) && src.swap.Stale(m) }

func (src *source) isUnknown(m Mount) bool {
	return src.swap.Unknown != nil && !src.isHealthy(m) && !src.swap.Stale(m) && src.swap.Unknown(m)
}

func (src *source) isStaleOrUnknown(m Mount) bool { return src.isStale(m) || src.isUnknown(m) }

// swapIn replaces the stale mounts in the table of one namespace for which where reports true.
func (src *source) swapIn(ctx context.Context, at namespaceRef, mounts []Mount, where func(Mount) bool) ([]Swapped, error) {
	tree := newTree(mounts)
	var all []Swapped
	for _, stale := range mounts { // parents come first
		if src.isUnknown(stale) && where(stale) {
			all = append(all, Swapped{Mountpoint: stale.Mountpoint, PID: at.pid, Root: stale.Root, Err: errUnknown})
		}
		if !src.isStale(stale) || !where(stale) {
			continue
		}
		if top := tree.top(stale); top.ID != stale.ID && (src.isStale(top) || src.isHealthy(top)) {
			continue // it is, or was, replaced with the one on top
		}
		if err := ctx.Err(); err != nil {
			return all, fmt.Errorf("replacing stale mounts of %s%s: %w", src.swap.Source.Source, at.name, err)
		}
		r := src.replace(tree, stale, at.owner)
		done, overdue, err := src.swapOne(ctx, at, r)
		if errors.Is(err, errEnded) {
			return all, err
		}
		if err != nil {
			err = fmt.Errorf("replacing the stale mount %s of %s%s: %w", stale.Mountpoint, stale.Source, at.name, err)
		}
		if done || err != nil {
			all = append(all, Swapped{Mountpoint: stale.Mountpoint, PID: at.pid, Root: stale.Root, Err: err})
		}
		if overdue && at.other != nil { // it is up to its processes how many such mounts it has: the others are for the next time
			return all, nil
		}
	}
	return all, nil
}

// swapOne replaces one stale mount. done is false if there was nothing to do any more. overdue reports that the work in its namespace did
// not end in time: it waits for what a path leads to.
func (src *source) swapOne(ctx context.Context, at namespaceRef, r *replacement) (done, overdue bool, err error) {
	defer r.files.release()
	if err := r.prepare(ctx); err != nil {
		return false, false, err
	}
	stale := r.stale
	what := fmt.Sprintf("replacing the stale mount %s%s", stale.Mountpoint, at.name)
	bounded, cancel := context.WithTimeout(ctx, at.timeLimit(src.swap.Bound))
	defer cancel()
	replaced := false // not done, which a call that outlives this one must not change
	err = at.do(bounded, what, func(h nsHandle) error {
		return withFiles(func() (err error) {
			replaced, err = r.replaceStale(bounded, h)
			return err
		}, r.files)
	})
	if err != nil {
		return false, bounded.Err() != nil, err
	}
	if replaced {
		klog.FromContext(ctx).V(4).Info("Replaced a stale mount", "mountpoint", stale.Mountpoint, "pid", at.pid, "source", stale.Source, "root", stale.Root)
	}
	return replaced, false, nil
}

// mountTree is a mount table as a tree.
type mountTree struct {
	byID     map[int]Mount
	children map[int][]Mount
}

func newTree(mounts []Mount) mountTree {
	t := mountTree{byID: make(map[int]Mount, len(mounts)), children: make(map[int][]Mount, len(mounts))}
	for _, m := range mounts {
		t.byID[m.ID] = m
		t.children[m.Parent] = append(t.children[m.Parent], m)
	}
	return t
}

// top returns the visible mount where m is mounted: m, or the last one stacked on it.
func (t mountTree) top(m Mount) Mount {
	for range len(t.byID) { // no stack is longer
		over, ok := t.mountOn(m)
		if !ok {
			break
		}
		m = over
	}
	return m
}

// mountOn returns the mount that is stacked on m.
func (t mountTree) mountOn(m Mount) (Mount, bool) {
	for _, c := range t.children[m.ID] {
		if c.Mountpoint == m.Mountpoint && c.ID != m.ID {
			return c, true
		}
	}
	return Mount{}, false
}

// mountUnder returns the mount that m is stacked on.
func (t mountTree) mountUnder(m Mount) (Mount, bool) {
	u, ok := t.byID[m.Parent]
	return u, ok && u.ID != m.ID && u.Mountpoint == m.Mountpoint
}

// below returns the mounts on directories and files of m.
func (t mountTree) below(m Mount) []Mount {
	var below []Mount
	for _, c := range t.children[m.ID] {
		if c.ID != m.ID && c.Mountpoint != m.Mountpoint {
			below = append(below, c)
		}
	}
	return below
}
