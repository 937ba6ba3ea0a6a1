package mount

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
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// A new mount must read all that pods have closed on this node before, and older data must never be stored over what it
// writes. So it waits for every draining mount whose place in S3 overlaps with its own, whatever that mount's key.
//
//   - Only a start waits. A publication that joins a running mount does not, and neither do restarts and healing: mounts
//     that pods use may share a prefix.
//   - A mount drains from the moment when no target shows it, until its record is gone. One that is still shown when the new
//     mount looks for it counts as in use: its pod and the new one overlap in time, as two running mounts do.
//   - The wait holds no lock but, while it ends the draining mount, that of the draining mount's key. So two publications
//     that wait for each other's former mounts cannot block each other.

// drainPause is the time between two looks at a mount that is being unpublished.
const drainPause = 50 * time.Millisecond

// drainsFirstError is the answer to a publication that must not start its mount yet. Publish waits and tries again.
type drainsFirstError struct{ rec record }

func (e *drainsFirstError) Error() string {
	return fmt.Sprintf("mount %s of volume %s overlaps in bucket %s and may still store files below %q", e.rec.Name, e.rec.VolumeID, e.rec.Spec.Bucket, e.rec.Spec.Prefix)
}

// drainedFirst is nil when a mount of the spec can start: no mount of another key that overlaps with it drains. Otherwise it
// returns a drainsFirstError. Mounts of the same key are the caller's.
func (m *Manager) drainedFirst(ctx context.Context, spec Spec) error {
	var all []record
	if err := m.do(ctx, func() (err error) { all, err = m.store.records(); return err }); err != nil {
		return err
	}
	key := spec.Key()
	for _, rec := range all {
		if rec.Key == key || !m.overlap(spec, rec.Spec) {
			continue
		}
		if drains, err := m.drains(ctx, rec); err != nil {
			return err
		} else if drains {
			return fault.Errorf(fault.Busy, "%w", &drainsFirstError{rec})
		}
	}
	return nil
}

// drains reports whether a mount is left by its pods and may still store something.
func (m *Manager) drains(ctx context.Context, rec record) (bool, error) {
	switch {
	case rec.Spec.ReadOnly, rec.Phase == phaseStarting: // no pod could write to it
		return false, nil
	case rec.Phase == phaseEnding && !rec.Superseded:
		return true, nil
	}
	shown, err := m.isShown(ctx, rec.Name)
	return !shown, err
}

// isShown reports whether a pod may use a mount: it shows somewhere on the host, or a target that is mounted belongs to a
// publication of it, of its successor, or of one that was moved away from it. Files may be open in it then.
func (m *Manager) isShown(ctx context.Context, name string) (bool, error) {
	var (
		pubs    []publication
		records []record
	)
	if err := m.do(ctx, func() (err error) {
		if records, err = m.store.records(); err == nil {
			pubs, err = m.store.allPublications()
		}
		return err
	}); err != nil {
		return false, err
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return false, err
	}
	succeeds := func(by string) bool {
		return slices.ContainsFunc(records, func(r record) bool { return r.Name == by && slices.Contains(r.Former, name) })
	}
	return slices.ContainsFunc(mounts, func(mnt host.Mount) bool {
		shown, ours := nameOfSource(mnt.Source)
		switch {
		case !ours, mnt.Mountpoint == m.store.sourceDir(shown):
			return false
		case shown == name:
			return true
		}
		return slices.ContainsFunc(pubs, func(p publication) bool {
			return p.Target == mnt.Mountpoint && (p.Mount == name || slices.Contains(p.From, name) || succeeds(p.Mount))
		})
	}), nil
}

// awaitDrained returns when a mount does not drain any more, and ends it where no other call does. Its errors are never
// final: they name the mount and what is left, and a retry waits again. No lock is held.
func (m *Manager) awaitDrained(ctx context.Context, r Request, spec Spec, first *drainsFirstError) error {
	name := first.rec.Name
	klog.FromContext(ctx).Info("Waiting for a draining mount", "mount", name, "volume", first.rec.VolumeID, "client", first.rec.Client,
		"bucket", first.rec.Spec.Bucket, "prefix", first.rec.Spec.Prefix)
	for {
		again, err := m.endDraining(ctx, r, spec, name)
		if err == nil && again {
			select {
			case <-time.After(drainPause):
				continue
			case <-ctx.Done():
				err = fault.Errorf(fault.Busy, "it is being unpublished, or its targets were unmounted by hand: %w", context.Cause(ctx))
			}
		}
		if err == nil {
			return nil
		}
		kind := fault.KindOf(err)
		if kind != fault.Busy && kind != fault.Timeout {
			kind = fault.Unavailable
		}
		return fault.Errorf(kind, "waiting to mount the volume: %w: %w", first, err)
	}
}

// endDraining ends a mount if it still drains. again: its unpublication has not come so far, and is to be waited for.
func (m *Manager) endDraining(ctx context.Context, r Request, spec Spec, name string) (again bool, err error) {
	unlock, err := m.lockEnding(ctx, name)
	if err != nil {
		return false, err
	}
	defer unlock()
	var (
		rec  record
		have bool
	)
	if err := m.do(ctx, func() (err error) { rec, have, err = m.store.record(name); return err }); err != nil || !have {
		return false, err
	}
	if drains, err := m.drains(ctx, rec); err != nil || !drains {
		return false, err
	}
	if rec.Phase != phaseEnding && !rec.Superseded {
		return true, nil
	}
	s, err := m.supplyFor(ctx, r, spec, rec)
	if err != nil {
		return false, err
	}
	return false, m.end(ctx, rec, successor{supply: s, shown: rec.Superseded})
}

// supplyFor returns what a publication brings for a draining mount of another key, whose helper may have lost its
// credentials in a crash or a reboot; nil: nothing. That is what comes from the same secret or service account, and what
// comes from the volume's changed secret, because the former keys may not work any more. The lock of the mount's key is held.
func (m *Manager) supplyFor(ctx context.Context, r Request, spec Spec, rec record) (*supply, error) {
	serves := rec.serves()
	same := spec.Source == serves.Source && spec.Identity == serves.Identity
	changed := r.VolumeID == rec.VolumeID && spec.rotatedFrom(serves)
	if spec.Source == credentials.SourceDriver || !same && !changed {
		return nil, nil //nolint:nilnil // documented
	}
	s, err := m.plan(ctx, r, rec.Spec)
	if err == nil {
		err = s.fit(ctx, rec)
	}
	if err == nil && changed {
		var be backend.Backend
		if be, err = m.Backends.Backend(rec.Spec.Backend); err == nil {
			err = m.prove(ctx, s, be, rec.Spec)
		}
	}
	if err != nil { // the mount drains with what it has, if it can
		klog.FromContext(ctx).Info("The publication's credentials are not for the draining mount", "mount", rec.Name, "reason", err.Error())
		return nil, nil //nolint:nilnil // documented
	}
	if !changed {
		return s, nil
	}
	if _, err := m.give(ctx, rec, s); err != nil && !errors.Is(err, helper.ErrGone) {
		return nil, err
	}
	return s, nil
}

// overlap reports whether two mounts can have an object in common: they are of the same bucket, and the prefix of one is
// that of the other or begins it. Prefixes end in "/", so "a/" and "ab/" have nothing in common; "" is the whole bucket.
func (m *Manager) overlap(a, b Spec) bool {
	return a.Bucket == b.Bucket && (strings.HasPrefix(a.Prefix, b.Prefix) || strings.HasPrefix(b.Prefix, a.Prefix)) && m.sameService(a.Backend, b.Backend)
}

// sameService reports whether two backends may be one service: two names of the config file can have the same endpoint. A
// backend that is not in the config file any more may be any.
func (m *Manager) sameService(a, b string) bool {
	if a == b {
		return true
	}
	one, err := m.Backends.Backend(a)
	if err != nil {
		return true
	}
	other, err := m.Backends.Backend(b)
	return err != nil || serviceAt(one.Endpoint) == serviceAt(other.Endpoint)
}

// serviceAt is the host and port of an endpoint. All of AWS's are one service, in which bucket names are unique
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
