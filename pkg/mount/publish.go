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

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Publish makes the volume appear at the target. It is idempotent; a retry of the same request joins the one under way.
// When it fails, everything that it did is undone; a target that showed the volume before stays.
func (m *Manager) Publish(ctx context.Context, r Request) error {
	target := r.Target
	r.Target = m.real(r.Target)
	spec, err := m.check(&r)
	if err != nil {
		return m.Refusal(ctx, target, err)
	}
	request := fmt.Sprintf("publish %s ro=%t single=%t %s", r.VolumeID, r.ReadOnly, r.SingleWriter, spec.encode())
	return m.targets.do(ctx, r.Target, request, func() error {
		wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.MountTimeout)
		defer cancel()
		for {
			err := m.publish(wctx, r, spec)
			first := (*drainsFirstError)(nil)
			if !errors.As(err, &first) {
				return err
			}
			if err := m.awaitDrained(wctx, r, spec, first); err != nil { // no lock is held meanwhile
				return err
			}
		}
	})
}

// check checks a request, puts the pod's names into its role, and makes the spec of it.
func (m *Manager) check(r *Request) (spec Spec, err error) {
	if err := errors.Join(m.checkTarget(r.Target), m.checkClient(*r)); err != nil {
		return spec, err
	}
	if r.Source == credentials.SourceSecret && r.Keys.IsZero() {
		return spec, fault.Errorf(fault.Precondition, "volume %s takes its credentials from a secret, and the request has none: "+
			"set node-publish-secret-name and -namespace on its StorageClass or nodePublishSecretRef on its PersistentVolume", r.VolumeID)
	}
	if err := m.Backends.CheckClaims(r.Volume.Backend, r.Claims); err != nil {
		return spec, fmt.Errorf("volume %s: %w", r.VolumeID, err)
	}
	if r.Attributes.RoleARN != "" {
		if err := backend.CheckTemplates(r.Attributes.RoleARN); err != nil { // which nobody can see in what they expand to
			return spec, fault.Errorf(fault.Precondition, "roleARN of the volume: %q %w", r.Attributes.RoleARN, err)
		}
		if r.Attributes.RoleARN, err = volume.Role(r.Attributes.RoleARN).Expand(r.PodNamespace, r.ServiceAccount); err != nil {
			return spec, err
		}
	}
	return newSpec(*r, m.salt), nil
}

// Refusal is the error of a publication that is refused before anything is done for it. Where its target shows a volume of ours,
// alive or dead, one that is about what the CO or an operator has to bring is not final: the volume stays.
func (m *Manager) Refusal(ctx context.Context, target string, err error) error {
	switch fault.KindOf(err) {
	case fault.Precondition, fault.Denied, fault.Unauthenticated:
	default:
		return err
	}
	target = m.real(target)
	var at host.Place
	lerr := m.do(ctx, func() error { at, _ = host.Look(target); return nil })
	if lerr != nil || !at.Mountpoint { // what cannot be looked at shows nothing
		return err
	}
	mounts, merr := m.Namespace.Mounts(ctx)
	if merr != nil {
		return passing(err)
	}
	if top, mounted := mountedAt(mounts, target); mounted {
		if _, ours := nameOfSource(top.Source); ours {
			return passing(err)
		}
	}
	return err
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
	if r.Ephemeral {
		if err := cl.CheckInline(r.Attributes, r.Options, m.share()); err != nil {
			return err
		}
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
		if len(r.Ignored) > 0 {
			klog.FromContext(ctx).Info("Warning: the volume was written for another driver, and some of it means nothing here and is ignored", "ignored", r.Ignored)
		}
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
		return host.Bind(source, target, host.BindAttrs{ReadOnly: r.ReadOnly, Shared: true})
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
