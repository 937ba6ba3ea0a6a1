// Package supervisor decides what happens to mounts: when one is started, joined, restarted, replaced, rotated to other credentials
// and stopped. It does so under the lock of the mount's key. Package runner does the work for one mount, package heal replaces bind
// mounts, and package monitor notices what has to be reconciled.
package supervisor

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/linger"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/overlap"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	cleanupBound = 20 * time.Second // for the clean-up after a failure
	// replacedBound bounds a call's wait for a mount that was replaced: open files can keep it mounted indefinitely.
	replacedBound = 5 * time.Second
	// replacedRetry is when that mount is reconciled next.
	replacedRetry = 15 * time.Second
	// lookupBound bounds the answer of a client to a directory read.
	lookupBound = 10 * time.Second
)

// Options are the parts of a Supervisor: those of its Runner, and others.
type Options struct {
	runner.Options
	Runner  *runner.Runner
	Drainer *drain.Drainer
	Healer  *heal.Healer
	Pins    *pins.Pins
	Linger  linger.Limits
}

// Supervisor decides what happens to mounts.
type Supervisor struct {
	Options
	publications
	keys     keyLocks
	order    overlap.Order
	lingerer *linger.Lingerer
}

// New returns a supervisor.
func New(o Options) *Supervisor {
	s := &Supervisor{
		Options: o, keys: keyLocks{store: o.Store, tracker: o.Tracker},
		order: overlap.Order{Store: o.Store, Namespace: o.Namespace, Pins: o.Pins, Backends: o.Backends},
	}
	s.publications = publications{locks: &s.keys, records: o.Store.Pubs}
	s.lingerer = linger.New(linger.Options{
		Client: o.Runner, Drainer: o.Drainer, Pins: o.Pins, Backends: o.Backends, Store: o.Store, Creds: o.Creds, Tracker: o.Tracker, Peer: o.Peer,
		Limits: o.Linger, TryLock: s.keys.TryLock,
	})
	return s
}

// Health returns the health of a mount.
func (s *Supervisor) Health(ctx context.Context, m state.Mount) (mount.Health, error) {
	health, _, err := s.healthAndStatus(ctx, m)
	return health, err
}

// healthAndStatus is Health that also returns the status of the helper, unless that has exited.
func (s *Supervisor) healthAndStatus(ctx context.Context, m state.Mount) (mount.Health, helper.Status, error) {
	health, status, err := s.Runner.ProbeStatus(ctx, m)
	if err != nil || health != mount.Healthy {
		return health, status, err
	}
	if old, err := s.Runner.Outdated(m); err != nil || old {
		return mount.Outdated, status, err
	}
	return health, status, nil
}

// stopReplaced stops a mount whose targets other mounts have taken over. If that takes longer than replacedBound, each reconcile pass
// tries again.
func (s *Supervisor) stopReplaced(ctx context.Context, m state.Mount, grant *creds.Grant) {
	ctx, cancel := context.WithTimeout(ctx, replacedBound)
	defer cancel()
	if err := s.Drainer.Stop(ctx, m, drain.Options{Grant: grant, Replaced: true}); err != nil {
		klog.FromContext(ctx).Info("Replaced mount is still in use", "mount", m.Name, "reason", err.Error())
	}
}

// usedElsewhere reports whether a mount has a publication at another target than this one; "": at any target.
func usedElsewhere(all []state.Publication, name, target string) bool {
	return slices.ContainsFunc(all, func(p state.Publication) bool { return p.Mount == name && p.Target != target })
}

// movedElsewhere reports whether a publication at another target than this one was moved away from a mount.
func movedElsewhere(all []state.Publication, name, target string) bool {
	return slices.ContainsFunc(all, func(p state.Publication) bool { return p.Target != target && slices.Contains(p.MovedFrom, name) })
}

// keyLocks are the locks of mount keys: one generation of a mount comes after the other.
type keyLocks struct {
	conc.Locks
	store   *state.Store
	tracker *tracker.Tracker
	changed changedKeys
}

// Lock is conc.Locks.Lock. The key counts as changed from its release on.
func (l *keyLocks) Lock(ctx context.Context, key string) (unlock func(), err error) {
	release, err := l.Locks.Lock(ctx, key)
	return func() { l.changed.add(key); release() }, err
}

// TryLock is conc.Locks.TryLock. The key counts as changed from its release on.
func (l *keyLocks) TryLock(key string) (unlock func(), ok bool) {
	release, ok := l.Locks.TryLock(key)
	return func() { l.changed.add(key); release() }, ok
}

func (l *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	unlock, err = l.Lock(ctx, key)
	if err != nil {
		return nil, fault.Errorf(fault.Busy, "the mount of this volume is being started or stopped: %w", err)
	}
	return unlock, nil
}

// lockToStop locks the key of a mount. If the mount is being stopped by another call, the error reports its pending uploads.
func (l *keyLocks) lockToStop(ctx context.Context, name string) (unlock func(), err error) {
	unlock, err = l.Lock(ctx, mount.KeyOf(name))
	if err == nil {
		return unlock, nil
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if m, rerr := l.store.MountOrRemains(rctx, name); rerr == nil && (m.Phase == state.Ending || l.tracker.Mount(name).Draining()) {
		return nil, drain.InProgress(m, drain.WithQueue(l.tracker.Mount(name).Drain.Queue(), err))
	}
	return nil, fault.Errorf(fault.Busy, "the mount is being started or stopped: %w", err)
}
