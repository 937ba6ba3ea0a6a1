package remove

import (
	"context"
	"errors"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// maxRaces is how often a decision is repeated because a record or a bucket changed meanwhile.
const maxRaces = 4

// findPrefix returns what deletes the volume, or nil if there is nothing to delete. An error is a refusal.
func (r *Remover) findPrefix(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) (job, error) {
	b, err := r.Opener.OpenUncached(ctx, be, keys, id.Bucket)
	if err == nil {
		var found records.Stored
		found, err = r.Records.ReadOwn(ctx, b, id)
		if err == nil {
			if isDeleted(found, id) {
				return nil, nil
			}
			return func(ctx context.Context, d *deletion) error {
				first := found
				found = records.Stored{} // the next attempt reads it again
				return r.deletePrefix(ctx, be, d, id, first)
			}, nil
		}
		if errors.Is(err, records.ErrNotOurs) {
			var empty bool
			if empty, err = buckets.IsEmpty(ctx, b, id.Prefix); err == nil && !empty {
				return nil, fault.Errorf(fault.Precondition, "volume %s: there is data below %q in %s, but no record shows that %s created this volume: nothing is deleted; "+
					"delete the data by hand if it is unused, or remove the volume without deleting it (in Kubernetes: reclaim policy Retain)", id, id.Prefix, b, r.Records.Owner)
			}
		}
	}
	if bucketIsGone(err) {
		return nil, r.bucketGone(be, id, err)
	}
	return nil, err
}

// unpin removes the object that keeps the snapshot from being deleted which the volume is. It is only ever the volume's own object.
func unpin(ctx context.Context, b buckets.Bucket, id volume.ID, found records.Record) error {
	content, err := volume.ParseContent(found.ContentSource)
	if !found.Direct || err != nil || content.Snapshot.Bucket != id.Bucket {
		return nil //nolint:nilerr // a record that was read is valid
	}
	key := content.Snapshot.User(id)
	_, err = b.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: b.Name(), Key: &key})
	return backend.Classify(err, "removing "+key+" of "+b.String())
}

// errFilled refuses to delete a volume that another process has filled, because it may be in use.
func errFilled(id volume.ID) error {
	return fault.Errorf(fault.Busy, "another controller has filled volume %s meanwhile", id)
}

// isDeleted reports whether the record of a volume's name shows that the volume was deleted.
func isDeleted(found records.Stored, id volume.ID) bool {
	return found.State == records.StateDeleted || found.VolumeID != id.String()
}

// bucketGone decides about a prefix volume whose bucket does not exist: the volume is gone, unless the bucket name is the alias of an access
// point, whose bucket may still exist.
func (r *Remover) bucketGone(be backend.Backend, id volume.ID, err error) error {
	r.Opener.Invalidate(be, id.Bucket)
	if kind, nameErr := volume.ValidateBucketName(id.Bucket); nameErr == nil && kind == volume.BucketAccessPoint {
		return fault.Errorf(fault.Precondition, "volume %s: the access point does not exist, and the data in its bucket may: nothing is deleted; "+
			"create the access point again, or delete the data by hand and remove the volume without deleting it (in Kubernetes: reclaim policy Retain): %w", id, err)
	}
	return nil
}

// bucketIsGone reports whether an error means that the bucket does not exist.
func bucketIsGone(err error) bool { return fault.Is(err, fault.NotFound) }

// lookupPrefix implements Lookup for a prefix volume.
func (r *Remover) lookupPrefix(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) error {
	b, err := r.Opener.Open(ctx, be, keys, id.Bucket, "")
	if err != nil {
		return err
	}
	found, err := r.Records.ReadOwn(ctx, b, id)
	switch {
	case errors.Is(err, records.ErrNotOurs), err == nil && (found.State != records.StateActive || found.VolumeID != id.String()):
		return fault.Errorf(fault.NotFound, "there is no volume %s of %s", id, r.Records.Owner)
	case bucketIsGone(err):
		r.Opener.Invalidate(be, id.Bucket)
	}
	return err
}

// lookupPrefixPlace implements LookupPlace for a prefix.
func (r *Remover) lookupPrefixPlace(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) error {
	b, err := r.Opener.OpenUncached(ctx, be, keys, id.Bucket)
	if err != nil {
		return err
	}
	switch found, err := r.Records.ReadOwn(ctx, b, id); {
	case err == nil && found.State == records.StateDeleting && found.VolumeID == id.String():
		return fault.Errorf(fault.NotFound, "volume %s of %s is being deleted", id, r.Records.Owner)
	case err != nil && !errors.Is(err, records.ErrNotOurs) && !fault.Is(err, fault.NotFound):
		return err
	}
	empty, err := buckets.IsEmpty(ctx, b, id.Prefix)
	if err == nil && empty {
		err = fault.Errorf(fault.NotFound, "there is no volume %s of %s, and no object is below its prefix", id, r.Records.Owner)
	}
	return err
}

// deletePrefix deletes a prefix volume, in any state that an earlier attempt left:
//
//  1. check that it is empty, if onDelete is requireEmpty
//  2. write the state deleting, so that runs that fill the volume stop
//  3. wait until none of these runs may still write
//  4. erase its data, according to onDelete
//  5. write the tombstone last, because until it exists every attempt repeats these steps
//
// found is the volume's record; without an ETag it is read first. It may be old: each write of the record is conditional.
func (r *Remover) deletePrefix(ctx context.Context, be backend.Backend, d *deletion, id volume.ID, found records.Stored) error {
	err := r.deletePrefixIn(ctx, be, d, id, found)
	if bucketIsGone(err) {
		return r.bucketGone(be, id, err)
	}
	return err
}

func (r *Remover) deletePrefixIn(ctx context.Context, be backend.Backend, d *deletion, id volume.ID, found records.Stored) error {
	b, err := r.openToDelete(ctx, be, d, volumeTarget(id))
	if err != nil {
		return err
	}
	segment, _, _ := id.NameSegment()
	for range maxRaces {
		if found.ETag == "" {
			found, err = r.Records.ReadOwn(ctx, b, id)
			switch {
			case errors.Is(err, records.ErrNotOurs): // another process deleted it, and its name was used again
				return nil
			case err != nil:
				return err
			}
		}
		if isDeleted(found, id) {
			return nil
		}
		if d.unfilled && found.State == records.StateActive {
			return errFilled(id)
		}
		if found.State == records.StateFilling && found.OnDelete != volume.OnDeletePurge {
			found.OnDelete = volume.OnDeleteDelete // nothing in it is a user's
		}
		if (found.State == records.StateActive || found.State == records.StateFilling) && found.OnDelete != volume.OnDeleteRetain {
			if found, err = r.beginDeletion(ctx, b, id, segment, found); err != nil {
				return err
			}
			if found.ETag == "" {
				continue
			}
		}
		if len(r.Claims.Open(found.Fillers)) > 0 {
			if err := r.outwait(ctx, d, func(ctx context.Context) ([]string, error) {
				found, err := r.Records.ReadOwn(ctx, b, id)
				if errors.Is(err, records.ErrNotOurs) || err == nil && isDeleted(found, id) {
					return nil, nil
				}
				return found.Fillers, err
			}); err != nil {
				return err
			}
			found = records.Stored{}
			continue
		}
		if err := r.removeData(ctx, b, d, id, segment, found); err != nil {
			return err
		}
		if err := unpin(ctx, b.AsOwn(), id, found.Record); err != nil {
			return err
		}
		_, err = r.Records.Write(ctx, b, segment, found.ETag, found.With(records.StateDeleted, r.Records.Now()))
		if !errors.Is(err, records.ErrChanged) {
			return err
		}
		found = records.Stored{}
	}
	return fault.Errorf(fault.Busy, "the record of volume %s keeps changing: another controller uses it", id)
}

// beginDeletion writes the state deleting and returns the record, without an ETag if it must be read again.
func (r *Remover) beginDeletion(ctx context.Context, b buckets.Bucket, id volume.ID, segment string, found records.Stored) (records.Stored, error) {
	if found.OnDelete == volume.OnDeleteRequireEmpty {
		if err := r.requireEmpty(ctx, b, id); err != nil {
			return records.Stored{}, err
		}
	}
	deleting := found.With(records.StateDeleting, r.Records.Now())
	deleting.Fillers = r.Claims.Open(found.Fillers)
	etag, err := r.Records.Write(ctx, b, segment, found.ETag, deleting)
	if errors.Is(err, records.ErrChanged) {
		return records.Stored{}, nil
	}
	return records.Stored{Record: deleting, ETag: etag}, err
}

// removeData removes the data of a volume that is being deleted, according to onDelete.
func (r *Remover) removeData(ctx context.Context, b buckets.Bucket, d *deletion, id volume.ID, segment string, found records.Stored) error {
	switch found.OnDelete {
	case volume.OnDeleteRetain:
		return nil
	case volume.OnDeleteRequireEmpty:
		// A pod may have written between the first check and the change of state.
		notEmpty := r.requireEmpty(ctx, b, id)
		if !fault.Is(notEmpty, fault.Precondition) {
			return notEmpty
		}
		if _, err := r.Records.Write(ctx, b, segment, found.ETag, found.With(records.StateActive, r.Records.Now())); err != nil {
			return fault.Errorf(fault.Busy, "%w; making the volume usable again: %w", notEmpty, err)
		}
		return notEmpty
	}
	versions := found.OnDelete == volume.OnDeletePurge
	if found.ContentSource != "" {
		if err := r.erase(ctx, d, erase.Task{Bucket: b.AsOwn(), Prefix: id.FillManifest(), Versions: versions, Progress: &d.progress}); err != nil {
			return err
		}
	}
	return r.erase(ctx, d, erase.Task{Bucket: b, Prefix: id.Prefix, Versions: versions, Progress: &d.progress})
}

// requireEmpty returns a Precondition if an object or an unfinished upload is below the volume's prefix.
func (r *Remover) requireEmpty(ctx context.Context, b buckets.Bucket, id volume.ID) error {
	left, err := r.Eraser.Look(ctx, erase.Task{Bucket: b, Prefix: id.Prefix})
	if err != nil || left.Empty() {
		return err
	}
	what := "objects"
	if !left.Objects {
		what = "unfinished uploads"
	}
	return fault.Errorf(fault.Precondition, "volume %s is not empty and its onDelete is %s: remove the %s below %s/%s first", id, volume.OnDeleteRequireEmpty, what, b.Info.Name, id.Prefix)
}
