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
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
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
	if !s.Store.Exists(ctx, name) {
		s.Tracker.Forget(name)
		return 0, true, nil
	}
	rctx, cancel := context.WithTimeout(ctx, reconcileBound)
	defer cancel()
	again, err = s.reconcileMount(rctx, name)
	return again, !s.Store.Exists(ctx, name), err
}

// TryReconcile reconciles the mounts of one key, in this order. If another call works on the key it does nothing. failed is called with
// errors.
func (s *Supervisor) TryReconcile(ctx context.Context, key string, names []string, failed func(name string, err error)) {
	unlock, ok := s.keys.TryLock(key)
	if !ok {
		return
	}
	defer unlock()
	for _, name := range names {
		if _, err := s.reconcileMount(ctx, name); err != nil {
			failed(name, err)
		}
	}
}

// view is the actual state of one mount.
type view struct {
	mount     state.Mount
	have      bool                // mount was read
	pubs      []state.Publication // whose targets show it, or should
	shown     bool                // at one of them, or elsewhere on the host
	heldByCO  bool                // a target was unmounted, but the CO has not unpublished it
	stale     bool                // a file system of an earlier generation, or of a predecessor, shows somewhere on the host
	pinned    bool                // former file systems are pinned, because they may still be shown
	movedAway bool                // it has no publication, and some were moved away from it
}

// viewer reads the actual state of mounts.
type viewer struct{ *Options }

func (o viewer) look(ctx context.Context, name string) (view, error) {
	var v view
	var err error
	if v.mount, v.have, err = o.Store.Mount(ctx, name); errors.Is(err, state.ErrDamaged) {
		o.Tracker.LogError(ctx, name+" record", err, "Record of mount is damaged", "mount", name)
		v.have, err = false, nil
	}
	if err != nil {
		return view{}, err
	}
	if v.have && v.mount.Phase == state.Running {
		if err := o.Store.Pubs.Succeed(ctx, v.mount); err != nil {
			return view{}, err
		}
	}
	all, err := o.Store.Pubs.All(ctx)
	if err != nil {
		return view{}, err
	}
	v.pubs = slices.DeleteFunc(slices.Clone(all), func(p state.Publication) bool { return p.Mount != name })
	v.movedAway = len(v.pubs) == 0 && movedElsewhere(all, name, "")
	if v.have && v.mount.Phase == state.Running {
		if v.heldByCO, err = o.anyHeld(ctx, v.pubs); err != nil {
			return view{}, err
		}
	}
	mounts, err := o.Namespace.Mounts(ctx)
	if err != nil {
		return view{}, err
	}
	source, mounted := o.Sources.Find(mounts, name)
	at := heal.PlacesOf(v.pubs)
	names := append([]string{name}, v.mount.Predecessors...)
	former := o.Pins.Known(mounts, names, at.Targets)
	delete(former, source.Minor)
	v.pinned = len(o.Pins.List(mounts, name)) > 0
	for _, mnt := range mounts {
		shown, ours := mount.NameOf(mnt.Source)
		if !ours || o.Pins.Own(mnt) {
			continue
		}
		// A publication that is being moved here still shows the mount that it comes from.
		moving := heal.MovingAway(v.pubs, shown, mnt)
		v.shown = v.shown || shown == name || at.Targets[mnt.Mountpoint] && (moving || slices.Contains(v.mount.Predecessors, shown))
		v.stale = v.stale || mounted && v.have && (moving || pins.Serves(mnt, names) && former.Has(mnt) && at.Has(mnt))
	}
	return v, nil
}

// anyHeld reports whether the CO still holds one of these publications, whatever is mounted at its target. The CO has the target's
// directory removed when it unpublishes it. Until then a container may run on a copy of the mount, and would write into its own
// directory below without it. Young publications may be of a publish that failed and is not retried.
func (o viewer) anyHeld(ctx context.Context, pubs []state.Publication) (bool, error) {
	pubs = slices.DeleteFunc(slices.Clone(pubs), func(p state.Publication) bool { return time.Since(p.Created) < StaleAge })
	if len(pubs) == 0 {
		return false, nil
	}
	return host.Call(ctx, o.Namespace, "checking targets", nil, func() (bool, error) {
		return slices.ContainsFunc(pubs, func(p state.Publication) bool {
			_, err := host.Inspect(p.Target)
			return err == nil
		}), nil
	})
}

// reconcileMount compares the actual state of a mount with the desired one and repairs the difference. again is when to reconcile it
// next, 0: with the others. The lock of the mount's key is held.
func (s *Supervisor) reconcileMount(ctx context.Context, name string) (again time.Duration, err error) {
	v, err := viewer{&s.Options}.look(ctx, name)
	if err != nil {
		return 0, err
	}
	m := v.mount
	switch {
	case !v.have && v.shown:
		return 0, nil // the record is lost; the unpublish of the last target stops it
	case !v.have:
		remains, err := s.Store.MountOrRemains(ctx, name)
		if err != nil {
			return 0, err
		}
		return 0, s.Drainer.StopUnrecorded(ctx, remains)
	case m.Phase == state.Starting:
		klog.FromContext(ctx).Info("Removing incompletely started mount", "mount", name, "volume", m.VolumeID)
		return 0, s.Runner.Discard(ctx, m)
	case m.Phase == state.Ending && v.shown:
		return 0, s.Creds.RefreshDraining(ctx, m) // a retry of its unpublish continues
	case m.Superseded && v.shown:
		return 0, s.Creds.RefreshDraining(ctx, m) // its successor takes over its targets
	case m.Superseded, v.movedAway && !v.shown:
		m.Superseded = true
		rerr := s.Creds.RefreshDraining(ctx, m)
		ctx, cancel := context.WithTimeout(ctx, replacedBound)
		defer cancel()
		if err := s.Drainer.Stop(ctx, m, drain.Options{Replaced: true}); err != nil {
			return replacedRetry, errors.Join(err, rerr)
		}
		return 0, nil
	case m.Phase == state.Ending || !v.shown && !v.heldByCO:
		return 0, s.stop(ctx, m)
	}
	return s.keepServing(ctx, v)
}

// keepServing ensures that a mount in use serves at all its places, with current credentials.
func (s *Supervisor) keepServing(ctx context.Context, v view) (again time.Duration, err error) {
	m := v.mount
	entry := s.Tracker.Mount(m.Name)
	health, err := s.Runner.Probe(ctx, m)
	if err != nil {
		return 0, err
	}
	reason := tracker.ReasonHelper
	switch health {
	case mount.Healthy:
		entry.Set(m.Client, tracker.Healthy)
		rerr := s.Creds.Refresh(ctx, m) // it is healed without new credentials, too
		old, err := s.outdated(m)
		if err != nil || rerr != nil && old {
			return 0, errors.Join(err, rerr)
		}
		if !old {
			herr := s.Healer.HealOnce(ctx, m, v.stale)
			if v.pinned && herr == nil {
				herr = s.Pins.Release(ctx, m.Name)
			}
			return 0, errors.Join(herr, rerr)
		}
		reason = tracker.ReasonConfig
	case mount.Down:
		entry.Set(m.Client, tracker.Failed)
	}
	if !s.Healer.Enabled() {
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
		return 0, s.Healer.HealOnce(ctx, m, true)
	}
	if _, err := s.replace(ctx, m, &creds.Grant{}, reason); err != nil {
		return entry.RestartPause(), err
	}
	return time.Second, nil
}
