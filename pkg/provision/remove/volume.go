package remove

import (
	"context"
	"errors"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// volumeDeletion is the deletion of a volume: a prefix of a bucket, whose record becomes a tombstone, or a bucket, which is deleted with its tags.
type volumeDeletion struct {
	remover *Remover
	be      backend.Backend
	id      volume.ID

	// Of remove:
	d  *deletion
	b  buckets.Bucket
	at records.Place[records.Stored]
}

func (v volumeDeletion) isBucket() bool { return v.id.Prefix == "" }

// find returns what deletes the volume, or nil if there is nothing to delete. An error is a refusal.
func (v volumeDeletion) find(ctx context.Context, a identity.Access) (job, error) {
	v.be = a.Backend
	b, err := v.remover.Opener.OpenUncached(ctx, v.be, a.Keys, v.id.Bucket)
	var found records.Stored
	if err == nil {
		found, err = v.remover.Records.ReadOwn(ctx, b, v.id)
	}
	switch {
	case errors.Is(err, records.ErrNotOurs):
		return nil, v.ifGone(v.refuseUnowned(ctx, b))
	case err != nil:
		return nil, v.ifGone(err)
	case v.isDeleted(found):
		return nil, nil
	}
	v.be = found.For(v.be)
	first := &found
	if v.isBucket() {
		first = nil // tags are not written under a condition
	}
	return func(ctx context.Context, d *deletion) error {
		known := first
		first = nil // the next attempt reads it again
		return v.ifGone(v.remove(ctx, d, known))
	}, nil
}

// refuseUnowned refuses a volume without a record or tags, unless there is nothing of it.
func (v volumeDeletion) refuseUnowned(ctx context.Context, b buckets.Bucket) error {
	empty, err := buckets.IsEmpty(ctx, b, v.id.Prefix)
	if err == nil && !empty {
		err = fault.Errorf(fault.Precondition, "volume %s: there is data below %q in %s, but no record or tag shows that %s created this volume: nothing is "+
			"deleted; delete the data by hand if it is unused, or remove the volume without deleting it (in Kubernetes: reclaim policy Retain)",
			v.id, v.id.Prefix, b, v.remover.Records.Owner)
	}
	return err
}

// isDeleted reports whether the record or the tags show that the volume was deleted.
func (v volumeDeletion) isDeleted(found records.Stored) bool {
	return found.State == records.StateDeleted || found.VolumeID != v.id.String()
}

// ifGone decides about a volume whose bucket does not exist: it is gone, unless the bucket name is the alias of an access
// point, whose bucket may still exist.
func (v volumeDeletion) ifGone(err error) error {
	if !bucketIsGone(err) {
		return err
	}
	v.remover.Opener.Invalidate(v.be, v.id.Bucket)
	if kind, nameErr := volume.ValidateBucketName(v.id.Bucket); nameErr == nil && kind == volume.BucketAccessPoint && !v.isBucket() {
		return fault.Errorf(fault.Precondition, "volume %s: the access point does not exist, and the data in its bucket may: nothing is deleted; "+
			"create the access point again, or delete the data by hand and remove the volume without deleting it (in Kubernetes: reclaim policy Retain): %w", v.id, err)
	}
	return nil
}

// bucketIsGone reports whether an error means that the bucket does not exist.
func bucketIsGone(err error) bool { return fault.Is(err, fault.NotFound) }

// remove deletes the volume, in any state that an earlier attempt left:
//
//  1. check that it is empty, if onDelete is requireEmpty
//  2. write the state deleting, so that runs that fill the volume stop
//  3. wait until none of these runs may still write
//  4. erase its data, or its bucket, according to onDelete
//  5. write the tombstone last, because until it exists every attempt repeats these steps
//
// known is the volume's record, which may be old, because each write of the record is conditional; nil: it is read first.
func (v volumeDeletion) remove(ctx context.Context, d *deletion, known *records.Stored) error {
	if v.isBucket() {
		release, err := v.remover.Opener.Lock(ctx, v.be, v.id.Bucket)
		if err != nil {
			return err
		}
		defer release()
	}
	b, err := v.remover.openToDelete(ctx, v.be, d, volumeTarget(v.id))
	if err != nil {
		return err
	}
	v.d, v.b, v.at = d, b, v.remover.Records.OfVolume(b, v.id)
	return records.Repeat(v.at.What, func() error {
		var found records.Stored
		if known != nil {
			found, known = *known, nil
		} else if found, err = v.at.Read(ctx); errors.Is(err, records.ErrNotOurs) {
			return v.refuseUnowned(ctx, b) // another process deleted it, and its name was used again, or its record is lost
		} else if err != nil {
			return err
		}
		return v.removeRecorded(ctx, found)
	})
}

// removeRecorded deletes the volume with that record. ErrChanged: the record must be read again.
func (v volumeDeletion) removeRecorded(ctx context.Context, found records.Stored) error {
	switch {
	case v.isDeleted(found):
		return nil
	case v.isBucket() && v.d.hasWorker() && found.State != records.StateDeleting:
		return v.errNotDeleting() // the volume was created again before this deletion got its worker
	case v.d.unfilled && found.State == records.StateActive:
		return fault.Errorf(fault.Busy, "another controller has filled volume %s meanwhile", v.id) // it may be in use
	}
	found, err := v.begin(ctx, found)
	if err != nil {
		return err
	}
	if len(v.remover.Claims.Open(found.Fillers)) > 0 {
		if err := v.remover.outwait(ctx, v.d, v.fillers); err != nil {
			return err
		}
		return records.ErrChanged
	}
	switch {
	case found.OnDelete == volume.OnDeleteRetain:
	case v.isBucket():
		return v.dropBucket(ctx, found)
	default:
		if err := v.eraseData(ctx, found); err != nil {
			return err
		}
	}
	if err := unpin(ctx, v.b.AsOwn(), v.id, found.Record); err != nil {
		return err
	}
	return v.write(ctx, found, records.StateDeleted)
}

// begin writes the state deleting, unless the volume is retained, and returns the record.
func (v volumeDeletion) begin(ctx context.Context, found records.Stored) (records.Stored, error) {
	if found.State == records.StateFilling && found.OnDelete != volume.OnDeletePurge {
		found.OnDelete = volume.OnDeleteDelete // nothing in it is a user's
	}
	switch found.OnDelete {
	case volume.OnDeleteRetain, volume.OnDeleteDelete, volume.OnDeletePurge, volume.OnDeleteRequireEmpty:
	default:
		return found, fault.Errorf(fault.Precondition, "tag %s of %s is %q: set it to delete, purge, retain or requireEmpty", records.TagOnDelete, v.b,
			found.OnDelete)
	}
	if found.State == records.StateDeleting || found.OnDelete == volume.OnDeleteRetain {
		return found, nil
	}
	if found.OnDelete == volume.OnDeleteRequireEmpty {
		if err := v.requireEmpty(ctx); err != nil {
			return found, err
		}
	}
	found.Record = found.With(records.StateDeleting, v.remover.Records.Now())
	found.Fillers = v.remover.Claims.Open(found.Fillers)
	return v.at.Write(ctx, found)
}

// fillers returns the claims of the runs that may still write into the volume.
func (v volumeDeletion) fillers(ctx context.Context) ([]string, error) {
	found, err := v.at.Read(ctx)
	if errors.Is(err, records.ErrNotOurs) || err == nil && v.isDeleted(found) {
		return nil, nil
	}
	return found.Fillers, err
}

func (v volumeDeletion) write(ctx context.Context, found records.Stored, s records.State) error {
	found.Record = found.With(s, v.remover.Records.Now())
	_, err := v.at.Write(ctx, found)
	return err
}

// reactivate makes a volume usable again whose deletion was refused, and returns why.
func (v volumeDeletion) reactivate(ctx context.Context, found records.Stored, why error) error {
	if !fault.Is(why, fault.Precondition) {
		return why
	}
	if err := v.write(ctx, found, records.StateActive); err != nil {
		return fault.Errorf(fault.Busy, "%w; making the volume usable again: %w", why, err)
	}
	return why
}

// eraseData removes the data of a prefix volume that is being deleted, according to onDelete.
func (v volumeDeletion) eraseData(ctx context.Context, found records.Stored) error {
	task := erase.Task{Bucket: v.b.AsOwn(), Prefix: v.id.FillManifest(), Versions: found.OnDelete == volume.OnDeletePurge, Progress: &v.d.progress}
	if found.ContentSource != "" { // also if it was filled: the process that did so may have been killed before it removed it
		if err := v.remover.erase(ctx, v.d, task); err != nil {
			return err
		}
	}
	if found.OnDelete == volume.OnDeleteRequireEmpty {
		// A pod may have written between the first check and the change of state.
		if err := v.requireEmpty(ctx); err != nil {
			return v.reactivate(ctx, found, err)
		}
		return nil
	}
	task.Bucket, task.Prefix = v.b, v.id.Prefix
	return v.remover.erase(ctx, v.d, task)
}

// maxDrops is how often a bucket is emptied and deleted while another process writes to it.
const maxDrops = 4

// dropBucket removes what is in the bucket, then the bucket. If it must be empty, only the driver's own test objects are removed.
//
// A bucket's name has no generations. So each upload, each page and the bucket itself are deleted only while the tags show that
// this volume is being deleted: a delayed deletion stops if the volume was created again. A race between that check and the
// following request remains.
func (v volumeDeletion) dropBucket(ctx context.Context, found records.Stored) error {
	mustBeEmpty := found.OnDelete == volume.OnDeleteRequireEmpty
	task := erase.Task{Bucket: v.b, Versions: found.OnDelete == volume.OnDeletePurge, Progress: &v.d.progress, Still: v.stillDeleting}
	if mustBeEmpty {
		task.Prefix, task.Versions = buckets.Probes, true
	}
	var err error
	for range maxDrops {
		if mustBeEmpty {
			if err := v.requireEmpty(ctx); err != nil {
				return v.reactivate(ctx, found, err)
			}
		}
		if err := v.remover.erase(ctx, v.d, task); err != nil {
			return err
		}
		if err := v.stillDeleting(ctx); err != nil {
			return err
		}
		_, err = v.b.Client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: v.b.Name()})
		err = backend.Classify(err, "deleting the bucket of volume "+v.id.String())
		switch {
		case err == nil:
			v.remover.Opener.Invalidate(v.be, v.id.Bucket)
			return nil
		case backend.ErrorCode(err) != "BucketNotEmpty":
			return err
		case mustBeEmpty:
			return v.reactivate(ctx, found, fault.Errorf(fault.Precondition,
				"volume %s is not empty and its onDelete is %s: remove the objects, or versions of objects, that are left: %w", v.id, found.OnDelete, err))
		case found.OnDelete == volume.OnDeleteDelete && hasVersions(ctx, v.b):
			return fault.Errorf(fault.Precondition, "volume %s: its objects are deleted, but versions of them keep %s from being deleted: to delete versions too, "+
				"set the bucket's tag %s to %s: %w", v.id, v.b, records.TagOnDelete, volume.OnDeletePurge, err)
		}
	}
	return fault.Errorf(fault.Busy, "volume %s: another process still writes to %s: %w", v.id, v.b, err)
}

// stillDeleting returns an error unless the bucket's tags show that the volume is being deleted.
func (v volumeDeletion) stillDeleting(ctx context.Context) error {
	found, err := v.at.Read(ctx)
	if errors.Is(err, records.ErrNotOurs) || err == nil && !found.Is(v.id, records.StateDeleting) {
		return v.errNotDeleting()
	}
	return err
}

func (v volumeDeletion) errNotDeleting() error {
	return fault.Errorf(fault.Busy, "the tags of %s no longer say that volume %s is being deleted: another controller uses it", v.b, v.id)
}

func hasVersions(ctx context.Context, b buckets.Bucket) bool {
	out, err := b.Client.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: b.Name(), MaxKeys: aws.Int32(1), EncodingType: types.EncodingTypeUrl})
	return err == nil && len(out.Versions)+len(out.DeleteMarkers) > 0
}

// requireEmpty returns a Precondition if an object or an unfinished upload of a user is in the volume.
func (v volumeDeletion) requireEmpty(ctx context.Context) error {
	left, err := v.remover.Eraser.Look(ctx, erase.Task{Bucket: v.b, Prefix: v.id.Prefix, Except: buckets.Probes})
	if err != nil || left.Empty() {
		return err
	}
	what := "objects"
	if !left.Objects {
		what = "unfinished uploads"
	}
	return fault.Errorf(fault.Precondition, "volume %s is not empty and its onDelete is %s: remove the %s below %s/%s first",
		v.id, volume.OnDeleteRequireEmpty, what, v.b.Info.Name, v.id.Prefix)
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
