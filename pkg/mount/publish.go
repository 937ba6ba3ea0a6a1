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
		if before != shownNothing {
			err = passing(err)
		}
	}()
	if err != nil || before == shownAlive {
		return err
	}
	if err := m.checkSingleWriter(ctx, r); err != nil {
		return err
	}
	var target *os.File
	if before == shownNothing {
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

	key := spec.Key()
	unlockKey, err := m.keys.Lock(ctx, key)
	if err != nil {
		return fault.Errorf(fault.Busy, "the mount of this volume is being started or ended: %w", err)
	}
	defer unlockKey()
	rec, err := m.ensure(ctx, r, spec)
	if err != nil {
		return err
	}
	if before == shownDead {
		// Not undone: the target is the CO's, and containers may run on copies of what it shows.
		if err := m.replace(ctx, r, rec); err != nil {
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
func (m *Manager) replace(ctx context.Context, r Request, rec record) error {
	p := publication{Target: r.Target, VolumeID: r.VolumeID, Mount: rec.Name, ReadOnly: r.ReadOnly, SingleWriter: r.SingleWriter, Created: time.Now()}
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

// shown is what a target shows.
type shown int

const (
	shownNothing shown = iota
	shownAlive         // the very volume that is asked for
	shownDead          // a mount of ours that is to be replaced: its client is dead, or not as it should be
)

// published tells whether the target already shows this volume alive, and refreshes its credentials then.
func (m *Manager) published(ctx context.Context, r Request, spec Spec) (shown, error) {
	var at host.Place
	if err := m.do(ctx, func() error {
		at, _ = host.Look(r.Target) // what is wrong with a path is found when it is opened
		return nil
	}); err != nil || !at.Mountpoint {
		return shownNothing, err
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return shownNothing, err
	}
	top, mounted := mountedAt(mounts, r.Target)
	if !mounted {
		return shownNothing, nil
	}
	name, ours := nameOfSource(top.Source)
	if !ours {
		return shownNothing, fault.Errorf(fault.Precondition, "something else is mounted at target %s (%s, type %s): unmount it first", r.Target, top.Source, top.FSType)
	}
	var (
		p    publication
		rec  record
		have bool
	)
	if err := m.do(ctx, func() (err error) {
		if p, _, err = m.store.publication(r.Target); err != nil {
			return err
		}
		rec, have, err = m.store.record(name)
		return err
	}); err != nil {
		return shownNothing, err
	}
	source, mounted := mountedAt(mounts, m.store.sourceDir(name))
	if have && mounted && source.Major == top.Major && source.Minor == top.Minor {
		switch life, err := m.lifeOf(ctx, rec); {
		case err != nil:
			return shownNothing, err
		case life != alive, rec.Superseded:
		case p.Mount != name || p.VolumeID != r.VolumeID:
			return shownNothing, fault.Errorf(fault.Exists, "target %s shows volume %s", r.Target, rec.VolumeID)
		case rec.Spec.encode() != spec.encode():
			return shownNothing, fault.Errorf(fault.Exists, "target %s shows the volume with other parameters, options or credentials; "+
				"they take effect when the target is unpublished and published again (delete the pod)", r.Target)
		case p.ReadOnly != r.ReadOnly:
			return shownNothing, fault.Errorf(fault.Exists, "target %s shows the volume with readOnly=%t", r.Target, p.ReadOnly)
		default:
			if old, err := m.outdated(rec); err != nil || old {
				return shownDead, err
			}
			// What lives may be a client that was started since the mount table was read, and the target not healed yet.
			if err := m.shows(ctx, rec, r.Target); err != nil {
				return shownDead, nil //nolint:nilerr // that is what is found out
			}
			return shownAlive, m.handKeys(ctx, r, rec)
		}
	}
	klog.FromContext(ctx).Info("The mount at the target is dead, or not what it should be; it is replaced", "mount", name)
	return shownDead, nil
}

// handKeys gives a running mount of the very same spec its current keys.
func (m *Manager) handKeys(ctx context.Context, r Request, rec record) error {
	keys, err := m.keysFor(ctx, r)
	if err != nil {
		return err
	}
	return m.giveKeys(ctx, rec, keys)
}

// giveKeys replaces the keys of a running mount.
func (m *Manager) giveKeys(ctx context.Context, rec record, keys credentials.Keys) error {
	ctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	if err := m.peer(rec.Name).Credentials(ctx, keys); err != nil {
		return fmt.Errorf("refreshing the credentials of mount %s (volume %s): %w", rec.Name, rec.VolumeID, err)
	}
	return nil
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
	p := publication{Target: r.Target, VolumeID: r.VolumeID, Mount: rec.Name, ReadOnly: r.ReadOnly, SingleWriter: r.SingleWriter, Created: time.Now()}
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
