package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// A new mount must read everything that pods on this node have closed before, and older data must never overwrite what it writes.
// So it waits for every draining mount whose prefix overlaps with its own, whatever that mount's key.
//
//   - A lingering mount has nothing to store. It ends before a mount starts that overlaps with it and writes, because its cache would
//     be outdated, and before one of the same volume with other settings starts.
//   - Only a start waits. A publication that joins a running mount does not, and neither do restarts and healing: mounts that pods
//     use may share a prefix.
//   - A mount drains from the moment when no target shows it until its record is removed. A mount that is still shown when the new
//     one checks counts as in use: its pod and the new one overlap in time, as two running mounts do.
//   - The wait holds no lock except, while it stops the draining mount, that of the draining mount's key. So two publications that
//     wait for each other's former mounts cannot deadlock.

// drainPause is the time between two checks of a mount that is being unpublished.
const drainPause = 50 * time.Millisecond

// drainFirstError is the error of a publication whose mount must not start before another one has drained.
type drainFirstError struct{ m state.Mount }

func (e *drainFirstError) Error() string {
	return fmt.Sprintf("mount %s of volume %s overlaps in bucket %s and may still upload files below %q", e.m.Name, e.m.VolumeID, e.m.Spec.Bucket, e.m.Spec.Prefix)
}

// drainOrder determines which mounts must drain before a new one starts.
type drainOrder struct{ *Options }

// checkDrained returns nil if a mount of the spec can start, because no mount that overlaps with it drains, or a drainFirstError.
func (d drainOrder) checkDrained(ctx context.Context, w want.Mount) error {
	all, err := d.Store.Mounts(ctx)
	if err != nil {
		return err
	}
	m, found, err := d.firstDraining(ctx, w, all)
	if err != nil || !found {
		return err
	}
	return fault.Errorf(fault.Busy, "%w", &drainFirstError{m})
}

// firstDraining returns the first of these mounts that has to drain, or to end, before the mount of a publication starts.
func (d drainOrder) firstDraining(ctx context.Context, w want.Mount, all []state.Mount) (m state.Mount, found bool, err error) {
	var running []state.Mount // in use, or left a moment ago
	for _, m := range all {
		switch {
		case m.Lingers():
			if d.spoils(w, m) != "" {
				return m, true, nil
			}
		case !d.overlap(w.Spec, m.Spec):
		case m.Spec.ReadOnly, m.Phase == state.Starting: // no pod could write to it
		case m.Phase == state.Ending && !m.Superseded:
			return m, true, nil
		default:
			running = append(running, m)
		}
	}
	if len(running) == 0 {
		return state.Mount{}, false, nil
	}
	used, err := d.usedMounts(ctx)
	if err != nil {
		return state.Mount{}, false, err
	}
	i := slices.IndexFunc(running, func(m state.Mount) bool { return !used[m.Name] })
	if i < 0 {
		return state.Mount{}, false, nil
	}
	return running[i], true, nil
}

// usedMounts returns the names of the mounts that pods may use: a mount shows somewhere on the host, or a mounted target belongs to a
// publication of it, of its successor, or of one that was moved away from it. Files may be open in the former two.
func (d drainOrder) usedMounts(ctx context.Context) (map[string]bool, error) {
	all, err := d.Store.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	pubs, err := d.Store.Pubs.All(ctx)
	if err != nil {
		return nil, err
	}
	mounts, err := d.Namespace.Mounts(ctx) // after the publications: a target is recorded before it is mounted
	if err != nil {
		return nil, err
	}
	predecessors, targets, used := map[string][]string{}, map[string]bool{}, map[string]bool{}
	for _, m := range all {
		predecessors[m.Name] = m.Predecessors
	}
	for _, mnt := range mounts {
		if name, ours := mount.NameOf(mnt.Source); ours && !d.Pins.Own(mnt) {
			used[name], targets[mnt.Mountpoint] = true, true
		}
	}
	for _, p := range pubs {
		if targets[p.Target] {
			for _, name := range append(slices.Clone(p.MovedFrom), p.Mount) {
				used[name] = true
				for _, predecessor := range predecessors[name] {
					used[predecessor] = true
				}
			}
		}
	}
	return used, nil
}

// AwaitDrained waits, if Ensure or Rotate failed because another mount has to drain first, until that has drained, and stops it if no
// other call does. again reports whether the call can be repeated then. Errors are never final; they name the mount and its pending
// uploads. The caller holds no lock.
func (s *Supervisor) AwaitDrained(ctx context.Context, w want.Mount, failed error) (again bool, err error) {
	var first *drainFirstError
	if !errors.As(failed, &first) {
		return false, failed
	}
	name := first.m.Name
	klog.FromContext(ctx).Info("Waiting for draining mount", "mount", name, "volume", first.m.VolumeID, "client", first.m.Client,
		"bucket", first.m.Spec.Bucket, "prefix", first.m.Spec.Prefix)
	wait := drainWait{s, w, name}
	for {
		drained, err := wait.stop(ctx)
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
		return false, fault.See("docs/mounts.md#a-new-mount-waits-for-draining-mounts", fault.Errorf(kind, "waiting to mount the volume: %w: %w", first, err))
	}
}

// drainWait is the wait of one publication for a draining mount.
type drainWait struct {
	*Supervisor
	w    want.Mount
	name string
}

// stop stops the mount if it still drains. drained is false if its unpublish has not unmounted all targets yet.
func (d drainWait) stop(ctx context.Context) (drained bool, err error) {
	unlock, err := d.keys.lockToStop(ctx, d.name)
	if err != nil {
		return false, err
	}
	defer unlock()
	m, ok, err := d.Store.Mount(ctx, d.name)
	if err != nil || !ok {
		return true, err
	}
	if _, drains, err := (drainOrder{&d.Options}).firstDraining(ctx, d.w, []state.Mount{m}); err != nil || !drains {
		return true, err
	}
	if m.Lingers() {
		return true, d.endLinger(ctx, m, drainOrder{&d.Options}.spoils(d.w, m))
	}
	if m.Phase != state.Ending && !m.Superseded {
		return false, nil
	}
	grant, err := d.grantFor(ctx, &m)
	if err != nil {
		return false, err
	}
	return true, d.Drainer.Stop(ctx, m, drain.Options{Grant: grant, Replaced: m.Superseded})
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
		if be, err = d.Backends.Backend(m.Spec.Backend); err == nil {
			err = d.Creds.Prove(ctx, grant, be, m.Spec)
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
	_, err := d.Creds.Deliver(ctx, *m, grant)
	if err == nil && m.KeepsOnDisk(d.Clients) {
		err = d.Runner.KillClient(ctx, *m)
	}
	if err != nil && !errors.Is(err, helper.ErrGone) {
		return err
	}
	m.Rotated = d.w.Spec.Identity
	if m.Rotated == m.Spec.Identity {
		m.Rotated = ""
	}
	klog.FromContext(ctx).Info("Rotated credentials of draining mount", "mount", m.Name, "volume", m.VolumeID)
	return d.write(ctx, *m)
}

// overlap reports whether two mounts can have an object in common: they are of the same bucket, and the prefix of one equals or begins
// that of the other. Prefixes end in "/", so "a/" and "ab/" have nothing in common; "" is the whole bucket.
func (d drainOrder) overlap(a, b mount.Spec) bool {
	return a.Bucket == b.Bucket && (strings.HasPrefix(a.Prefix, b.Prefix) || strings.HasPrefix(b.Prefix, a.Prefix)) && d.sameService(a.Backend, b.Backend)
}

// sameService reports whether two backends may be one service: two names in the config file can have the same endpoint. A backend that
// was removed from the config file may be any.
func (d drainOrder) sameService(a, b string) bool {
	if a == b {
		return true
	}
	one, err := d.Backends.Backend(a)
	if err != nil {
		return true
	}
	other, err := d.Backends.Backend(b)
	return err != nil || serviceAt(one.Endpoint) == serviceAt(other.Endpoint)
}

// serviceAt is the host and port of an endpoint. All of AWS is one service, in which bucket names are unique
// (https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html).
func serviceAt(endpoint string) string {
	const aws = "amazonaws.com"
	if endpoint == "" {
		return aws
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		return endpoint
	}
	name, port := strings.ToLower(u.Hostname()), u.Port()
	if rest := strings.TrimSuffix(name, ".cn"); rest == aws || strings.HasSuffix(rest, "."+aws) {
		return aws
	}
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.TrimSuffix(name, "."), port)
}
