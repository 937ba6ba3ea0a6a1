//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
)

// DetachCopies detaches the copies of a FUSE mount that other mount namespaces hold, and says how many. A copy arises
// when a namespace is made while the mount exists, and keeps the client alive after the host has unmounted
// everything. A copy has m's device and m's source string; the device alone may be somebody else's as soon as the
// last mount of it is gone.
//
// Namespaces are found by their processes; those that no process is in, and those of processes that this one may not
// look into, are not seen (the latter are counted in the log). The host's own namespace is left alone, and so are
// mounts that go with the host's by propagation. What could not be detached is in the error, beside the number of
// what was.
func (n *Namespace) DetachCopies(ctx context.Context, m Mount) (int, error) {
	return n.detachElsewhere(ctx, "copies of "+m.Source, m.copiedAs, nil)
}

// DetachDead detaches mounts for which dead is true in those other mount namespaces of which no process satisfies
// spare (the text of /proc/<pid>/cgroup), and says how many. It finds namespaces and treats mounts as DetachCopies
// does. What is mounted below a dead mount goes with it. spare may be nil.
func (n *Namespace) DetachDead(ctx context.Context, dead func(Mount) bool, spare func(cgroup string) bool) (int, error) {
	return n.detachElsewhere(ctx, "dead mounts", dead, spare)
}

// copiedAs tells whether c is of the same file system as m. Both are needed: the device may be another's by now.
func (m Mount) copiedAs(c Mount) bool {
	return sameDevice(c, m) && c.Source == m.Source && c.FSType == m.FSType
}

// sameDevice tells whether two mounts are of one file system.
func sameDevice(a, b Mount) bool { return a.Major == b.Major && a.Minor == b.Minor }

// detachElsewhere detaches mounts that match in other namespaces than those with a process that satisfies spare.
func (n *Namespace) detachElsewhere(ctx context.Context, things string, match func(Mount) bool, spare func(cgroup string) bool) (int, error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return 0, err
	}
	holders, err := n.holders(ctx, "looking for "+things, spare, func(ns *otherNamespace, mounts []Mount) bool {
		return ns.marked == "" && len(host.foreignTo(mounts, match)) > 0
	})
	if err != nil {
		return 0, err
	}
	detached := 0
	var errs []error
	for _, ns := range holders {
		at := place{n, ns}
		what := "detaching " + things + at.name()
		var done atomic.Int64 // the call may outlive this function
		err := at.do(ctx, what, func(in inside) error {
			if err := in.detachAll(ctx, host, match, &done); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			return nil
		})
		detached += int(done.Load())
		if !errors.Is(err, errEnded) {
			errs = append(errs, err)
		}
	}
	return detached, errors.Join(errs...)
}

// holders are the other namespaces that pick picks by their mount tables; mark is for otherNamespace.marked.
func (n *Namespace) holders(ctx context.Context, what string, mark func(cgroup string) bool,
	pick func(ns *otherNamespace, mounts []Mount) bool,
) ([]*otherNamespace, error) {
	var holders []*otherNamespace
	err := n.run(ctx, what, nil, func() error {
		all, err := n.otherNamespaces(ctx, what, mark)
		if err != nil {
			return err
		}
		var found []*otherNamespace
		for _, ns := range all {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			if pick(ns, ns.mounts(ctx)) {
				found = append(found, ns)
			}
		}
		holders = found
		return nil
	})
	if err != nil {
		return nil, err
	}
	return holders, nil
}

// detachAll detaches the namespace's own mounts that match. The last mounted come first, so that what lies on top goes
// first.
func (in inside) detachAll(ctx context.Context, host hostView, match func(Mount) bool, detached *atomic.Int64) error {
	mounts, err := in.mounts(ctx)
	if err != nil {
		return err
	}
	failed := map[int]error{}
	for _, m := range slices.Backward(host.foreignTo(mounts, match)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := in.detachOne(m); err != nil {
			failed[m.ID] = fmt.Errorf("%s: %w", m.Mountpoint, err)
			continue
		}
		detached.Add(1)
	}
	if len(failed) == 0 {
		return nil
	}
	// Its owner may have unmounted it meanwhile.
	if mounts, err = in.mounts(ctx); err != nil {
		return err
	}
	var errs []error
	for _, m := range host.foreignTo(mounts, match) {
		errs = append(errs, failed[m.ID])
	}
	return errors.Join(errs...)
}

// detachOne opens a mount and detaches it.
func (in inside) detachOne(m Mount) error {
	f, err := in.open(m)
	if err != nil {
		return err
	}
	defer f.Close()
	return in.detach(f, m)
}
