package remove

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
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
func (r *Remover) DeleteSnapshot(ctx context.Context, req SnapshotRequest) (err error) {
	be, who, err := r.Identities.Find(req.ID.Backend, req.Keys, req.RoleARN)
	if err != nil {
		return err
	}
	name := snapshotMark + req.ID.String()
	if d := r.queue.join(name, who); d != nil {
		return r.queue.wait(ctx, d)
	}
	keys, err := r.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { r.Identities.Invalidate(be, who, keys, err) }()
	there, err := r.findSnapshot(ctx, be, keys, req.ID)
	if err != nil || !there {
		return err
	}
	d, err := r.queue.start(name, who, func(ctx context.Context, d *deletion) error {
		return r.WhileConfigured(ctx, be, func(ctx context.Context) error {
			err := r.deleteSnapshot(ctx, be, d, req)
			if bucketIsGone(err) {
				r.Opener.Invalidate(be, req.ID.Bucket)
				return nil
			}
			return err
		})
	})
	if err != nil {
		return err
	}
	return r.queue.wait(ctx, d)
}

// findSnapshot reports whether there is something to delete. An error is a refusal.
func (r *Remover) findSnapshot(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.SnapshotID) (bool, error) {
	b, err := r.Opener.OpenUncached(ctx, be, keys, id.Bucket)
	if err == nil {
		var empty bool
		_, err = r.readSnapshot(ctx, b, id)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, errSnapshotDeleted):
			return false, nil
		case !errors.Is(err, records.ErrNotOurs):
		default:
			if empty, err = buckets.IsEmpty(ctx, b, id.Prefix()); err == nil && !empty {
				return false, fault.Errorf(fault.Precondition, "snapshot %s: there is data below %q in %s, but no record shows that %s made this snapshot: nothing is deleted; delete the data by hand if it is unused",
					id, id.Prefix(), b, r.Records.Owner)
			}
		}
	}
	if bucketIsGone(err) {
		r.Opener.Invalidate(be, id.Bucket)
		return false, nil
	}
	return false, err
}

var errSnapshotDeleted = errors.New("the snapshot is deleted")

// readSnapshot reads this owner's record of exactly that snapshot. ErrNotOurs: there is none. errSnapshotDeleted: its record says so, or
// is of a later generation. NotFound: there is no bucket.
func (r *Remover) readSnapshot(ctx context.Context, b buckets.Bucket, id volume.SnapshotID) (records.StoredSnapshot, error) {
	found, err := r.Records.ReadSnapshot(ctx, b, id.Segment)
	switch {
	case backend.IsNoSuchBucket(err):
		return found, err
	case fault.Is(err, fault.NotFound):
		return found, records.ErrNotOurs
	case err != nil:
		return found, err
	case found.Owner() != r.Records.Owner:
		return found, records.ErrNotOurs
	case found.Generation > id.Generation, found.SnapshotID == id.String() && found.State == records.StateDeleted:
		return found, errSnapshotDeleted
	case found.SnapshotID != id.String():
		return found, records.ErrNotOurs
	}
	return found, nil
}

// deleteSnapshot deletes a snapshot, in any state that an earlier attempt left:
//
//  1. refuse it while a volume is the snapshot itself
//  2. write the state deleting, so that runs that make the snapshot stop, and repeat the check
//  3. wait until none of these runs may still write
//  4. erase its data and its manifest, according to onDelete
//  5. write the tombstone last, because until it exists every attempt repeats these steps
func (r *Remover) deleteSnapshot(ctx context.Context, be backend.Backend, d *deletion, req SnapshotRequest) error {
	id := req.ID
	b, err := r.openToDelete(ctx, be, d, target{
		what: "snapshot " + id.String(), id: id.String(), bucket: id.Bucket, prefix: id.Prefix(), records: []string{records.SnapshotKey(id.Segment)},
	})
	if err != nil {
		return err
	}
	for range maxRaces {
		found, err := r.readSnapshot(ctx, b, id)
		switch {
		case errors.Is(err, records.ErrNotOurs), errors.Is(err, errSnapshotDeleted):
			return nil
		case err != nil:
			return err
		}
		if req.Failure != "" && found.State == records.StateReady {
			return fault.Errorf(fault.Busy, "another controller has made snapshot %s meanwhile", id)
		}
		if found.State != records.StateDeleting {
			if err := r.unused(ctx, b, id); err != nil {
				return err
			}
			if found.State != records.StateReady && found.OnDelete == volume.OnDeleteRetain {
				found.OnDelete = volume.OnDeleteDelete // what there is of it is of no use
			}
			found.Snapshot = found.With(records.StateDeleting, r.Records.Now())
			found.Makers = r.Claims.Open(found.Makers)
			found.Failure = req.Failure
			found.ETag, err = r.Records.WriteSnapshot(ctx, b, found.ETag, found.Snapshot)
			if errors.Is(err, records.ErrChanged) || err == nil && found.ETag == "" {
				continue // read it again
			}
			if err != nil {
				return err
			}
		}
		// The state stays: another process may have erased something already, if what this one sees was written after its check.
		if err := r.unused(ctx, b, id); err != nil {
			return err
		}
		if len(r.Claims.Open(found.Makers)) > 0 {
			if err := r.outwait(ctx, d, func(ctx context.Context) ([]string, error) {
				found, err := r.readSnapshot(ctx, b, id)
				if errors.Is(err, records.ErrNotOurs) || errors.Is(err, errSnapshotDeleted) {
					return nil, nil
				}
				return found.Makers, err
			}); err != nil {
				return err
			}
			continue // read it again
		}
		if found.OnDelete != volume.OnDeleteRetain {
			if err := r.erase(ctx, d, erase.Task{Bucket: b, Prefix: id.Prefix(), Versions: found.OnDelete == volume.OnDeletePurge, Progress: &d.progress}); err != nil {
				return err
			}
		}
		_, err = r.Records.WriteSnapshot(ctx, b, found.ETag, found.With(records.StateDeleted, r.Records.Now()))
		if !errors.Is(err, records.ErrChanged) {
			return err
		}
	}
	return fault.Errorf(fault.Busy, "the record of snapshot %s keeps changing: another controller uses it", id)
}

// unused refuses a snapshot that a volume uses without a copy.
func (r *Remover) unused(ctx context.Context, b buckets.Bucket, id volume.SnapshotID) error {
	empty, err := buckets.IsEmpty(ctx, b, id.Users())
	if err == nil && !empty {
		err = fault.Errorf(fault.Precondition, "snapshot %s is used without a copy (snapshotAccess: direct): delete the volumes that are named below %s in %s first", id, id.Users(), b)
	}
	return err
}
