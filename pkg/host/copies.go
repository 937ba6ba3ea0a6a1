package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
)

// DetachCopies detaches the copies of a FUSE mount in other mount namespaces, and returns how many. A namespace that is made while
// the mount exists gets a copy, which keeps the client running after the host has unmounted everything. A copy has m's device and
// source; the device alone may be another file system's as soon as its last mount is gone.
//
// Namespaces are found by their processes. Namespaces without processes, and those of processes that this one may not inspect, are
// not seen; the number of the latter is logged. Mounts of the host's own namespace, and mounts that are unmounted with them by
// propagation, are not touched. The error lists the copies that could not be detached.
func (n *Namespace) DetachCopies(ctx context.Context, m Mount) (int, error) {
	return n.detachInOthers(ctx, "copies of "+m.Source, m.copiedAs, Owners{})
}

// DetachStale detaches the mounts for which stale reports true, and what is mounted below them, in other mount namespaces, and returns
// how many. It skips namespaces that have one of the owners. Otherwise it is like DetachCopies.
func (n *Namespace) DetachStale(ctx context.Context, stale func(Mount) bool, spare Owners) (int, error) {
	return n.detachInOthers(ctx, "stale mounts", stale, spare)
}

// copiedAs reports whether c is of the same file system as m. The device alone is not enough, because the kernel reuses it.
func (m Mount) copiedAs(c Mount) bool {
	return sameDevice(c, m) && c.Source == m.Source && c.FSType == m.FSType
}

func sameDevice(a, b Mount) bool { return a.Major == b.Major && a.Minor == b.Minor }

// detachInOthers detaches mounts that match in other namespaces, except those that have one of the owners.
func (n *Namespace) detachInOthers(ctx context.Context, things string, match func(Mount) bool, spare Owners) (int, error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return 0, err
	}
	holders, err := n.holders(ctx, "searching for "+things, spare, func(ns *otherNamespace, mounts []Mount) bool {
		return ns.owner == "" && len(host.foreignTo(mounts, match)) > 0
	})
	if err != nil {
		return 0, err
	}
	detached := 0
	var errs []error
	for _, ns := range holders {
		at := namespaceRef{n, ns}
		what := "detaching " + things + at.name()
		var done atomic.Int64 // the call may outlive this function
		err := at.do(ctx, what, func(h nsHandle) error {
			if err := h.detachAll(ctx, host, match, &done); err != nil {
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

// holders returns the other namespaces for whose mount tables pick reports true; owners set otherNamespace.owner.
func (n *Namespace) holders(ctx context.Context, what string, owners Owners,
	pick func(ns *otherNamespace, mounts []Mount) bool,
) ([]*otherNamespace, error) {
	var holders []*otherNamespace
	err := n.run(ctx, what, nil, func() error {
		all, err := n.otherNamespaces(ctx, what, owners)
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
