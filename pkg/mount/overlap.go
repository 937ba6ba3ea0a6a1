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

// drainedFirst is nil when a mount of the spec can start: no mount that overlaps with it drains. Otherwise it returns a
// drainsFirstError.
func (m *Manager) drainedFirst(ctx context.Context, spec Spec) error {
	var all []record
	if err := m.do(ctx, func() (err error) { all, err = m.store.records(); return err }); err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(rec record) bool { return !m.overlap(spec, rec.Spec) })
	rec, found, err := m.firstDraining(ctx, all)
	if err != nil || !found {
		return err
	}
	return fault.Errorf(fault.Busy, "%w", &drainsFirstError{rec})
}

// firstDraining returns the first of some mounts that its pods have left and that may still store something.
func (m *Manager) firstDraining(ctx context.Context, all []record) (rec record, found bool, err error) {
	var perhaps []record // in use, or left a moment ago
	for _, rec := range all {
		switch {
		case rec.Spec.ReadOnly, rec.Phase == phaseStarting: // no pod could write to it
		case rec.Phase == phaseEnding && !rec.Superseded:
			return rec, true, nil
		default:
			perhaps = append(perhaps, rec)
		}
	}
	if len(perhaps) == 0 {
		return record{}, false, nil
	}
	shown, err := m.shownMounts(ctx)
	if err != nil {
		return record{}, false, err
	}
	i := slices.IndexFunc(perhaps, func(rec record) bool { return !shown[rec.Name] })
	if i < 0 {
		return record{}, false, nil
	}
	return perhaps[i], true, nil
}

// shownMounts are the names of the mounts that pods may use: a mount shows somewhere on the host, or a target that is
// mounted belongs to a publication of it, of its successor, or of one that was moved away from it. Files may be open in it
// then.
func (m *Manager) shownMounts(ctx context.Context) (map[string]bool, error) {
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
		return nil, err
	}
	mounts, err := m.Namespace.Mounts(ctx) // after the publications: a target is mounted after it is recorded
	if err != nil {
		return nil, err
	}
	formers, targets, shown := map[string][]string{}, map[string]bool{}, map[string]bool{}
	for _, rec := range records {
		formers[rec.Name] = rec.Former
	}
	for _, mnt := range mounts {
		if name, ours := nameOfSource(mnt.Source); ours && !m.store.own(mnt) {
			shown[name], targets[mnt.Mountpoint] = true, true
		}
	}
	for _, p := range pubs {
		if targets[p.Target] {
			for _, name := range append(slices.Clone(p.From), p.Mount) {
				shown[name] = true
				for _, former := range formers[name] {
					shown[former] = true
				}
			}
		}
	}
	return shown, nil
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
	if _, drains, err := m.firstDraining(ctx, []record{rec}); err != nil || !drains {
		return false, err
	}
	if rec.Phase != phaseEnding && !rec.Superseded {
		return true, nil
	}
	s, err := m.supplyFor(ctx, r, spec, &rec)
	if err != nil {
		return false, err
	}
	return false, m.end(ctx, rec, successor{supply: s, shown: rec.Superseded})
}

// supplyFor returns what a publication brings for a draining mount, whose helper may have lost its credentials in a crash or a
// reboot; nil: nothing. That is what comes from the same secret or service account, and what comes from the volume's changed
// secret, because the former keys may not work any more. The lock of the mount's key is held.
func (m *Manager) supplyFor(ctx context.Context, r Request, spec Spec, rec *record) (*supply, error) {
	serves := rec.serves()
	same := spec.Source == serves.Source && spec.Identity == serves.Identity
	changed := r.VolumeID == rec.VolumeID && spec.rotatedFrom(serves)
	if spec.Source == credentials.SourceDriver || !same && !changed {
		return nil, nil
	}
	s, err := m.plan(ctx, r, rec.Spec)
	if err == nil {
		err = s.fit(ctx, *rec)
	}
	if err == nil && changed {
		var be backend.Backend
		if be, err = m.Backends.Backend(rec.Spec.Backend); err == nil {
			err = m.prove(ctx, s, be, rec.Spec)
		}
	}
	if err != nil {
		klog.FromContext(ctx).Info("The draining mount keeps its credentials", "mount", rec.Name, "reason", err.Error())
		return nil, nil //nolint:nilerr // the mount drains with what it has, if it can
	}
	if changed {
		err = m.rotateDraining(ctx, rec, spec, s)
	}
	return s, err
}

// rotateDraining gives a draining mount the session of its volume's changed secret. A client that keeps on disk what it has
// to store is killed, once: clients hold the keys that they were last given (takeUpBound), and draining starts it again.
func (m *Manager) rotateDraining(ctx context.Context, rec *record, spec Spec, s *supply) error {
	_, err := m.give(ctx, *rec, s)
	if err == nil && m.holdsBack(*rec) {
		peer := m.peer(rec.Name)
		hctx, cancel := context.WithTimeout(ctx, helperBound)
		defer cancel()
		var status helper.Status
		if status, err = peer.Hello(hctx); err == nil && status.State == helper.StateRunning {
			_, err = m.killClient(ctx, *rec, peer, status)
		}
	}
	if err != nil && !errors.Is(err, helper.ErrGone) {
		return err
	}
	rec.Rotated = spec.Identity
	if rec.Rotated == rec.Spec.Identity {
		rec.Rotated = ""
	}
	klog.FromContext(ctx).Info("The draining mount has the session of the changed secret", "mount", rec.Name, "volume", rec.VolumeID)
	return m.rewrite(ctx, *rec)
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
