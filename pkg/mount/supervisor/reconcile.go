package supervisor

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	// StaleAge is the age from which a publication without a target counts as abandoned by the CO.
	StaleAge = 10 * time.Minute
	// reconcileBound bounds the reconciliation of one mount.
	reconcileBound = 2 * time.Minute
)

// Reconcile reconciles a mount as soon as no other call works on its key. again is when it should be reconciled next, 0: with the
// others. gone reports that the mount does not exist any more.
func (s *Supervisor) Reconcile(ctx context.Context, name string) (again time.Duration, gone bool, err error) {
	unlock, err := s.keys.Lock(ctx, mount.KeyOf(name))
	if err != nil {
		return 0, false, err
	}
	defer unlock()
	if !s.store.Exists(ctx, name) {
		s.tracker.Forget(name)
		return 0, true, nil
	}
	rctx, cancel := context.WithTimeout(ctx, reconcileBound)
	defer cancel()
	again, err = s.reconcileMount(rctx, name)
	if !s.store.Exists(ctx, name) {
		return again, true, err
	}
	s.tracker.Mount(name).Reconciled(err, again)
	return again, false, err
}

// readView reads the actual state of one mount.
func (s *Supervisor) readView(ctx context.Context, name string) (view, error) {
	m, have, err := s.store.Mount(ctx, name)
	if errors.Is(err, state.ErrDamaged) {
		s.tracker.LogError(ctx, name+" record", err, "Record of mount is damaged", "mount", name)
		have, err = false, nil
	}
	if err != nil {
		return view{}, err
	}
	if have && m.Phase == state.Running && len(m.Predecessors) > 0 {
		if err := s.store.Pubs.Succeed(ctx, m); err != nil {
			return view{}, err
		}
	}
	now, err := s.snapshot(ctx)
	if err != nil {
		return view{}, err
	}
	return s.view(now, name, m, have), nil
}

// anyHeld reports whether the CO still holds one of these publications, whatever is mounted at its target. The CO has the target's
// directory removed when it unpublishes it. Until then a container may run on a copy of the mount, and would write into its own
// directory below without it. Young publications may be of a publish that failed and is not retried.
func (s *Supervisor) anyHeld(ctx context.Context, pubs []state.Publication) (bool, error) {
	pubs = slices.DeleteFunc(slices.Clone(pubs), func(p state.Publication) bool { return time.Since(p.Created) < StaleAge })
	if len(pubs) == 0 {
		return false, nil
	}
	return host.Call(ctx, s.namespace, "checking targets", nil, func() (bool, error) {
		return slices.ContainsFunc(pubs, func(p state.Publication) bool {
			_, err := host.Inspect(p.Target)
			return err == nil
		}), nil
	})
}

// reconcileMount compares the actual state of a mount with the desired one and repairs the difference. again is when to reconcile it
// next, 0: with the others. The lock of the mount's key is held.
func (s *Supervisor) reconcileMount(ctx context.Context, name string) (again time.Duration, err error) {
	v, err := s.readView(ctx, name)
	if err != nil {
		return 0, err
	}
	m := v.mount
	switch {
	case !v.have && v.shown:
		return 0, nil // the record is lost; the unpublish of the last target stops it
	case !v.have:
		remains, err := s.store.MountOrRemains(ctx, name)
		if err != nil {
			return 0, err
		}
		return 0, s.drainer.StopUnrecorded(ctx, remains)
	case m.Phase == state.Starting:
		klog.FromContext(ctx).Info("Removing incompletely started mount", "mount", name, "volume", m.VolumeID)
		return 0, s.runner.Discard(ctx, m)
	case m.Phase == state.Ending && v.shown:
		return 0, s.creds.RefreshDraining(ctx, m) // a retry of its unpublish continues
	case m.Superseded && v.shown:
		return 0, s.creds.RefreshDraining(ctx, m) // its successor takes over its targets
	case m.Superseded, v.movedAway && !v.shown:
		m.Superseded = true
		rerr := s.creds.RefreshDraining(ctx, m)
		ctx, cancel := context.WithTimeout(ctx, replacedBound)
		defer cancel()
		if err := s.drainer.Stop(ctx, m, drain.Options{Copies: source.AwaitReplace}); err != nil {
			return replacedRetry, errors.Join(err, rerr)
		}
		return 0, nil
	case m.Phase == state.Ending:
		return 0, s.drainer.StopWithPredecessors(ctx, m)
	}
	if m.Lingers() && !v.shown {
		return 0, s.lingerer.Reconcile(ctx, m)
	}
	if !v.shown {
		if held, err := s.anyHeld(ctx, v.pubs); err != nil {
			return 0, err
		} else if !held {
			return 0, s.lingerer.Retire(ctx, m)
		}
	}
	return s.keepServing(ctx, v)
}

// keepServing ensures that a mount in use serves at all its places, with current credentials.
func (s *Supervisor) keepServing(ctx context.Context, v view) (again time.Duration, err error) {
	m := v.mount
	entry := s.tracker.Mount(m.Name)
	health, rerr, err := s.refresh(ctx, m)
	if err != nil {
		return 0, err
	}
	reason := tracker.ReasonHelper
	switch health {
	case mount.Healthy:
		herr := s.heal(ctx, v)
		if v.pinned && herr == nil {
			herr = s.pins.Release(ctx, m.Name)
		}
		return 0, errors.Join(herr, rerr)
	case mount.Outdated:
		reason = tracker.ReasonConfig
	case mount.Down:
		entry.Set(m.Client, tracker.Failed)
	}
	if !s.healer.Enabled {
		return 0, nil // the next republish repairs it
	}
	if wait := entry.RestartPause(); wait > 0 {
		klog.FromContext(ctx).Info("Client is crash-looping, backing off", "mount", m.Name, "volume", m.VolumeID, "for", wait.Round(time.Second))
		return wait, nil
	}
	failpoint.Here("uphold.dead")
	if health == mount.Down {
		if err := s.restart(ctx, &m, &creds.Grant{}); err != nil {
			return entry.RestartPause(), err
		}
		return 0, s.healer.Heal(ctx, m)
	}
	if _, err := s.replace(ctx, m, &creds.Grant{}, reason); err != nil {
		return entry.RestartPause(), err
	}
	return time.Second, nil
}

// heal heals a mount that shows a former file system, or that this process has not healed yet.
func (s *Supervisor) heal(ctx context.Context, v view) error {
	if v.stale {
		return s.healer.Heal(ctx, v.mount)
	}
	return s.healer.HealOnce(ctx, v.mount)
}

// refresh returns the health of a mount in use, and refreshes the credentials of one that serves. rerr is the error of the latter: the
// mount is healed without new credentials, too, but not replaced.
func (s *Supervisor) refresh(ctx context.Context, m state.Mount) (health mount.Health, rerr, err error) {
	health, status, err := s.runner.ProbeStatus(ctx, m)
	if err != nil || health != mount.Healthy {
		return health, nil, err
	}
	s.tracker.Mount(m.Name).Set(m.Client, tracker.Healthy)
	rerr = s.creds.Refresh(ctx, m, &status)
	old, err := s.runner.Outdated(m)
	if err != nil || rerr != nil && old {
		return health, nil, errors.Join(err, rerr)
	}
	if old {
		health = mount.Outdated
	}
	return health, rerr, nil
}
