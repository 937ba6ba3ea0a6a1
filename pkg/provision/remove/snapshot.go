package remove

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// SnapshotRequest names a snapshot to delete.
type SnapshotRequest struct {
	ID      volume.SnapshotID
	Keys    credentials.Keys // of the request's secret; zero: none
	RoleARN string           // of the request's secret; "": none
	// Failure is why a snapshot that could not be made is deleted, for its record; "": it was asked for.
	Failure string
}

// DeleteSnapshot deletes the snapshot according to its record. It returns nil if the snapshot is deleted or never existed. Otherwise it is like
// Delete.
func (r *Remover) DeleteSnapshot(ctx context.Context, q SnapshotRequest) error {
	s := snapshotDeletion{remover: r, id: q.ID, failure: q.Failure}
	return r.delete(ctx, request{"snapshot " + q.ID.String(), q.ID.Backend, q.Keys, q.RoleARN}, &deletion{}, s.find)
}

// snapshotDeletion is the deletion of a snapshot.
type snapshotDeletion struct {
	remover *Remover
	be      backend.Backend // set by find
	id      volume.SnapshotID
	failure string // see SnapshotRequest
}

// find returns what deletes the snapshot, or nil if there is nothing to delete. An error is a refusal.
func (s snapshotDeletion) find(ctx context.Context, a identity.Access) (job, error) {
	s.be = a.Backend
	b, err := s.remover.Opener.OpenUncached(ctx, s.be, a.Keys, s.id.Bucket)
	if err == nil {
		_, err = s.read(ctx, b)
	}
	switch {
	case err == nil:
		return func(ctx context.Context, d *deletion) error { return s.ifGone(s.remove(ctx, d)) }, nil
	case errors.Is(err, errSnapshotDeleted):
		return nil, nil
	case errors.Is(err, records.ErrNotOurs):
		err = s.refuseUnowned(ctx, b)
	}
	return nil, s.ifGone(err)
}

// ifGone returns nil for a snapshot whose bucket does not exist.
func (s snapshotDeletion) ifGone(err error) error {
	if bucketIsGone(err) {
		s.remover.Opener.Invalidate(s.be, s.id.Bucket)
		return nil
	}
	return err
}

// refuseUnowned refuses a snapshot without a record, unless there is nothing of it.
func (s snapshotDeletion) refuseUnowned(ctx context.Context, b buckets.Bucket) error {
	empty, err := buckets.IsEmpty(ctx, b, s.id.Prefix())
	if err == nil && !empty {
		err = fault.Errorf(fault.Precondition, "snapshot %s: there is data below %q in %s, but no record shows that %s made this snapshot: nothing is deleted; "+
			"delete the data by hand if it is unused",
			s.id, s.id.Prefix(), b, s.remover.Records.Owner)
	}
	return err
}

var errSnapshotDeleted = errors.New("the snapshot is deleted")

// read reads this owner's record of exactly that snapshot. ErrNotOurs: there is none. errSnapshotDeleted: its record says so, or
// is of a later generation. NotFound: there is no bucket.
func (s snapshotDeletion) read(ctx context.Context, b buckets.Bucket) (records.StoredSnapshot, error) {
	found, err := s.remover.Records.ReadSnapshot(ctx, b, s.id.Segment)
	switch {
	case backend.IsNoSuchBucket(err):
		return found, err
	case fault.Is(err, fault.NotFound):
		return found, records.ErrNotOurs
	case err != nil:
		return found, err
	case found.Owner() != s.remover.Records.Owner:
		return found, records.ErrNotOurs
	case found.Generation > s.id.Generation, found.SnapshotID == s.id.String() && found.State == records.StateDeleted:
		return found, errSnapshotDeleted
	case found.SnapshotID != s.id.String():
		return found, records.ErrNotOurs
	}
	return found, nil
}

// remove deletes the snapshot, in any state that an earlier attempt left:
//
//  1. refuse it while a volume is the snapshot itself
//  2. write the state deleting, so that runs that make the snapshot stop, and repeat the check
//  3. wait until none of these runs may still write
//  4. erase its data and its manifest, according to onDelete
//  5. write the tombstone last, because until it exists every attempt repeats these steps
func (s snapshotDeletion) remove(ctx context.Context, d *deletion) error {
	b, err := s.remover.openToDelete(ctx, s.be, d, target{
		what: "snapshot " + s.id.String(), id: s.id.String(), bucket: s.id.Bucket, prefix: s.id.Prefix(), records: []string{records.SnapshotKey(s.id.Segment)},
	})
	if err != nil {
		return err
	}
	at := s.remover.Records.OfSnapshot(b, s.id)
	return records.Repeat(at.What, func() error {
		found, err := s.read(ctx, b)
		switch {
		case errors.Is(err, records.ErrNotOurs):
			return s.refuseUnowned(ctx, b)
		case errors.Is(err, errSnapshotDeleted):
			return nil
		case err != nil:
			return err
		case s.failure != "" && found.State == records.StateReady:
			return fault.Errorf(fault.Busy, "another controller has made snapshot %s meanwhile", s.id)
		}
		if found.State != records.StateDeleting {
			if err := s.refuseUsed(ctx, b); err != nil {
				return err
			}
			if found.State != records.StateReady && found.OnDelete == volume.OnDeleteRetain {
				found.OnDelete = volume.OnDeleteDelete // what there is of it is of no use
			}
			found.Snapshot = found.With(records.StateDeleting, s.remover.Records.Now())
			found.Makers, found.Failure = s.remover.Claims.Open(found.Makers), s.failure
			if found, err = at.Write(ctx, found); err != nil {
				return err
			}
		}
		// The state stays: another process may have erased something already, if what this one sees was written after its check.
		if err := s.refuseUsed(ctx, b); err != nil {
			return err
		}
		if len(s.remover.Claims.Open(found.Makers)) > 0 {
			if err := s.remover.outwait(ctx, d, func(ctx context.Context) ([]string, error) { return s.makers(ctx, b) }); err != nil {
				return err
			}
			return records.ErrChanged // read it again
		}
		if found.OnDelete != volume.OnDeleteRetain {
			task := erase.Task{Bucket: b, Prefix: s.id.Prefix(), Versions: found.OnDelete == volume.OnDeletePurge, Progress: &d.progress}
			if err := s.remover.erase(ctx, d, task); err != nil {
				return err
			}
		}
		found.Snapshot = found.With(records.StateDeleted, s.remover.Records.Now())
		_, err = at.Write(ctx, found)
		return err
	})
}

// makers returns the claims of the runs that may still write objects of the snapshot.
func (s snapshotDeletion) makers(ctx context.Context, b buckets.Bucket) ([]string, error) {
	found, err := s.read(ctx, b)
	if errors.Is(err, records.ErrNotOurs) || errors.Is(err, errSnapshotDeleted) {
		return nil, nil
	}
	return found.Makers, err
}

// refuseUsed refuses a snapshot that a volume uses without a copy.
func (s snapshotDeletion) refuseUsed(ctx context.Context, b buckets.Bucket) error {
	empty, err := buckets.IsEmpty(ctx, b, s.id.Users())
	if err == nil && !empty {
		err = fault.Errorf(fault.Precondition, "snapshot %s is used without a copy (snapshotAccess: direct): delete the volumes that are named below %s in %s first",
			s.id, s.id.Users(), b)
	}
	return err
}
