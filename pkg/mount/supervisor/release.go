package supervisor

import (
	"context"
	"errors"
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Release removes a publication. If it was its mount's last one, the mount lingers or is stopped first, so that the publication's record
// stays until everything is stored. unmount unmounts the target; it is called under the lock of the mount's key, because the call
// that held the lock before may have healed the target.
func (s *Supervisor) Release(ctx context.Context, p state.Publication, unmount func(context.Context) error) error {
	if err := s.releaseLocked(ctx, p, unmount); err != nil {
		return err
	}
	s.lingerer.Evict(ctx)
	return nil
}

func (s *Supervisor) releaseLocked(ctx context.Context, p state.Publication, unmount func(context.Context) error) error {
	for _, from := range p.MovedFrom {
		if err := s.stopPrevious(ctx, from, p.Target); err != nil {
			return err
		}
	}
	unlock, err := s.lockToStop(ctx, p.Mount)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.finishReplacement(ctx, mount.KeyOf(p.Mount)); err != nil {
		return err
	}
	// The publication may have moved to a successor, which has the same key.
	name := p.Mount
	if now, ok, err := s.store.Pubs.Get(ctx, p.Target); err != nil {
		return err
	} else if ok {
		name = now.Mount
	}
	if err := unmount(ctx); err != nil {
		return err
	}
	m, err := s.store.MountOrRemains(ctx, name)
	if err != nil {
		return err
	}
	if err := s.release(ctx, m, p.Target); err != nil {
		return err
	}
	failpoint.Here("unpublish.released")
	return nil
}

// finishReplacement does what a driver that exited while it replaced a mount of the key left to do: a successor that runs takes over the
// publications, one that does not run yet is removed. Otherwise a successor would stay until the next reconcile pass finds it without
// publications.
func (s *Supervisor) finishReplacement(ctx context.Context, key string) error {
	all, err := s.store.MountsOf(ctx, key)
	if errors.Is(err, state.ErrDamaged) {
		return nil // the mount of that record may be the one to stop
	}
	if err == nil {
		err = s.discardIncomplete(ctx, all)
	}
	for _, m := range all {
		if m.Phase == state.Running && len(m.Predecessors) > 0 {
			err = errors.Join(err, s.store.Pubs.Succeed(ctx, m))
		}
	}
	return err
}

func (s *Supervisor) release(ctx context.Context, m state.Mount, target string) error {
	all, err := s.store.Pubs.All(ctx)
	if err != nil {
		return err
	}
	switch {
	case usedElsewhere(all, m.Name, target):
	case movedElsewhere(all, m.Name, target) && m.Client != "":
		if err := s.abandon(ctx, m); err != nil {
			return err
		}
	default:
		if err := s.lingerer.Retire(ctx, m); err != nil {
			return err
		}
		failpoint.Here("release.ended")
	}
	return s.store.Pubs.Remove(ctx, target)
}

// abandon stops a mount whose publications were all moved away, without waiting for files that they still have open in it.
// Everything that was closed is stored, because publications are never moved away from a client that may hold closed files.
func (s *Supervisor) abandon(ctx context.Context, m state.Mount) error {
	if err := s.store.Supersede(ctx, &m); err != nil {
		return err
	}
	if err := s.sources.WaitIdle(ctx, m); err != nil {
		return err
	}
	s.stopReplaced(ctx, m, nil)
	return nil
}

// stopPrevious stops a mount that the publication at a target was moved away from, if it still exists and no other publication uses
// it: files that were open then may not be stored yet.
func (s *Supervisor) stopPrevious(ctx context.Context, name, target string) error {
	if !s.store.Exists(ctx, name) {
		return nil
	}
	unlock, err := s.lockToStop(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	m, ok, err := s.store.Mount(ctx, name)
	if err != nil || !ok {
		return err
	}
	all, err := s.store.Pubs.All(ctx)
	if err != nil || usedElsewhere(all, name, "") || movedElsewhere(all, name, target) {
		return err
	}
	return s.drainer.Stop(ctx, m, drain.Options{})
}

// Reassign records that a publication is of another mount now, which is mounted at its target next. former is the mount that it was of
// when the call began, which stays in the record until it is stopped. The caller holds the lock of the new mount's key. Reassign also
// locks the former mount's key, because a call that replaces that mount moves its publications to the successor: Busy if another call
// holds that lock, or has moved the publication.
func (s *Supervisor) Reassign(ctx context.Context, former string, p state.Publication) error {
	if former != "" && mount.KeyOf(former) != mount.KeyOf(p.Mount) {
		unlock, ok := s.keys.TryLock(mount.KeyOf(former)) // waiting for a second key's lock could deadlock
		if !ok {
			return fault.Errorf(fault.Busy, "mount %s at the target is being replaced or stopped", former)
		}
		defer unlock()
	}
	now, ok, err := s.store.Pubs.Get(ctx, p.Target)
	if err != nil {
		return err
	}
	if ok && now.Mount != former && now.Mount != p.Mount {
		return fault.Errorf(fault.Busy, "mount %s at the target was replaced by %s in the meantime", former, now.Mount)
	}
	p.MovedFrom = slices.Clone(now.MovedFrom)
	if ok && now.Mount != p.Mount {
		p.MovedFrom = append(p.MovedFrom, now.Mount)
	}
	return s.store.Pubs.Write(ctx, p)
}

// updatePublication changes the record of a publication, unless that has moved to another mount since p was read. If another call holds the lock of
// the mount's key, nothing is done: the next republish does it.
func (s *Supervisor) updatePublication(ctx context.Context, p state.Publication, change func(now *state.Publication)) error {
	unlock, ok := s.keys.TryLock(mount.KeyOf(p.Mount))
	if !ok {
		return nil
	}
	defer unlock()
	now, ok, err := s.store.Pubs.Get(ctx, p.Target)
	if err != nil || !ok || now.Mount != p.Mount {
		return err
	}
	change(&now)
	return s.store.Pubs.Write(ctx, now)
}
