package mount

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// A publication that comes again with another secret and is otherwise the same has had its secret rotated. Its new session is
// made and proven before anything is touched; one that does not work changes nothing. Then:
//
//   - Where the mount has no other publication, it stays, and is given the new session. Its record says whose it is from then on
//     (Rotated), so that the publication finds it alive again, and nobody who has the old secret joins it: a mount is found by
//     its key, which is of the old secret, and one that was rotated is passed by. So is it by pods that begin with the new secret,
//     whose key is another: they get a mount of their own, because a publication holds the lock of one key, and two that met on
//     one mount by two keys could end it under each other.
//     A client holds the keys that it was last given for a while (takeUpBound). Where it does so after the old ones were
//     revoked, which shows in its answers, it is not waited for: another client takes its place.
//   - Where others have the mount too, or a mount of the new secret is there already, this publication moves, as healing moves
//     it: target, subpaths and the pod's containers show the other mount, and files that are open go on with the old one. When
//     the last publication has moved away, the old mount is given the new session, so that it can store what is open in it
//     after the old keys were revoked, and ends.
//   - A client that holds back what was closed is never moved away from: two of them on one prefix would store what one pod
//     wrote in any order. Its mount stays, and is given the new session once all of its publications have come with it.

// takeUpBound is for how long a client may go on with keys that it was given before: helpers tell clients that what they get
// lasts no longer.
const takeUpBound = 15 * time.Minute

// holdsBack tells whether a mount's client may hold back what was closed.
func (m *Manager) holdsBack(rec record) bool {
	cl, err := m.clientOf(rec.Client)
	return err == nil && keepsOnDisk(cl, rec.Spec)
}

// rotate gives a publication the session of its new secret.
func (m *Manager) rotate(ctx context.Context, r Request, spec Spec, before sight, s *supply) error {
	be, err := m.Backends.Backend(spec.Backend)
	if err != nil {
		return err
	}
	if err := m.prove(ctx, s, be, spec); err != nil {
		return fault.Errorf(fault.KindOf(err), "the volume's secret has changed, and what it holds now does not work, so that mount %s keeps the session that it has: %w", before.rec.Name, err)
	}
	klog.FromContext(ctx).Info("The volume's secret has changed", "mount", before.rec.Name, "volume", r.VolumeID, "identity", r.Identity)
	there := false
	if !m.holdsBack(before.rec) {
		if there, err = m.serving(ctx, spec); err != nil {
			return err
		}
	}
	if !there {
		if done, err := m.rotateInPlace(ctx, r, spec, before, s); done || err != nil {
			return err
		}
	}
	return m.move(ctx, r, spec, before, s)
}

// serving tells whether a mount of the spec's own key runs.
func (m *Manager) serving(ctx context.Context, spec Spec) (bool, error) {
	var all []record
	if err := m.do(ctx, func() (err error) { all, err = m.store.recordsOf(spec.Key()); return err }); err != nil {
		return false, err
	}
	for _, rec := range all {
		if rec.Phase != phaseRunning || !rec.joinable(spec) {
			continue
		}
		if life, err := m.lifeOf(ctx, rec); err != nil || life == alive {
			return err == nil, err
		}
	}
	return false, nil
}

// rotateInPlace gives the mount at the target the new session. done is false where others have the mount who have not asked for
// that, and its client can be moved away from.
func (m *Manager) rotateInPlace(ctx context.Context, r Request, spec Spec, before sight, s *supply) (done bool, err error) {
	unlock, err := m.keys.Lock(ctx, before.rec.Key)
	if err != nil {
		return false, fault.Errorf(fault.Busy, "the mount of this volume is being started or ended: %w", err)
	}
	defer unlock()
	var (
		rec  record
		have bool
		pubs []publication
	)
	if err := m.do(ctx, func() (err error) {
		if rec, have, err = m.store.record(before.rec.Name); err == nil {
			pubs, err = m.store.publicationsOf(before.rec.Name)
		}
		return err
	}); err != nil {
		return false, err
	}
	if !have || rec.Phase != phaseRunning || rec.Superseded {
		return false, fault.Errorf(fault.Busy, "mount %s, which the target shows, is being ended", before.rec.Name)
	}
	var others []string
	for _, p := range pubs {
		if p.Target != r.Target && p.Wants != spec.Identity {
			others = append(others, p.Target)
		}
	}
	switch {
	case len(others) > 0 && !m.holdsBack(rec):
		return false, nil
	case len(others) > 0:
		return false, m.wait(ctx, before, spec, others)
	}
	rec.Rotated, rec.Rotating, rec.RotatedAt = spec.Identity, true, time.Now()
	if err := m.rewrite(ctx, rec); err != nil {
		return false, err
	}
	failpoint.Here("rotate.recorded")
	life, err := m.lifeOf(ctx, rec)
	if err == nil && life == alive {
		_, err = m.give(ctx, rec, s)
	} else if err == nil {
		err = m.reuse(ctx, &rec, s)
	}
	if err != nil {
		return false, err
	}
	failpoint.Here("rotate.handed")
	rec.Rotating = false
	if rec.Rotated == rec.Spec.Identity {
		rec.Rotated = "" // it is what it was in the beginning
	}
	if err := m.rewrite(ctx, rec); err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("The mount has the session of the changed secret", "mount", rec.Name, "volume", r.VolumeID, "identity", r.Identity)
	if err := m.do(ctx, func() error { return m.store.unwant(pubs) }); err != nil {
		return false, err
	}
	return true, m.takenUp(ctx, rec, s)
}

// takenUp sees that a mount whose session is another's now works with it. Its client may hold on to keys that are revoked. The
// key's lock is held.
func (m *Manager) takenUp(ctx context.Context, rec record, s *supply) error {
	actx, cancel := context.WithTimeout(host.For(ctx, account(rec.Source)), lookupBound)
	defer cancel()
	why := m.Namespace.ReadRoot(actx, m.store.sourceDir(rec.Name))                                // what does not answer is looked after elsewhere
	if !errors.Is(why, unix.EIO) && !errors.Is(why, unix.EACCES) && !errors.Is(why, unix.EPERM) { // what clients make of a refusal
		return nil
	}
	be, err := m.Backends.Backend(rec.Spec.Backend)
	if err != nil {
		return err
	}
	if err := m.prove(ctx, s, be, rec.Spec); err != nil { // it is not for the old keys that nothing works
		return err
	}
	klog.FromContext(ctx).Info("The client still works with the keys that its secret held before, and they are refused", "mount", rec.Name, "volume", rec.VolumeID, "answer", why.Error())
	rec.RotatedAt = time.Time{} // the next client begins with the new session
	_, err = m.renew(ctx, rec, s, reasonSecret)
	return err
}

// checkTakenUp is takenUp for a publication that comes again, for as long as it may be needed.
func (m *Manager) checkTakenUp(ctx context.Context, rec record, s *supply) error {
	if rec.RotatedAt.IsZero() || time.Since(rec.RotatedAt) > takeUpBound {
		return nil
	}
	unlock, ok := m.keys.TryLock(rec.Key)
	if !ok {
		return nil
	}
	defer unlock()
	return m.takenUp(ctx, rec, s)
}

// wait notes that a publication is to have the new session once the mount's others have asked for it too, and says so.
func (m *Manager) wait(ctx context.Context, before sight, spec Spec, others []string) error {
	p := before.pub
	p.Wants = spec.Identity
	if err := m.do(ctx, func() error { return m.store.writePublication(p) }); err != nil {
		return err
	}
	return fault.Errorf(fault.Unavailable, "the volume's secret has changed, and its new keys work, but mount %s still has publications with the old ones (%s) and its client %s may hold back files that are closed: "+
		"it goes on with the old session until all of them have come with the new secret, which kubelet does within minutes, or are unpublished", before.rec.Name, strings.Join(others, ", "), before.rec.Client)
}

// rewrite writes a mount's record anew, also where it outlives a reboot.
func (m *Manager) rewrite(ctx context.Context, rec record) error {
	return m.do(ctx, func() error {
		if m.holdsBack(rec) {
			if err := m.store.keepRecord(rec, true); err != nil {
				return err
			}
		}
		return m.store.writeRecord(rec)
	})
}

// unwant takes back what publications are waiting for.
func (s store) unwant(pubs []publication) error {
	for _, p := range pubs {
		if p.Wants == "" {
			continue
		}
		p.Wants = ""
		if err := s.writePublication(p); err != nil {
			return err
		}
	}
	return nil
}

// move has a publication show a mount of the new secret.
func (m *Manager) move(ctx context.Context, r Request, spec Spec, before sight, s *supply) error {
	if !m.Heal {
		return fault.Errorf(fault.Unavailable, "the volume's secret has changed, and mount %s has other publications with the old one: what containers show is not moved with --heal=false, so the publication keeps the session that it has: delete the pod", before.rec.Name)
	}
	if err := m.moveTo(ctx, r, spec, before, s); err != nil {
		return err
	}
	return m.leave(ctx, before.rec.Name, s, true)
}

func (m *Manager) moveTo(ctx context.Context, r Request, spec Spec, before sight, s *supply) error {
	unlock, err := m.keys.Lock(ctx, spec.Key())
	if err != nil {
		return fault.Errorf(fault.Busy, "the mount of this volume is being started or ended: %w", err)
	}
	defer unlock()
	rec, err := m.ensure(ctx, r, spec, s)
	if err != nil {
		return err
	}
	failpoint.Here("rotate.started")
	p := r.publication(rec)
	p.From = append(slices.Clone(before.pub.From), before.rec.Name)
	if err := m.reassign(ctx, before, p); err != nil {
		return err
	}
	failpoint.Here("rotate.moved")
	if err := m.heal(ctx, rec); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Moved to a mount of the changed secret", "from", before.rec.Name, "mount", rec.Name, "volume", r.VolumeID, "identity", r.Identity)
	return m.shows(ctx, rec, r.Target)
}

// reassign gives a publication to another mount, whose key's lock is held. So is the lock of the mount's that it comes from, for
// that moment: whoever replaces that one gives its publications to its successor.
func (m *Manager) reassign(ctx context.Context, before sight, p publication) error {
	if from := keyOf(before.rec.Name); from != keyOf(p.Mount) {
		unlock, ok := m.keys.TryLock(from) // waiting for a second key while one is held could wait for ever
		if !ok {
			return fault.Errorf(fault.Busy, "mount %s, which the target shows, is being replaced or ended", before.rec.Name)
		}
		defer unlock()
	}
	return m.do(ctx, func() error {
		now, have, err := m.store.publication(p.Target)
		if err != nil {
			return err
		}
		if have && now.Mount != before.pub.Mount {
			return fault.Errorf(fault.Busy, "mount %s, which the target showed, was replaced meanwhile by %s", before.rec.Name, now.Mount)
		}
		return m.store.writePublication(p)
	})
}

// leave looks after a mount that a publication was moved away from. Where it was the last one, the mount is nobody's any more,
// gets what the publication brought, and ends when nothing is open in it. Whoever is at work on it does what is to be done.
func (m *Manager) leave(ctx context.Context, name string, s *supply, end bool) error {
	unlock, ok := m.keys.TryLock(keyOf(name))
	if !ok {
		return nil
	}
	defer unlock()
	var (
		rec  record
		have bool
		pubs []publication
	)
	if err := m.do(ctx, func() (err error) {
		if rec, have, err = m.store.record(name); err == nil && have {
			pubs, err = m.store.publicationsOf(name)
		}
		return err
	}); err != nil || !have || len(pubs) > 0 {
		return err
	}
	if !rec.Superseded { // first of all: nobody who has the old secret may join it any more
		rec.Superseded = true
		if err := m.do(ctx, func() error { return m.store.writeRecord(rec) }); err != nil {
			return err
		}
		failpoint.Here("rotate.left")
	}
	if _, err := m.give(ctx, rec, s); err != nil && !errors.Is(err, helper.ErrGone) {
		klog.FromContext(ctx).Info("The mount that was left does not get the new session", "mount", name, "reason", err.Error())
	}
	if end {
		m.endSoon(ctx, rec, successor{supply: s, shown: true})
	}
	return nil
}

// stayed looks after what a publication that is as it should be has left behind: mounts that it came from, and what it was
// waiting for.
func (m *Manager) stayed(ctx context.Context, p publication, s *supply) error {
	if len(p.From) == 0 && p.Wants == "" {
		return nil
	}
	var from []string
	for _, name := range p.From {
		if m.gone(ctx, name) {
			continue
		}
		from = append(from, name)
		if err := m.leave(ctx, name, s, false); err != nil {
			return err
		}
	}
	if len(from) == len(p.From) && p.Wants == "" {
		return nil
	}
	unlock, ok := m.keys.TryLock(keyOf(p.Mount)) // under which others write publications of the mount
	if !ok {
		return nil // the next publication does it
	}
	defer unlock()
	return m.do(ctx, func() error {
		now, ok, err := m.store.publication(p.Target)
		if err != nil || !ok || now.Mount != p.Mount {
			return err
		}
		now.From, now.Wants = from, ""
		return m.store.writePublication(now)
	})
}

// cameFrom tells whether a publication other than that at target was moved away from a mount.
func cameFrom(all []publication, name, target string) bool {
	return slices.ContainsFunc(all, func(p publication) bool { return p.Target != target && slices.Contains(p.From, name) })
}
