package supervisor

import (
	"context"
	"errors"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// A republish that differs only in the secret is a secret rotation. The new session is made and proven before anything is changed;
// credentials that do not work change nothing. Then:
//
//   - If the mount has no other publication, it stays and gets the new session. Its record has the new identity (Rotated), so that
//     the next republish finds it healthy, and no publication with the old secret joins it. Pods that start with the new secret do
//     not join it either, because its key is of the old secret: a publication holds the lock of one key, and two that met on one
//     mount by two keys could stop it under each other. They get a mount of their own.
//     A client uses the keys that it was last given for a while (rotationBound). If it gets refusals after the old ones were
//     revoked, it is replaced at once.
//   - If the mount has other publications, or a mount of the new secret runs already, this publication moves, as healing moves it:
//     target, subpaths and the pod's containers show the other mount, and open files stay with the old one. When the last
//     publication has moved away, the old mount gets the new session, so that it can store open files after the old keys were
//     revoked, and stops.
//   - A client with static keys cannot get others, so its publications always move.
//   - A publication is never moved away from a client that may hold closed files: two clients on one prefix would store what one pod
//     wrote in any order. Such a mount stays, and gets the new session once all of its publications have been republished with it.

// rotationBound is how long a client may use keys that it was given before: helpers report them to clients as valid for that long.
const rotationBound = 15 * time.Minute

type rotation struct {
	super *Supervisor
	w     want.Mount
	shown state.Mount       // at the target
	pub   state.Publication // as it is recorded
}

// Rotate moves a published volume to the session of its new secret. shown is the mount at the target.
func (s *Supervisor) Rotate(ctx context.Context, w want.Mount, shown state.Mount, pub state.Publication) error {
	r := rotation{s, w, shown, pub}
	be, err := s.backend(w.Spec.Backend)
	if err != nil {
		return err
	}
	if err := s.creds.Prove(ctx, w.Grant, be, w.Spec); err != nil {
		return fault.Errorf(fault.KindOf(err), "the volume's secret has changed, but its new credentials do not work; mount %s keeps its session: %w",
			shown.Name, err)
	}
	klog.FromContext(ctx).Info("Secret rotated", "mount", shown.Name, "volume", w.Publication.VolumeID, "identity", w.Identity)
	if shown.Command.StaticKeys {
		return r.move(ctx)
	}
	if !shown.KeepsOnDisk(s.clients) {
		if runs, err := r.targetRuns(ctx); err != nil {
			return err
		} else if runs {
			return r.move(ctx)
		}
	}
	if done, err := r.inPlace(ctx); done || err != nil {
		return err
	}
	return r.move(ctx)
}

func (r rotation) targetRuns(ctx context.Context) (bool, error) {
	all, err := r.super.store.MountsOf(ctx, r.w.Spec.Key())
	if err != nil {
		return false, err
	}
	for _, m := range all {
		if m.Phase != state.Running || !m.Joinable(r.w.Spec) {
			continue
		}
		if health, err := r.super.runner.Probe(ctx, m); err != nil || health == mount.Healthy {
			return err == nil, err
		}
	}
	return false, nil
}

// inPlace delivers the new session to the mount at the target. done is false if other publications still use the old secret, and this
// one can be moved away.
func (r rotation) inPlace(ctx context.Context) (done bool, err error) {
	unlock, err := r.super.keys.lock(ctx, r.shown.Key)
	if err != nil {
		return false, err
	}
	defer unlock()
	m, ok, err := r.super.store.Mount(ctx, r.shown.Name)
	if err != nil {
		return false, err
	}
	pubs, err := r.super.store.Pubs.Of(ctx, r.shown.Name)
	if err != nil {
		return false, err
	}
	if !ok || m.Phase != state.Running || m.Superseded {
		return false, fault.Errorf(fault.Busy, "mount %s at the target is being stopped", r.shown.Name)
	}
	var others []string
	for _, p := range pubs {
		if p.Target != r.w.Publication.Target && p.PendingIdentity != r.w.Spec.Identity {
			others = append(others, p.Target)
		}
	}
	switch {
	case len(others) > 0 && !m.KeepsOnDisk(r.super.clients):
		return false, nil
	case len(others) > 0:
		return false, r.postpone(ctx, others)
	}
	m.Rotated, m.Rotating, m.RotatedAt = r.w.Spec.Identity, true, time.Now()
	if err := r.super.write(ctx, m); err != nil {
		return false, err
	}
	failpoint.Here("rotate.recorded")
	health, err := r.super.runner.Probe(ctx, m)
	if err == nil && health == mount.Healthy {
		_, err = r.super.creds.Deliver(ctx, m, r.w.Grant)
	} else if err == nil {
		err = r.super.join(ctx, &m, r.w.Grant)
	}
	if err != nil {
		return false, err
	}
	failpoint.Here("rotate.handed")
	m.Rotating = false
	if m.Rotated == m.Spec.Identity {
		m.Rotated = ""
	}
	if err := r.super.write(ctx, m); err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("Rotated credentials of mount", "mount", m.Name, "volume", m.VolumeID, "identity", r.w.Identity)
	for _, p := range pubs {
		if p.PendingIdentity == "" {
			continue
		}
		p.PendingIdentity = ""
		if err := r.super.store.Pubs.Write(ctx, p); err != nil {
			return false, err
		}
	}
	return true, r.super.verifyRotation(ctx, m, r.w.Grant)
}

// postpone records that the publication waits until the mount's other publications ask for the new session too, and returns an error
// that reports it.
func (r rotation) postpone(ctx context.Context, others []string) error {
	p := r.pub
	p.PendingIdentity = r.w.Spec.Identity
	if err := r.super.store.Pubs.Write(ctx, p); err != nil {
		return err
	}
	return fault.Errorf(fault.Unavailable, "the volume's secret has changed, but mount %s keeps its session: other publications use the old keys (%s), and "+
		"client %s may hold files that are not uploaded; "+
		"the mount gets the new keys once those are republished with the new secret (kubelet does so within minutes) or unpublished",
		r.shown.Name, strings.Join(others, ", "), r.shown.Client)
}

// write writes a mount's record, and its copy that outlives a reboot if that is needed.
func (s *Supervisor) write(ctx context.Context, m state.Mount) error {
	if m.KeepsOnDisk(s.clients) {
		return s.store.WriteBoth(ctx, m)
	}
	return s.store.Write(ctx, m)
}

// verifyRotation checks that the client of a rotated mount uses its new credentials, and replaces it if it uses revoked ones.
func (s *Supervisor) verifyRotation(ctx context.Context, m state.Mount, grant *creds.Grant) error {
	actx, cancel := context.WithTimeout(host.For(ctx, m.Account()), lookupBound)
	defer cancel()
	answer := s.namespace.ReadRoot(actx, s.store.SourceDir(m.Name)) // the hang watch handles a client that does not answer
	// The errors that clients report for refused credentials.
	if !errors.Is(answer, unix.EIO) && !errors.Is(answer, unix.EACCES) && !errors.Is(answer, unix.EPERM) {
		return nil
	}
	be, err := s.backend(m.Spec.Backend)
	if err != nil {
		return err
	}
	if err := s.creds.Prove(ctx, grant, be, m.Spec); err != nil { // the old keys are not the reason
		return err
	}
	klog.FromContext(ctx).Info("Client uses revoked keys, replacing its mount", "mount", m.Name, "volume", m.VolumeID, "error", answer.Error())
	m.RotatedAt = time.Time{} // the next client starts with the new session
	_, err = s.replace(ctx, m, grant, tracker.ReasonSecret)
	return err
}

// Refresh delivers the credentials that a republish supplies to a healthy mount, and to those that its publication p was moved away
// from.
func (s *Supervisor) Refresh(ctx context.Context, m state.Mount, p state.Publication, w want.Mount) error {
	if err := s.cleanUpPrevious(ctx, p, w.Grant); err != nil {
		return err
	}
	if err := s.creds.Apply(ctx, m, w.Grant, nil); err != nil {
		return err
	}
	if m.RotatedAt.IsZero() || time.Since(m.RotatedAt) > rotationBound {
		return nil
	}
	unlock, ok := s.keys.TryLock(m.Key)
	if !ok {
		return nil
	}
	defer unlock()
	return s.verifyRotation(ctx, m, w.Grant)
}

func (r rotation) move(ctx context.Context) error {
	if !r.super.healer.Enabled {
		return fault.Errorf(fault.Unavailable, "the volume's secret has changed, but mount %s keeps its session: other publications use the old keys or its "+
			"client cannot get new ones, and --heal=false prevents moving this one to another mount; stop what uses the volume, and start it again, to apply the new "+
			"secret (in Kubernetes: delete the pod)", r.shown.Name)
	}
	if err := r.moveTo(ctx); err != nil {
		return err
	}
	return r.super.cleanUpMovedFrom(ctx, r.shown.Name, r.w.Grant, true)
}

func (r rotation) moveTo(ctx context.Context) error {
	unlock, err := r.super.keys.lock(ctx, r.w.Spec.Key())
	if err != nil {
		return err
	}
	defer unlock()
	m, err := r.super.ensure(ctx, r.w)
	if err != nil {
		return err
	}
	failpoint.Here("rotate.started")
	if err := r.super.Reassign(ctx, r.pub.Mount, r.w.PublicationOn(m)); err != nil {
		return err
	}
	failpoint.Here("rotate.moved")
	if err := r.super.healer.Heal(ctx, m); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Moved publication to mount of new secret", "from", r.shown.Name, "mount", m.Name,
		"volume", r.w.Publication.VolumeID, "identity", r.w.Identity)
	return r.super.healer.CheckTarget(ctx, m, r.w.Publication.Target)
}

// cleanUpMovedFrom cleans up after a publication was moved away from a mount. If it was the last one, the mount is superseded, gets
// the grant and, if stop is set, is stopped. If another call holds the lock of the mount's key, nothing is done: that call cleans up.
func (s *Supervisor) cleanUpMovedFrom(ctx context.Context, name string, grant *creds.Grant, stop bool) error {
	unlock, ok := s.keys.TryLock(mount.KeyOf(name))
	if !ok {
		return nil
	}
	defer unlock()
	m, ok, err := s.store.Mount(ctx, name)
	if err != nil || !ok {
		return err
	}
	if pubs, err := s.store.Pubs.Of(ctx, name); err != nil || len(pubs) > 0 {
		return err
	}
	if !m.Superseded { // first, so that no publication with the old secret joins it
		if err := s.store.Supersede(ctx, &m); err != nil {
			return err
		}
		failpoint.Here("rotate.left")
	}
	if _, err := s.creds.Deliver(ctx, m, grant); err != nil && !errors.Is(err, helper.ErrGone) {
		klog.FromContext(ctx).Info("Cannot update credentials of previous mount", "mount", name, "error", err.Error())
	}
	if stop {
		s.stopReplaced(ctx, m, grant)
	}
	return nil
}

// cleanUpPrevious cleans up the mounts that a healthy publication was moved away from, and its pending rotation.
func (s *Supervisor) cleanUpPrevious(ctx context.Context, p state.Publication, grant *creds.Grant) error {
	if len(p.MovedFrom) == 0 && p.PendingIdentity == "" {
		return nil
	}
	var left []string
	for _, name := range p.MovedFrom {
		if !s.store.Exists(ctx, name) {
			continue
		}
		left = append(left, name)
		if err := s.cleanUpMovedFrom(ctx, name, grant, false); err != nil {
			return err
		}
	}
	if len(left) == len(p.MovedFrom) && p.PendingIdentity == "" {
		return nil
	}
	return s.updatePublication(ctx, p, func(now *state.Publication) { now.MovedFrom, now.PendingIdentity = left, "" })
}
