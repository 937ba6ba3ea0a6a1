// Package overlap determines which mounts must drain, or end, before a new one starts.
//
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
package overlap

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// Error is the error of a publication whose mount must not start before another one has drained.
type Error struct{ First state.Mount }

func (e *Error) Error() string {
	return fmt.Sprintf("mount %s of volume %s overlaps in bucket %s and may still upload files below %q",
		e.First.Name, e.First.VolumeID, e.First.Spec.Bucket, e.First.Spec.Prefix)
}

// Order determines which mounts must drain, or end, before a new one starts.
type Order struct {
	Store     *state.Store
	Namespace *host.Namespace
	Pins      *pins.Pins
	Backend   func(name string) (backend.Backend, error)
}

// Check returns nil if a mount of the spec can start, because no mount that overlaps with it drains, or an *Error.
func (o Order) Check(ctx context.Context, w want.Mount) error {
	all, err := o.Store.Mounts(ctx)
	if err != nil {
		return err
	}
	m, found, err := o.First(ctx, w, all)
	if err != nil || !found {
		return err
	}
	return fault.Errorf(fault.Busy, "%w", &Error{m})
}

// First returns the first of these mounts that has to drain, or to end, before the mount of a publication starts.
func (o Order) First(ctx context.Context, w want.Mount, all []state.Mount) (m state.Mount, found bool, err error) {
	var running []state.Mount // in use, or left a moment ago
	for _, m := range all {
		switch {
		case m.Lingers():
			if o.Spoils(w, m) != "" {
				return m, true, nil
			}
		case !o.overlap(w.Spec, m.Spec):
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
	used, err := o.usedMounts(ctx)
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
func (o Order) usedMounts(ctx context.Context) (map[string]bool, error) {
	all, err := o.Store.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	pubs, err := o.Store.Pubs.All(ctx)
	if err != nil {
		return nil, err
	}
	mounts, err := o.Namespace.Mounts(ctx) // after the publications: a target is recorded before it is mounted
	if err != nil {
		return nil, err
	}
	predecessors, targets, used := map[string][]string{}, map[string]bool{}, map[string]bool{}
	for _, m := range all {
		predecessors[m.Name] = m.Predecessors
	}
	for _, mnt := range mounts {
		if name, ours := mount.NameOf(mnt.Source); ours && !o.Pins.Own(mnt) {
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

// Spoils returns why a new mount ends a lingering one, "" if it does not: they overlap, and pods wrote to that one or to both; or that one is of the
// same volume with other settings, or of its former secret.
func (o Order) Spoils(w want.Mount, m state.Mount) (reason string) {
	switch {
	case w.Publication.VolumeID == m.VolumeID && !sameButPod(w.Spec, m.Spec):
		return tracker.EndedVolume
	case !m.Spec.ReadOnly && o.overlap(w.Spec, m.Spec):
		return tracker.EndedOverlap
	}
	return ""
}

// sameButPod reports whether two specs differ only in the pods whose identity they have.
func sameButPod(a, b mount.Spec) bool {
	if a.Source != credentials.SourceWorkload || b.Source != credentials.SourceWorkload {
		return false
	}
	a.Identity, a.RoleARN = b.Identity, b.RoleARN
	return a.Encode() == b.Encode()
}

// overlap reports whether two mounts can have an object in common: they are of the same bucket, and the prefix of one equals or begins
// that of the other. Prefixes end in "/", so "a/" and "ab/" have nothing in common; "" is the whole bucket.
func (o Order) overlap(a, b mount.Spec) bool {
	return a.Bucket == b.Bucket && (strings.HasPrefix(a.Prefix, b.Prefix) || strings.HasPrefix(b.Prefix, a.Prefix)) && o.sameService(a.Backend, b.Backend)
}

// sameService reports whether two backends may be one service: two names in the config file can have the same endpoint. A backend that
// was removed from the config file may be any.
func (o Order) sameService(a, b string) bool {
	if a == b {
		return true
	}
	one, err := o.Backend(a)
	if err != nil {
		return true
	}
	other, err := o.Backend(b)
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
