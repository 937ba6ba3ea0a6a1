// Package supervisor decides what happens to mounts: when one is started, joined, restarted, replaced, rotated to other credentials
// and stopped. It does so under the lock of the mount's key. Package runner does the work for one mount, package heal replaces bind
// mounts, and package monitor notices what has to be reconciled.
package supervisor

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/linger"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/overlap"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
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

// Options are the parts of a Supervisor besides those of its Runner.
type Options struct {
	Runner  *runner.Runner
	Drainer *drain.Drainer
	Healer  *heal.Healer
	Pins    *pins.Pins
	Linger  linger.Limits
}

// Supervisor decides what happens to mounts.
type Supervisor struct {
	namespace *host.Namespace
	backend   func(name string) (backend.Backend, error)
	clients   client.Registry
	store     *state.Store
	sources   *source.Sources
	creds     *creds.Provider
	tracker   *tracker.Tracker
	runner    *runner.Runner
	drainer   *drain.Drainer
	healer    *heal.Healer
	pins      *pins.Pins

	keys     keyLocks
	order    overlap.Order
	lingerer *linger.Lingerer
}

// New returns a supervisor.
func New(o Options) *Supervisor {
	r := o.Runner
	s := &Supervisor{
		namespace: r.Namespace, backend: r.Backend, clients: r.Clients, store: r.Store, sources: r.Sources, creds: r.Creds, tracker: r.Tracker,
		runner: r, drainer: o.Drainer, healer: o.Healer, pins: o.Pins,
		order: overlap.Order{Store: r.Store, Namespace: r.Namespace, Pins: o.Pins, Backend: r.Backend},
	}
	s.lingerer = &linger.Lingerer{
		Runner: r, Drainer: o.Drainer, Pins: o.Pins, Backend: r.Backend, Store: r.Store, Creds: r.Creds, Tracker: r.Tracker, Peer: r.Peer,
		Limits: o.Linger, TryLock: s.keys.TryLock,
	}
	return s
}

// Health returns the health of a mount.
func (s *Supervisor) Health(ctx context.Context, m state.Mount) (mount.Health, error) {
	health, _, err := s.healthAndStatus(ctx, m)
	return health, err
}

// healthAndStatus is Health that also returns the status of the helper, unless that has exited.
func (s *Supervisor) healthAndStatus(ctx context.Context, m state.Mount) (mount.Health, helper.Status, error) {
	health, status, err := s.runner.ProbeStatus(ctx, m)
	if err != nil || health != mount.Healthy {
		return health, status, err
	}
	if old, err := s.runner.Outdated(m); err != nil || old {
		return mount.Outdated, status, err
	}
	return health, status, nil
}

// stopReplaced stops a mount whose targets other mounts have taken over. If that takes longer than replacedBound, each reconcile pass
// tries again.
func (s *Supervisor) stopReplaced(ctx context.Context, m state.Mount, grant *creds.Grant) {
	ctx, cancel := context.WithTimeout(ctx, replacedBound)
	defer cancel()
	if err := s.drainer.Stop(ctx, m, drain.Options{Grant: grant, Copies: source.AwaitReplace}); err != nil {
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
	locks   conc.Locks
	changed sync.Map // the keys that were locked since it was cleared: their mounts may have changed
}

// Lock is conc.Locks.Lock. The key counts as changed from its release on.
func (l *keyLocks) Lock(ctx context.Context, key string) (unlock func(), err error) {
	release, err := l.locks.Lock(ctx, key)
	return func() { l.changed.Store(key, struct{}{}); release() }, err
}

// TryLock is conc.Locks.TryLock. The key counts as changed from its release on.
func (l *keyLocks) TryLock(key string) (unlock func(), ok bool) {
	release, ok := l.locks.TryLock(key)
	return func() { l.changed.Store(key, struct{}{}); release() }, ok
}

func (l *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	unlock, err = l.Lock(ctx, key)
	if err != nil {
		return nil, fault.Errorf(fault.Busy, "the mount of this volume is being started or stopped: %w", err)
	}
	return unlock, nil
}

// lockToStop locks the key of a mount. If the mount is being stopped by another call, the error reports its pending uploads.
func (s *Supervisor) lockToStop(ctx context.Context, name string) (unlock func(), err error) {
	unlock, err = s.keys.Lock(ctx, mount.KeyOf(name))
	if err == nil {
		return unlock, nil
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	entry := s.tracker.Mount(name)
	if m, rerr := s.store.MountOrRemains(rctx, name); rerr == nil && (m.Phase == state.Ending || entry.Draining()) {
		return nil, drain.InProgress(m, drain.WithQueue(entry.Drain.Queue(), err))
	}
	return nil, fault.Errorf(fault.Busy, "the mount is being started or stopped: %w", err)
}
