package mount

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// shown is what a target shows.
type shown int

const (
	shownNothing shown = iota
	shownAlive         // the very volume that is asked for
	shownDead          // a mount of ours that is to be replaced: its client is dead, or not as it should be
	shownRotated       // the very volume, of whoever had the secret before
)

// sight is what is known of a target.
type sight struct {
	shows shown
	rec   record // of the mount that it shows; empty: there is none
	pub   publication
}

// rotatedTo tells whether the mount at the target has another key than the spec, whose it is all the same.
func (b sight) rotatedTo(spec Spec) bool {
	return b.shows == shownDead && b.rec.Rotated != "" && !b.rec.Superseded && b.pub.Mount == b.rec.Name && b.rec.serves().encode() == spec.encode()
}

// key is that of the mount that is to be at the target.
func (b sight) key(spec Spec) string {
	if b.rotatedTo(spec) {
		return b.rec.Key
	}
	return spec.Key()
}

// published tells what the target shows, and refreshes the volume's credentials where that is the volume, alive.
func (m *Manager) published(ctx context.Context, r Request, spec Spec) (sight, error) {
	var at host.Place
	if err := m.do(ctx, func() error {
		at, _ = host.Look(r.Target) // what is wrong with a path is found when it is opened
		return nil
	}); err != nil || !at.Mountpoint {
		return sight{}, err
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return sight{}, err
	}
	top, mounted := mountedAt(mounts, r.Target)
	if !mounted {
		return sight{}, nil
	}
	name, ours := nameOfSource(top.Source)
	if !ours {
		return sight{}, fault.Errorf(fault.Precondition, "something else is mounted at target %s (%s, type %s): unmount it first", r.Target, top.Source, top.FSType)
	}
	var (
		before sight
		have   bool
	)
	if err := m.do(ctx, func() (err error) {
		if before.pub, _, err = m.store.publication(r.Target); err != nil {
			return err
		}
		before.rec, have, err = m.store.record(name)
		return err
	}); err != nil {
		return sight{}, err
	}
	rec, p := before.rec, before.pub
	source, mounted := mountedAt(mounts, m.store.sourceDir(name))
	if have && mounted && source.Major == top.Major && source.Minor == top.Minor {
		life, err := m.lifeOf(ctx, rec)
		switch differs := rec.serves().encode() != spec.encode(); {
		case err != nil:
			return before, err
		case rec.Superseded, slices.Contains(p.From, name): // its publication is another mount's by now
		case differs && p.Mount == name && spec.rotatedFrom(rec.serves()) && (life == alive || m.holdsBack(rec)), !differs && rec.Rotating:
			before.shows = shownRotated
			return before, nil
		case life != alive:
		case p.Mount != name || p.VolumeID != r.VolumeID:
			return before, fault.Errorf(fault.Exists, "target %s shows volume %s", r.Target, rec.VolumeID)
		case differs:
			return before, fault.Errorf(fault.Exists, "target %s shows the volume with other parameters, options or credentials; "+
				"they take effect when the target is unpublished and published again (delete the pod)", r.Target)
		case p.ReadOnly != r.ReadOnly:
			return before, fault.Errorf(fault.Exists, "target %s shows the volume with readOnly=%t", r.Target, p.ReadOnly)
		default:
			if old, err := m.outdated(rec); err != nil || old {
				before.shows = shownDead
				return before, err
			}
			// What lives may be a client that was started since the mount table was read, and the target not healed yet.
			if err := m.shows(ctx, rec, r.Target); err != nil {
				before.shows = shownDead
				return before, nil //nolint:nilerr // that is what is found out
			}
			before.shows = shownAlive
			return before, m.keepUp(ctx, r, spec, before)
		}
	}
	klog.FromContext(ctx).Info("The mount at the target is dead, or not what it should be; it is replaced", "mount", name)
	before.shows = shownDead
	return before, nil
}

// keepUp hands what the publication of a living mount brings to it, and to those that the publication came from.
func (m *Manager) keepUp(ctx context.Context, r Request, spec Spec, before sight) error {
	s, err := m.plan(ctx, r, spec)
	if err != nil {
		return err
	}
	if err := m.stayed(ctx, before.pub, s); err != nil {
		return err
	}
	if err := m.handOver(ctx, before.rec, s); err != nil {
		return err
	}
	return m.checkTakenUp(ctx, before.rec, s)
}
