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

// prefixVolume is a volume that is a prefix of a bucket.
type prefixVolume struct {
	*Remover
	be backend.Backend
	id volume.ID
}

// find returns what deletes the volume, or nil if there is nothing to delete. An error is a refusal.
func (v prefixVolume) find(ctx context.Context, keys credentials.Keys) (job, error) {
	b, err := v.Opener.OpenUncached(ctx, v.be, keys, v.id.Bucket)
	if err == nil {
		var found records.Stored
		found, err = v.Records.ReadOwn(ctx, b, v.id)
		if err == nil {
			if isDeleted(found, v.id) {
				return nil, nil
			}
			v.be = found.For(v.be)
			return func(ctx context.Context, d *deletion) error {
				first := found
				found = records.Stored{} // the next attempt reads it again
				return v.remove(ctx, d, first)
			}, nil
		}
		if errors.Is(err, records.ErrNotOurs) {
			err = v.unowned(ctx, b)
		}
	}
	if bucketIsGone(err) {
		return nil, v.bucketGone(err)
	}
	return nil, err
}

// unowned refuses a volume without a record, unless there is nothing of it.
func (v prefixVolume) unowned(ctx context.Context, b buckets.Bucket) error {
	empty, err := buckets.IsEmpty(ctx, b, v.id.Prefix)
	if err == nil && !empty {
		err = fault.Errorf(fault.Precondition, "volume %s: there is data below %q in %s, but no record shows that %s created this volume: nothing is deleted; "+
			"delete the data by hand if it is unused, or remove the volume without deleting it (in Kubernetes: reclaim policy "+
			"Retain)", v.id, v.id.Prefix, b, v.Records.Owner)
	}
	return err
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

// bucketGone decides about a volume whose bucket does not exist: it is gone, unless the bucket name is the alias of an access
// point, whose bucket may still exist.
func (v prefixVolume) bucketGone(err error) error {
	v.Opener.Invalidate(v.be, v.id.Bucket)
	if kind, nameErr := volume.ValidateBucketName(v.id.Bucket); nameErr == nil && kind == volume.BucketAccessPoint {
		return fault.Errorf(fault.Precondition, "volume %s: the access point does not exist, and the data in its bucket may: nothing is deleted; "+
			"create the access point again, or delete the data by hand and remove the volume without deleting it (in Kubernetes: reclaim policy Retain): %w", v.id, err)
	}
	return nil
}

// bucketIsGone reports whether an error means that the bucket does not exist.
func bucketIsGone(err error) bool { return fault.Is(err, fault.NotFound) }

// lookup implements Lookup.
func (v prefixVolume) lookup(ctx context.Context, keys credentials.Keys) error {
	b, err := v.Opener.Open(ctx, v.be, keys, v.id.Bucket, "")
	if err != nil {
		return err
	}
	found, err := v.Records.ReadOwn(ctx, b, v.id)
	switch {
	case errors.Is(err, records.ErrNotOurs), err == nil && (found.State != records.StateActive || found.VolumeID != v.id.String()):
		return fault.Errorf(fault.NotFound, "there is no volume %s of %s", v.id, v.Records.Owner)
	case bucketIsGone(err):
		v.Opener.Invalidate(v.be, v.id.Bucket)
	}
	return err
}

// lookupPlace implements LookupPlace.
func (v prefixVolume) lookupPlace(ctx context.Context, keys credentials.Keys) error {
	b, err := v.Opener.OpenUncached(ctx, v.be, keys, v.id.Bucket)
	if err != nil {
		return err
	}
	switch found, err := v.Records.ReadOwn(ctx, b, v.id); {
	case err == nil && found.State == records.StateDeleting && found.VolumeID == v.id.String():
		return fault.Errorf(fault.NotFound, "volume %s of %s is being deleted", v.id, v.Records.Owner)
	case err != nil && !errors.Is(err, records.ErrNotOurs) && !fault.Is(err, fault.NotFound):
		return err
	}
	empty, err := buckets.IsEmpty(ctx, b, v.id.Prefix)
	if err == nil && empty {
		err = fault.Errorf(fault.NotFound, "there is no volume %s of %s, and no object is below its prefix", v.id, v.Records.Owner)
	}
	return err
}

// remove deletes the volume, in any state that an earlier attempt left:
//
//  1. check that it is empty, if onDelete is requireEmpty
//  2. write the state deleting, so that runs that fill the volume stop
//  3. wait until none of these runs may still write
//  4. erase its data, according to onDelete
//  5. write the tombstone last, because until it exists every attempt repeats these steps
//
// found is the volume's record; without an ETag it is read first. It may be old: each write of the record is conditional.
func (v prefixVolume) remove(ctx context.Context, d *deletion, found records.Stored) error {
	err := v.removeIn(ctx, d, found)
	if bucketIsGone(err) {
		return v.bucketGone(err)
	}
	return err
}

func (v prefixVolume) removeIn(ctx context.Context, d *deletion, found records.Stored) error {
	b, err := v.openToDelete(ctx, v.be, d, volumeTarget(v.id))
	if err != nil {
		return err
	}
	segment, _, _ := v.id.NameSegment()
	for range maxRaces {
		if found.ETag == "" {
			found, err = v.Records.ReadOwn(ctx, b, v.id)
			switch {
			case errors.Is(err, records.ErrNotOurs): // another process deleted it, and its name was used again, or its record is lost
				return v.unowned(ctx, b)
			case err != nil:
				return err
			}
		}
		if isDeleted(found, v.id) {
			return nil
		}
		if d.unfilled && found.State == records.StateActive {
			return errFilled(v.id)
		}
		if found.State == records.StateFilling && found.OnDelete != volume.OnDeletePurge {
			found.OnDelete = volume.OnDeleteDelete // nothing in it is a user's
		}
		if (found.State == records.StateActive || found.State == records.StateFilling) && found.OnDelete != volume.OnDeleteRetain {
			if found, err = v.beginDeletion(ctx, b, segment, found); err != nil {
				return err
			}
			if found.ETag == "" {
				continue
			}
		}
		if len(v.Claims.Open(found.Fillers)) > 0 {
			if err := v.outwait(ctx, d, func(ctx context.Context) ([]string, error) {
				found, err := v.Records.ReadOwn(ctx, b, v.id)
				if errors.Is(err, records.ErrNotOurs) || err == nil && isDeleted(found, v.id) {
					return nil, nil
				}
				return found.Fillers, err
			}); err != nil {
				return err
			}
			found = records.Stored{}
			continue
		}
		if err := v.removeData(ctx, b, d, segment, found); err != nil {
			return err
		}
		if err := unpin(ctx, b.AsOwn(), v.id, found.Record); err != nil {
			return err
		}
		_, err = v.Records.Write(ctx, b, segment, found.ETag, found.With(records.StateDeleted, v.Records.Now()))
		if !errors.Is(err, records.ErrChanged) {
			return err
		}
		found = records.Stored{}
	}
	return fault.Errorf(fault.Busy, "the record of volume %s keeps changing: another controller uses it", v.id)
}

// beginDeletion writes the state deleting and returns the record, without an ETag if it must be read again.
func (v prefixVolume) beginDeletion(ctx context.Context, b buckets.Bucket, segment string, found records.Stored) (records.Stored, error) {
	if found.OnDelete == volume.OnDeleteRequireEmpty {
		if err := v.requireEmpty(ctx, b, v.id); err != nil {
			return records.Stored{}, err
		}
	}
	deleting := found.With(records.StateDeleting, v.Records.Now())
	deleting.Fillers = v.Claims.Open(found.Fillers)
	etag, err := v.Records.Write(ctx, b, segment, found.ETag, deleting)
	if errors.Is(err, records.ErrChanged) {
		return records.Stored{}, nil
	}
	return records.Stored{Record: deleting, ETag: etag}, err
}

// removeData removes the data of a volume that is being deleted, according to onDelete.
func (v prefixVolume) removeData(ctx context.Context, b buckets.Bucket, d *deletion, segment string, found records.Stored) error {
	switch found.OnDelete {
	case volume.OnDeleteRetain:
		return nil
	case volume.OnDeleteRequireEmpty:
		// A pod may have written between the first check and the change of state.
		notEmpty := v.requireEmpty(ctx, b, v.id)
		if !fault.Is(notEmpty, fault.Precondition) {
			return notEmpty
		}
		if _, err := v.Records.Write(ctx, b, segment, found.ETag, found.With(records.StateActive, v.Records.Now())); err != nil {
			return fault.Errorf(fault.Busy, "%w; making the volume usable again: %w", notEmpty, err)
		}
		return notEmpty
	}
	versions := found.OnDelete == volume.OnDeletePurge
	if found.ContentSource != "" {
		if err := v.erase(ctx, d, erase.Task{Bucket: b.AsOwn(), Prefix: v.id.FillManifest(), Versions: versions, Progress: &d.progress}); err != nil {
			return err
		}
	}
	return v.erase(ctx, d, erase.Task{Bucket: b, Prefix: v.id.Prefix, Versions: versions, Progress: &d.progress})
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
