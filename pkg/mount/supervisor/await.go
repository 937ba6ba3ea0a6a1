package supervisor

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/overlap"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// pageWaits explains why a mount waits.
const pageWaits = "docs/explanation/mounts.md#a-new-mount-waits-for-draining-mounts"

// drainPause is the time between two checks of a mount that is being unpublished.
const drainPause = 50 * time.Millisecond

// AwaitDrained waits, if Ensure or Rotate failed because another mount has to drain first, until that has drained, and stops it if no
// other call does. again reports whether the call can be repeated then. Errors are never final; they name the mount and its pending
// uploads. The caller holds no lock.
func (s *Supervisor) AwaitDrained(ctx context.Context, w want.Mount, failed error) (again bool, err error) {
	var first *overlap.Error
	if !errors.As(failed, &first) {
		return false, failed
	}
	name := first.First.Name
	klog.FromContext(ctx).Info("Waiting for draining mount", "mount", name, "volume", first.First.VolumeID, "client", first.First.Client,
		"bucket", first.First.Spec.Bucket, "prefix", first.First.Spec.Prefix)
	wait := drainWait{s, w, name}
	for {
		drained, err := wait.stopDraining(ctx)
		if err == nil && drained {
			return true, nil
		}
		if err == nil {
			select {
			case <-time.After(drainPause):
				continue
			case <-ctx.Done():
				err = fault.Errorf(fault.Busy, "its unpublish is in progress, or its targets were unmounted manually: %w", context.Cause(ctx))
			}
		}
		kind := fault.KindOf(err)
		if kind != fault.Busy && kind != fault.Timeout {
			kind = fault.Unavailable
		}
		return false, fault.See(pageWaits, fault.Errorf(kind, "waiting to mount the volume: %w: %w", first, err))
	}
}

// drainWait is the wait of one publication for a draining mount.
type drainWait struct {
	super *Supervisor
	w     want.Mount
	name  string
}

// stopDraining stops the mount if it still drains. drained is false if its unpublish has not unmounted all targets yet.
func (d drainWait) stopDraining(ctx context.Context) (drained bool, err error) {
	unlock, err := d.super.lockToStop(ctx, d.name)
	if err != nil {
		return false, err
	}
	defer unlock()
	m, ok, err := d.super.store.Mount(ctx, d.name)
	if err != nil || !ok {
		return true, err
	}
	if _, drains, err := d.super.order.First(ctx, d.w, []state.Mount{m}); err != nil || !drains {
		return true, err
	}
	if m.Lingers() {
		return true, d.super.lingerer.End(ctx, m, d.super.order.Spoils(d.w, m))
	}
	if m.Phase != state.Ending && !m.Superseded {
		return false, nil
	}
	grant, err := d.grantFor(ctx, &m)
	if err != nil {
		return false, err
	}
	return true, d.super.drainer.Stop(ctx, m, drain.Options{Grant: grant, Copies: source.Copies(m.Superseded)})
}

// grantFor returns the credentials that a publication supplies for a draining mount, whose helper may have lost its own in a crash or
// a reboot; nil if it supplies none. It supplies those of the same secret or service account, and those of the volume's rotated
// secret, because the former keys may not work any more.
func (d drainWait) grantFor(ctx context.Context, m *state.Mount) (*creds.Grant, error) {
	serves := m.Serves()
	same := d.w.Spec.Source == serves.Source && d.w.Spec.Identity == serves.Identity
	rotated := d.w.Publication.VolumeID == m.VolumeID && d.w.Spec.RotatedFrom(serves)
	if d.w.Spec.Source == credentials.SourceDriver || !same && !rotated {
		return nil, nil
	}
	grant, err := d.w.Plan(ctx, m.Spec)
	if err == nil {
		err = grant.Fit(ctx, m.Client)
	}
	if err == nil && rotated {
		var be backend.Backend
		if be, err = d.super.backend(m.Spec.Backend); err == nil {
			err = d.super.creds.Prove(ctx, grant, be, m.Spec)
		}
	}
	if err != nil {
		klog.FromContext(ctx).Info("Cannot refresh credentials of draining mount", "mount", m.Name, "error", err.Error())
		return nil, nil // the mount drains with what it has, if it can
	}
	if rotated {
		err = d.rotate(ctx, m, grant)
	}
	return grant, err
}

// rotate delivers the session of the volume's rotated secret to a draining mount. A client that keeps pending uploads on disk is
// killed once, because clients use their current keys for a while (rotationBound); the drain restarts it.
func (d drainWait) rotate(ctx context.Context, m *state.Mount, grant *creds.Grant) error {
	_, err := d.super.creds.Deliver(ctx, *m, grant)
	if err == nil && m.KeepsOnDisk(d.super.clients) {
		err = d.super.runner.KillClient(ctx, *m)
	}
	if err != nil && !errors.Is(err, helper.ErrGone) {
		return err
	}
	m.Rotated = d.w.Spec.Identity
	if m.Rotated == m.Spec.Identity {
		m.Rotated = ""
	}
	klog.FromContext(ctx).Info("Rotated credentials of draining mount", "mount", m.Name, "volume", m.VolumeID)
	return d.super.write(ctx, *m)
}
