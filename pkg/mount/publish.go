package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Publish makes the volume appear at the target. It is idempotent; a retry of the same request joins the one under way.
// When it fails, everything that it did is undone; a target that showed the volume before stays.
func (m *Manager) Publish(ctx context.Context, r Request) error {
	r.Target = m.real(r.Target)
	if err := errors.Join(m.checkTarget(r.Target), m.checkClient(r)); err != nil {
		return err
	}
	if r.Source == credentials.SourceSecret && r.Keys.IsZero() {
		return fault.Errorf(fault.Precondition, "volume %s takes its credentials from a secret, and the request has none: "+
			"set node-publish-secret-name and -namespace on its StorageClass or nodePublishSecretRef on its PersistentVolume", r.VolumeID)
	}
	if r.Attributes.RoleARN != "" {
		role, err := volume.Role(r.Attributes.RoleARN).Expand(r.PodNamespace, r.ServiceAccount)
		if err != nil {
			return err
		}
		r.Attributes.RoleARN = role
	}
	spec := newSpec(r, m.salt)
	request := fmt.Sprintf("publish %s ro=%t single=%t %s", r.VolumeID, r.ReadOnly, r.SingleWriter, spec.encode())
	return m.targets.do(ctx, r.Target, request, func() error {
		wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.MountTimeout)
		defer cancel()
		return m.publish(wctx, r, spec)
	})
}

// checkClient checks what an author chose against the client that it is for.
func (m *Manager) checkClient(r Request) error {
	cl, err := m.clientOf(r.Attributes.Client)
	if err != nil {
		return err
	}
	if err := cl.Check(r.Options, "mountOptions"); err != nil {
		return err
	}
	if err := cl.CheckOwner(r.Attributes.UID, r.Attributes.GID, "volume_context"); err != nil {
		return err
	}
	if err := cl.CheckLimits(r.Attributes, r.Options, "volume_context"); err != nil {
		return err
	}
	if cl.CallerPIDs {
		return host.HostPID()
	}
	return nil
}

// checkTarget keeps publications out of the driver's own directories; host.OpenTarget checks the rest.
func (m *Manager) checkTarget(target string) error {
	for _, own := range []string{m.StateDir, m.CacheDir} {
		if target == own || strings.HasPrefix(target, own+"/") {
			return fault.Field("target_path", "%s is inside %s, which is the driver's own", target, own)
		}
	}
	return nil
}

func (m *Manager) publish(ctx context.Context, r Request, spec Spec) (err error) {
	unlockVolume, err := m.volumes.Lock(ctx, r.VolumeID)
	if err != nil {
		return fault.Errorf(fault.Busy, "another publication of the volume is under way: %w", err)
	}
	defer unlockVolume()

	before, err := m.published(ctx, r, spec)
	defer func() {
		if before.shows != shownNothing {
			err = passing(err)
		}
	}()
	if err != nil || before.shows == shownAlive {
		return err
	}
	s, err := m.plan(ctx, r, spec)
	if err != nil {
		return err
	}
	if before.shows == shownRotated {
		return m.rotate(ctx, r, spec, before, s)
	}
	if err := m.checkSingleWriter(ctx, r); err != nil {
		return err
	}
	var target *os.File
	if before.shows == shownNothing {
		var made bool
		if target, made, err = m.openTarget(ctx, r.Target); err != nil {
			return err
		}
		defer target.Close()
		defer func() {
			if err != nil && made {
				uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBound)
				defer cancel()
				err = undone(err, m.removeTarget(uctx, r.Target))
			}
		}()
		failpoint.Here("publish.target")
	}

	unlockKey, err := m.keys.Lock(ctx, before.key(spec))
	if err != nil {
		return fault.Errorf(fault.Busy, "the mount of this volume is being started or ended: %w", err)
	}
	defer unlockKey()
	rec, err := m.ensureFor(ctx, r, spec, before, s)
	if err != nil {
		return err
	}
	if before.shows == shownDead {
		// Not undone: the target is the CO's, and containers may run on copies of what it shows.
		if err := m.replace(ctx, r, rec, before); err != nil {
			return err
		}
	} else if err := m.bind(ctx, r, rec, target); err != nil {
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBound)
		defer cancel()
		return undone(err, errors.Join(m.unmountTarget(uctx, r.Target), m.release(uctx, rec, r.Target)))
	}
	klog.FromContext(ctx).Info("Published", "mount", rec.Name, "client", rec.Client, "readOnly", r.ReadOnly)
	return nil
}

// ensureFor is ensure, or for a target whose mount was rotated to the very spec, that mount. The lock of before.key is held.
func (m *Manager) ensureFor(ctx context.Context, r Request, spec Spec, before sight, s *supply) (record, error) {
	if !before.rotatedTo(spec) {
		return m.ensure(ctx, r, spec, s)
	}
	var (
		rec  record
		have bool
	)
	if err := m.do(ctx, func() (err error) { rec, have, err = m.store.record(before.rec.Name); return err }); err != nil {
		return record{}, err
	}
	if !have || rec.Phase != phaseRunning || rec.Superseded {
		return record{}, fault.Errorf(fault.Busy, "mount %s, which the target shows, is being ended", before.rec.Name)
	}
	return rec, m.reuse(ctx, &rec, s)
}

// passing is the error of a publication whose target shows the volume, alive or dead, from before: never a final one, by
// which the CO would take the target for unpublished and leave it as it is.
func passing(err error) error {
	switch fault.KindOf(err) {
	case fault.Busy, fault.Timeout, fault.Unavailable:
		return err
	}
	if err == nil {
		return nil
	}
	return fault.Errorf(fault.Unavailable, "the target stays as it was: %w", err)
}

// replace puts a mount that works in the place of a dead one. At no time does the target show nothing: that would be taken
// for an empty volume, by a container that is restarted there.
func (m *Manager) replace(ctx context.Context, r Request, rec record, before sight) error {
	p := r.publication(rec)
	p.From = before.pub.From
	if err := m.do(ctx, func() error { return m.store.writePublication(p) }); err != nil {
		return err
	}
	failpoint.Here("replace.recorded")
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	living, ok := mountedAt(mounts, m.store.sourceDir(rec.Name))
	if !ok {
		return fault.Errorf(fault.Unavailable, "the source of mount %s was unmounted by somebody else", rec.Name)
	}
	if top, ok := mountedAt(mounts, r.Target); ok && top.Minor == living.Minor && top.ReadOnly() == (r.ReadOnly || living.ReadOnly()) {
		return nil // healed with the mount's other publications
	}
	// Whatever of ours it shows: of an earlier life, or, where the CO has changed its mind, of another volume.
	dead := func(mnt host.Mount) bool {
		_, ours := nameOfSource(mnt.Source)
		return ours && mnt.ReadOnly() == (r.ReadOnly || living.ReadOnly()) && mnt.Minor != living.Minor
	}
	swapped, err := m.Namespace.SwapHere(ctx, host.Swap{Living: living, Dead: dead, Bound: lookupBound}, func(mnt host.Mount) bool { return mnt.Mountpoint == r.Target })
	if err == nil && len(swapped) > 0 && !slices.ContainsFunc(swapped, func(s host.Swapped) bool { return s.Err != nil }) {
		return m.shows(ctx, rec, r.Target)
	}
	klog.FromContext(ctx).Info("The dead mount at the target cannot be replaced in place; it is unmounted first", "mount", rec.Name, "error", err)
	if err := m.unmountTarget(ctx, r.Target); err != nil {
		return err
	}
	target, _, err := m.openTarget(ctx, r.Target)
	if err != nil {
		return err
	}
	defer target.Close()
	return m.bind(ctx, r, rec, target)
}

// openTarget opens the target's directory and makes it where it is missing.
func (m *Manager) openTarget(ctx context.Context, path string) (*os.File, bool, error) {
	type opened struct {
		dir  *os.File
		made bool
	}
	o, err := inHost(ctx, m.Namespace, "opening the target", func(o opened) { o.dir.Close() }, func() (o opened, err error) {
		if o.dir, err = host.OpenTarget(m.TargetRoot, path, false); fault.Is(err, fault.NotFound) {
			o.made = true
			o.dir, err = host.OpenTarget(m.TargetRoot, path, true)
		}
		return o, err
	})
	return o.dir, o.made, err
}

// publication is what is written down of a request that a mount is for.
func (r Request) publication(rec record) publication {
	return publication{Target: r.Target, VolumeID: r.VolumeID, Mount: rec.Name, ReadOnly: r.ReadOnly, SingleWriter: r.SingleWriter, Created: time.Now()}
}

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
func (m *Manager) published(ctx context.Context, r Request, spec Spec) (before sight, err error) {
	var at host.Place
	if err := m.do(ctx, func() error {
		at, _ = host.Look(r.Target) // what is wrong with a path is found when it is opened
		return nil
	}); err != nil || !at.Mountpoint {
		return before, err
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return before, err
	}
	top, mounted := mountedAt(mounts, r.Target)
	if !mounted {
		return before, nil
	}
	name, ours := nameOfSource(top.Source)
	if !ours {
		return before, fault.Errorf(fault.Precondition, "something else is mounted at target %s (%s, type %s): unmount it first", r.Target, top.Source, top.FSType)
	}
	var have bool
	if err := m.do(ctx, func() (err error) {
		if before.pub, _, err = m.store.publication(r.Target); err != nil {
			return err
		}
		before.rec, have, err = m.store.record(name)
		return err
	}); err != nil {
		return before, err
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

// checkSingleWriter enforces SINGLE_NODE_SINGLE_WRITER: the CSI specification wants FAILED_PRECONDITION for a second
// publication of the same volume on the node. The volume's lock is held.
func (m *Manager) checkSingleWriter(ctx context.Context, r Request) error {
	var all []publication
	if err := m.do(ctx, func() (err error) { all, err = m.store.allPublications(); return err }); err != nil {
		return err
	}
	for _, p := range all {
		if p.VolumeID == r.VolumeID && p.Target != r.Target && (p.SingleWriter || r.SingleWriter) {
			return fault.Errorf(fault.Precondition, "the volume is for a single writer and is published at %s already", p.Target)
		}
	}
	return nil
}

// bind records the publication and binds the source to the target, in this order: what a crash leaves between the two is
// a record without a mount, which the next publish or unpublish completes.
func (m *Manager) bind(ctx context.Context, r Request, rec record, target *os.File) error {
	p := r.publication(rec)
	err := m.Namespace.Do(ctx, "binding "+rec.Name+" to "+strconv.Quote(r.Target), func() error {
		if err := m.store.writePublication(p); err != nil {
			return err
		}
		failpoint.Here("bind.recorded")
		source, err := host.OpenDir(m.store.sourceDir(rec.Name))
		if err != nil {
			return err
		}
		defer source.Close()
		return host.Bind(source, target, host.BindAttrs{ReadOnly: r.ReadOnly})
	})
	if err != nil {
		return fmt.Errorf("binding the mount to target %s: %w", r.Target, err)
	}
	failpoint.Here("bind.bound")
	return m.shows(ctx, rec, r.Target)
}

// shows is nil where a target shows a mount's living file system.
func (m *Manager) shows(ctx context.Context, rec record, target string) error {
	return m.do(ctx, func() error {
		source, err := host.Look(m.store.sourceDir(rec.Name))
		if err != nil {
			return err
		}
		top, err := host.Look(target)
		if err != nil {
			return err
		}
		if !source.Mountpoint || top != source {
			return fault.Errorf(fault.Unavailable, "the mount does not show at target %s: its client died meanwhile, or something was mounted over it", target)
		}
		return nil
	})
}
