package supervisor

import (
	"context"
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

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
