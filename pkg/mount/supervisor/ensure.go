package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// Ensure ensures a running mount for a publication and returns it with its key locked.
func (s *Supervisor) Ensure(ctx context.Context, w want.Mount) (want.Lease, error) {
	began := time.Now()
	unlock, err := s.keys.lock(ctx, w.Key())
	if err != nil {
		return want.Lease{}, err
	}
	m, err := s.ensureFor(ctx, w)
	if err != nil {
		unlock()
		return want.Lease{}, err
	}
	return want.Lease{Mount: m, Release: unlock, Abandon: func(ctx context.Context) error {
		abandoned := m
		if m.Created.After(began) {
			abandoned.LingerFor = 0 // it was started for this publication alone
		}
		return s.release(ctx, abandoned, w.Publication.Target)
	}}, nil
}

// ensureFor returns a running mount for a publication: the one at its target if that was rotated to the spec, else one of the spec's
// key.
func (s *Supervisor) ensureFor(ctx context.Context, w want.Mount) (state.Mount, error) {
	if w.At == "" {
		return s.ensure(ctx, w)
	}
	m, ok, err := s.store.Mount(ctx, w.At)
	if err != nil {
		return state.Mount{}, err
	}
	if !ok || m.Phase != state.Running || m.Superseded {
		return state.Mount{}, fault.Errorf(fault.Busy, "mount %s at the target is being stopped", w.At)
	}
	return m, s.join(ctx, &m, w.Grant)
}

// ensure returns a running mount of the spec's key. If a mount of another key has to drain before a new one starts, the error is a
// *overlap.Error.
func (s *Supervisor) ensure(ctx context.Context, w want.Mount) (state.Mount, error) {
	all, err := s.store.MountsOf(ctx, w.Spec.Key())
	if err != nil {
		return state.Mount{}, err
	}
	for _, m := range all {
		if m.Superseded {
			continue
		}
		if m.Spec.Encode() != w.Spec.Encode() {
			return state.Mount{}, fmt.Errorf("mount %s has this volume's key but a different spec: delete its pods, then remove %s", m.Name, s.store.MountDir(m.Name))
		}
		if !m.Joinable(w.Spec) {
			continue // it was rotated to another identity
		}
		switch m.Phase {
		case state.Starting:
			if err := s.runner.Discard(ctx, m); err != nil {
				return state.Mount{}, err
			}
		case state.Ending:
			// Its pending uploads must finish before another generation uses the same prefix.
			if err := s.drainer.Stop(ctx, m, drain.Options{Grant: w.Grant}); err != nil {
				return state.Mount{}, fault.See(pageWaits, fmt.Errorf("waiting for the mount's previous generation: %w", err))
			}
		default:
			if m.Lingers() {
				if joined, err := s.lingerer.Join(ctx, &m, w); joined || err != nil {
					return m, err
				}
				continue
			}
			if err := s.join(ctx, &m, w.Grant); err != nil {
				return m, err
			}
			return m, s.lingerer.Extend(ctx, &m, w.Linger)
		}
	}
	if err := s.order.Check(ctx, w); err != nil {
		return state.Mount{}, err
	}
	return s.runner.Start(ctx, runner.StartParams{VolumeID: w.Publication.VolumeID, Identity: w.Identity, Spec: w.Spec, Grant: w.Grant, LingerFor: w.Linger})
}

// join ensures that an existing mount serves with the grant's credentials. If its client has exited or is outdated, it is restarted
// or replaced first, and so are the mount's other publications. m is the mount to use then.
func (s *Supervisor) join(ctx context.Context, m *state.Mount, grant *creds.Grant) error {
	health, status, err := s.healthAndStatus(ctx, *m)
	if err != nil {
		return err
	}
	switch health {
	case mount.Orphaned:
		*m, err = s.replace(ctx, *m, grant, tracker.ReasonHelper)
		return err
	case mount.Outdated:
		*m, err = s.replace(ctx, *m, grant, tracker.ReasonConfig)
		return err
	case mount.Healthy:
		return s.creds.Apply(ctx, *m, grant, &status)
	}
	if err := s.restart(ctx, m, grant); err != nil {
		return err
	}
	return s.healer.Heal(ctx, *m)
}

// restart restarts the client of a mount that is down, and counts and logs why. grant may be empty.
func (s *Supervisor) restart(ctx context.Context, m *state.Mount, grant *creds.Grant) error {
	entry := s.tracker.Mount(m.Name)
	why := entry.Exited(s.runner.CauseOf(ctx, *m))
	log := klog.FromContext(ctx).WithValues("mount", m.Name, "volume", m.VolumeID, "client", m.Client, "bucket", m.Spec.Bucket, "prefix", m.Spec.Prefix)
	log.Error(nil, "Client exited, restarting it", "reason", why.Reason, "detail", why.Detail)
	entry.Set(m.Client, tracker.Failed)
	began := time.Now()
	err := s.runner.Restart(ctx, m, grant)
	s.tracker.CountRestart(m.Client, why.Reason, err)
	entry.RestartDone(err)
	if err != nil {
		return fault.Errorf(fault.Unavailable, "volume %s: restarting client %s of mount %s after it exited (%s): %w", m.VolumeID, m.Client, m.Name, why.Detail, err)
	}
	entry.Restarted()
	entry.Set(m.Client, tracker.Healthy)
	log.Info("Restarted client", "reason", why.Reason, "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// discardIncomplete removes mounts of a key that a crash left half started. The caller holds the key's lock.
func (s *Supervisor) discardIncomplete(ctx context.Context, all []state.Mount) (err error) {
	for _, m := range all {
		if m.Phase == state.Starting {
			err = errors.Join(err, s.runner.Discard(ctx, m))
		}
	}
	return err
}

// replace replaces a mount that serves but must be started again. If its client may hold closed files, only the client is replaced,
// because two clients on one prefix would store them in any order. Otherwise another mount takes over the publications, and open
// files stay with the old one until they are closed. grant may be empty.
func (s *Supervisor) replace(ctx context.Context, m state.Mount, grant *creds.Grant, reason string) (state.Mount, error) {
	if m.Spec.Source != credentials.SourceDriver && grant.IsEmpty() {
		return state.Mount{}, fault.Errorf(fault.Unavailable, "volume %s: mount %s must be replaced (%s); waiting for the next republish to supply credentials",
			m.VolumeID, m.Name, reason)
	}
	klog.FromContext(ctx).Info("Replacing mount", "mount", m.Name, "volume", m.VolumeID, "client", m.Client, "reason", reason)
	failed := func(err error) (state.Mount, error) {
		s.tracker.CountRestart(m.Client, reason, err)
		s.tracker.Mount(m.Name).RestartDone(err)
		return state.Mount{}, err
	}
	cl, err := s.clients.Of(m.Client)
	if err != nil {
		return state.Mount{}, err
	}
	if mount.KeepsOnDisk(cl, m.Spec) {
		if err := s.runner.Restart(ctx, &m, grant); err != nil {
			return failed(err)
		}
		s.tracker.CountRestart(m.Client, reason, nil)
		return m, s.healer.Heal(ctx, m)
	}
	if grant.IsEmpty() {
		if grant, err = s.creds.PlanOwn(ctx, m); err != nil {
			return failed(err)
		}
	}
	all, err := s.store.MountsOf(ctx, m.Key)
	if err == nil {
		err = s.discardIncomplete(ctx, all)
	}
	if err != nil {
		return failed(err)
	}
	successor, err := s.runner.Start(ctx, runner.StartParams{
		VolumeID: m.VolumeID, Identity: m.Spec.Source, Spec: m.Spec, Grant: grant, Predecessors: append(m.Predecessors, m.Name), Rotated: m.Rotated,
		LingerFor: m.LingerFor,
	})
	if err != nil {
		return failed(err)
	}
	failpoint.Here("renew.started")
	s.tracker.CountRestart(m.Client, reason, nil)
	if err := s.store.Pubs.Succeed(ctx, successor); err != nil {
		return state.Mount{}, err
	}
	failpoint.Here("renew.succeeded")
	if err := s.healer.Heal(ctx, successor); err != nil {
		return state.Mount{}, err
	}
	m.Superseded = true
	s.stopReplaced(ctx, m, nil)
	return successor, nil
}
