package supervisor

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
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
