package mount

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// Unpublish takes the volume away from the target and, when that was the mount's last publication, ends the mount. It
// returns nil only when everything that was written and closed there is stored. When that takes longer than the caller's
// deadline, the error says what is left; the work goes on, and a retry waits for it.
func (m *Manager) Unpublish(ctx context.Context, volumeID, target string) error {
	target = m.real(target)
	if err := m.checkTarget(target); err != nil {
		return err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(m.DrainTimeout)
	}
	// The answer must still reach the caller, with what is left to do.
	deadline = deadline.Add(-min(time.Second, time.Until(deadline)/2))
	return m.targets.do(ctx, target, "unpublish "+volumeID, func() error {
		wctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline)
		defer cancel()
		return m.unpublish(wctx, volumeID, target)
	})
}

func (m *Manager) unpublish(ctx context.Context, volumeID, target string) error {
	var (
		p    publication
		have bool
	)
	if err := m.do(ctx, func() (err error) { p, have, err = m.store.publication(target); return err }); err != nil {
		return err
	}
	if have && p.VolumeID != volumeID {
		return fault.Errorf(fault.Precondition, "target %s shows volume %s", target, p.VolumeID)
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	name := p.Mount
	if top, mounted := mountedAt(mounts, target); mounted {
		shown, ours := nameOfSource(top.Source)
		switch {
		case !ours && !have:
			return fault.Errorf(fault.Precondition, "target %s shows a mount that this driver did not make (%s, type %s): it is left alone", target, top.Source, top.FSType)
		case ours && !have:
			// Its record is lost; the mount table still tells whose it is. A retry must find it, as long as the mount drains.
			name = shown
			p = publication{Target: target, VolumeID: volumeID, Mount: name, Created: time.Now()}
			if err := m.do(ctx, func() error { return m.store.writePublication(p) }); err != nil {
				return err
			}
			failpoint.Here("unpublish.recorded")
		}
		if err := m.unmountTarget(ctx, target); err != nil {
			return err
		}
	}
	failpoint.Here("unpublish.unmounted")
	for _, from := range p.From {
		if err := m.endLeft(ctx, from, target); err != nil {
			return err
		}
	}
	if name != "" {
		unlock, err := m.lockEnding(ctx, name)
		if err != nil {
			return err
		}
		defer unlock()
		// Whoever had the lock may have given the publication to a successor, which has the same key, and healed the target.
		var again host.Place
		if err := m.do(ctx, func() (err error) {
			again, _ = host.Look(target) // what is wrong with a path is found when it is removed
			p, have, err = m.store.publication(target)
			return err
		}); err != nil {
			return err
		}
		if have {
			name = p.Mount
		}
		if again.Mountpoint {
			if err := m.unmountTarget(ctx, target); err != nil {
				return err
			}
		}
		rec, err := m.recordOf(ctx, name)
		if err != nil {
			return err
		}
		if err := m.release(ctx, rec, target); err != nil {
			return err
		}
		failpoint.Here("unpublish.released")
		klog.FromContext(ctx).Info("Unpublished", "mount", name)
	}
	return m.removeTarget(ctx, target)
}

// lockEnding locks a mount's key. Where somebody else is ending the mount, the error says what is left to store.
func (m *Manager) lockEnding(ctx context.Context, name string) (unlock func(), err error) {
	unlock, err = m.keys.Lock(ctx, keyOf(name))
	if err == nil {
		return unlock, nil
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if rec, rerr := m.recordOf(rctx, name); rerr == nil && rec.Phase == phaseEnding {
		return nil, m.draining(rec, describe(m.hangs.left(name), err))
	}
	return nil, fault.Errorf(fault.Busy, "the mount is being started or ended: %w", err)
}

// recordOf is a mount's record, or as much of it as its name and its directory's owner tell.
func (m *Manager) recordOf(ctx context.Context, name string) (record, error) {
	var found record
	if err := m.do(ctx, func() error {
		rec, ok, err := m.store.record(name)
		if err == nil && !ok || errors.Is(err, errDamaged) {
			rec = record{Name: name, Key: keyOf(name)}
			rec.UID, err = m.store.owner(name)
		}
		found = rec
		return err
	}); err != nil {
		return record{}, err
	}
	return found, nil
}

// release gives up a publication. If it was the mount's last, the mount is ended first, so that the record stays until
// all is stored. The key's lock is held.
func (m *Manager) release(ctx context.Context, rec record, target string) error {
	var others, left bool
	if err := m.do(ctx, func() error {
		all, err := m.store.allPublications()
		others, left = usedElsewhere(all, rec.Name, target), cameFrom(all, rec.Name, target)
		return err
	}); err != nil {
		return err
	}
	switch {
	case others:
	case left && rec.Client != "":
		if err := m.abandon(ctx, rec); err != nil {
			return err
		}
	default:
		// Those that it took over from may still store what was open when they were replaced.
		for _, former := range rec.Former {
			if err := m.endFormer(ctx, former); err != nil {
				return err
			}
		}
		if err := m.end(ctx, rec, successor{}); err != nil {
			return err
		}
		failpoint.Here("release.ended")
	}
	return m.do(ctx, func() error { return m.store.removePublication(target) })
}

// abandon gives up a mount whose last publication goes, while others were moved away from it: what they have open in it is
// waited for by nobody here. All else was answered, and so is stored, because no client that holds something back is moved
// away from.
func (m *Manager) abandon(ctx context.Context, rec record) error {
	if !rec.Superseded {
		rec.Superseded = true
		if err := m.do(ctx, func() error { return m.store.writeRecord(rec) }); err != nil {
			return err
		}
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	if mnt, mounted := mountedAt(mounts, m.store.sourceDir(rec.Name)); mounted {
		if err := m.quiet(ctx, mnt); err != nil {
			return err
		}
	}
	m.endSoon(ctx, rec, successor{shown: true})
	return nil
}

// endLeft ends a mount that a publication was moved away from, if it is still there and nobody's: what was open in it then may
// still be stored.
func (m *Manager) endLeft(ctx context.Context, name, target string) error {
	if m.gone(ctx, name) {
		return nil
	}
	unlock, err := m.lockEnding(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	var (
		rec    record
		have   bool
		others bool
	)
	if err := m.do(ctx, func() (err error) {
		var all []publication
		if rec, have, err = m.store.record(name); err == nil && have {
			all, err = m.store.allPublications()
		}
		others = usedElsewhere(all, name, "") || cameFrom(all, name, target)
		return err
	}); err != nil || !have || others {
		return err
	}
	return m.end(ctx, rec, successor{})
}

// endFormer ends a mount whose successor has no publication left, if it is still there.
func (m *Manager) endFormer(ctx context.Context, name string) error {
	var (
		rec  record
		have bool
	)
	if err := m.do(ctx, func() (err error) { rec, have, err = m.store.record(name); return err }); err != nil || !have {
		return err
	}
	return m.end(ctx, rec, successor{})
}

// removeTarget removes the empty directory at the target, as the CSI specification asks of NodeUnpublishVolume.
func (m *Manager) removeTarget(ctx context.Context, target string) error {
	return m.Namespace.Do(ctx, "removing the target", func() error {
		if err := host.RemoveTarget(m.TargetRoot, target); err != nil {
			return fmt.Errorf("removing target %s: %w", target, err)
		}
		return nil
	})
}

// unmountTarget unmounts everything of ours at the target.
func (m *Manager) unmountTarget(ctx context.Context, target string) error {
	for {
		mounts, err := m.Namespace.Mounts(ctx)
		if err != nil {
			return err
		}
		top, mounted := mountedAt(mounts, target)
		if !mounted {
			return nil
		}
		if _, ours := nameOfSource(top.Source); !ours {
			return fault.Errorf(fault.Precondition, "target %s: %s (type %s) is mounted over the volume: unmount it first", target, top.Source, top.FSType)
		}
		if err := m.unmount(ctx, top, func() error { return host.UnmountTarget(m.TargetRoot, target) }); err != nil {
			return err
		}
	}
}

// unmount unmounts one mount, not lazily, by once. While something uses it, it is tried again until ctx ends; the error tells who.
func (m *Manager) unmount(ctx context.Context, mnt host.Mount, once func() error) error {
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		err := m.Namespace.Do(host.For(ctx, account(mnt.Source)), "unmounting "+mnt.Mountpoint, once)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL): // EINVAL: not a mount point any more (umount(2))
			return nil
		case !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("unmounting %s: %w", mnt.Mountpoint, err)
		}
		select {
		case <-time.After(wait):
			continue
		case <-ctx.Done():
		}
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 300*time.Millisecond)
		defer cancel()
		users, _ := m.Namespace.Users(uctx, mnt)
		for _, call := range m.Namespace.OverdueCalls() {
			if strings.Contains(call, mnt.Mountpoint) {
				users = append(users, "this driver, which the client gives no answer: "+call)
			}
		}
		by := "unknown to this driver"
		if len(users) > 0 {
			by = strings.Join(users, ", ")
		}
		return fault.Errorf(fault.Busy, "unmounting %s: it is in use by %s", mnt.Mountpoint, by)
	}
}
