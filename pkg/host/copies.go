package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// otherBound bounds the work in one mount namespace, whose processes choose what its paths lead to.
const otherBound = 3 * time.Second

// DetachCopies detaches the copies of a FUSE mount in other mount namespaces, and returns how many. A namespace that is made while
// the mount exists gets a copy, which keeps the client running after the host has unmounted everything. A copy has m's device and
// source; the device alone may be another file system's as soon as its last mount is gone.
//
// Namespaces are found by their processes. Namespaces without processes, and those of processes that this one may not inspect, are
// not seen; the number of the latter is logged. Mounts of the host's own namespace, and mounts that are unmounted with them by
// propagation, are not touched. The error lists the copies that could not be detached.
func (n *Namespace) DetachCopies(ctx context.Context, m Mount) (int, error) {
	return n.detachInOthers(ctx, "copies of "+m.Source, m.IsCopy, Owners{})
}

// DetachStale detaches the mounts for which stale reports true, and what is mounted below them, in other mount namespaces, and returns
// how many. It skips namespaces that have one of the owners. Otherwise it is like DetachCopies.
func (n *Namespace) DetachStale(ctx context.Context, stale func(Mount) bool, spare Owners) (int, error) {
	return n.detachInOthers(ctx, "stale mounts", stale, spare)
}

// IsCopy reports whether a mount is of the same file system as m. The device alone is not enough, because the kernel reuses it.
func (m Mount) IsCopy(c Mount) bool {
	return sameDevice(c, m) && c.Source == m.Source && c.FSType == m.FSType
}

func sameDevice(a, b Mount) bool { return a.Major == b.Major && a.Minor == b.Minor }

// detachInOthers detaches mounts that match in other namespaces, except those that have one of the owners.
func (n *Namespace) detachInOthers(ctx context.Context, things string, match func(Mount) bool, spare Owners) (int, error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return 0, err
	}
	held := func(ns *otherNamespace, mounts []Mount) bool {
		return ns.owner == "" && len(host.foreignTo(mounts, match)) > 0
	}
	holders, unseen, err := n.findHolders(ctx, search{what: "searching for " + things, owners: spare, needs: match, pick: held})
	if err != nil {
		return 0, err
	}
	if slices.ContainsFunc(unseen, func(s Swapped) bool { return !fault.Is(s.Err, fault.Unsupported) }) {
		return 0, fault.Errorf(fault.Busy, "not detaching %s, because a namespace to spare is unknown: %w", things, unseen[0].Err)
	}
	var detached atomic.Int64 // a call may outlive this function
	err = n.doInEach(holders, func(at namespaceRef) error {
		what := "detaching " + things + at.name
		bounded, cancel := context.WithTimeout(ctx, otherBound)
		defer cancel()
		return at.do(bounded, what, func(h nsHandle) error {
			if err := h.detachAll(bounded, host, match, &detached); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			return nil
		})
	})
	return int(detached.Load()), err
}

// findHolders returns the other namespaces for whose mount tables pick reports true. A namespace whose table cannot be read costs only itself:
// unseen are those that have an owner.
func (n *Namespace) findHolders(ctx context.Context, s search) (holders []*otherNamespace, unseen []Swapped, err error) {
	err = n.runCall(ctx, s.what, nil, func() error {
		all, missed, err := n.otherNamespaces(ctx, s)
		if err != nil {
			return err
		}
		var found []*otherNamespace
		large := map[string]int64{} // the bytes of large tables, by pod or cgroup
		for _, ns := range all {
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", s.what, ctx.Err())
			}
			byMounts, needs := ns.owner == "" && s.owners.ByMounts != nil, s.needs
			if byMounts {
				needs = nil
			}
			table, err := ns.mountsWithin(ctx, large, needs)
			if byMounts && err == nil {
				ns.owner = s.owners.ByMounts(table.mounts)
			}
			switch {
			case ctx.Err() != nil, s.owned && ns.owner == "":
			case err == nil && s.pick(ns, table.mounts):
				found = append(found, ns)
			case err != nil && ns.owner != "":
				missed = append(missed, Swapped{PID: ns.pids[0], Err: err})
			case err != nil:
				klog.FromContext(ctx).V(4).Info("Cannot read a mount table", "process", processName(ns.pids[0]), "call", s.what, "error", err)
			}
		}
		holders, unseen = found, missed
		return ctx.Err()
	})
	if err != nil {
		return nil, nil, err
	}
	return holders, unseen, nil
}

// mountsWithin is mounts, as long as the tables of the namespace's owner, else of its pod or cgroup, have no more than maxTables bytes.
func (o *otherNamespace) mountsWithin(ctx context.Context, large map[string]int64, needs func(Mount) bool) (tableParser, error) {
	if len(large) > 0 && large[o.account()] >= maxTables {
		return tableParser{}, fault.Errorf(fault.Unsupported, "other mount tables of %s have %d MiB", o.account(), large[o.account()]>>20)
	}
	table, err := o.mounts(ctx, needs)
	if err != nil && fault.Is(err, fault.Unsupported) {
		table.size = maxTable
	}
	if table.size >= largeTable {
		large[o.account()] += table.size
	}
	return table, err
}

// account is the namespace's owner, else its pod or cgroup.
func (o *otherNamespace) account() string { return cmp.Or(o.owner, accountOf(o.pids[0])) }

// doInEach calls fn for each namespace: for those of one owner, else of one pod or cgroup, one after the other, and for the others at the same
// time, so that none waits for another tenant's. A namespace whose processes have exited is skipped.
func (n *Namespace) doInEach(all []*otherNamespace, fn func(at namespaceRef) error) error {
	of := map[string][]namespaceRef{}
	for _, ns := range all {
		of[ns.account()] = append(of[ns.account()], n.refTo(ns))
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, namespaces := range of {
		group.Go(func() {
			for _, at := range namespaces {
				if err := fn(at); err != nil && !errors.Is(err, errEnded) {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// detachAll detaches the namespace's own mounts that match, those on top of others first.
func (h nsHandle) detachAll(ctx context.Context, host hostView, match func(Mount) bool, detached *atomic.Int64) error {
	mounts, err := h.mounts(ctx)
	if err != nil {
		return err
	}
	failed := map[int]error{}
	for _, m := range slices.Backward(host.foreignTo(mounts, match)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := h.detachOne(m); err != nil {
			failed[m.ID] = fmt.Errorf("%s: %w", m.Mountpoint, err)
			continue
		}
		detached.Add(1)
	}
	if len(failed) == 0 {
		return nil
	}
	// The owner may have unmounted it in between.
	if mounts, err = h.mounts(ctx); err != nil {
		return err
	}
	var errs []error
	for _, m := range host.foreignTo(mounts, match) {
		errs = append(errs, failed[m.ID])
	}
	return errors.Join(errs...)
}

func (h nsHandle) detachOne(m Mount) error {
	f, err := h.open(m)
	if err != nil {
		return err
	}
	defer f.Close()
	return h.detach(f, m)
}
