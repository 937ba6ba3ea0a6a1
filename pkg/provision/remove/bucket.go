package remove

import (
	"context"
	"maps"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// bucketVolume is a volume that is a whole bucket. Its tags are the record.
type bucketVolume struct {
	*Remover
	be backend.Backend
	id volume.ID
}

// find returns what deletes the volume, or nil if there is nothing to delete. An error is a refusal.
func (v bucketVolume) find(ctx context.Context, keys credentials.Keys) (job, error) {
	b, have, err := v.openWithTags(ctx, keys)
	if bucketIsGone(err) {
		v.Opener.Invalidate(v.be, v.id.Bucket)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if have.Of(v.Records.Owner, v.id) {
		if have[records.TagState] == string(records.StateDeleted) {
			return nil, nil // retained
		}
		// Writes of tags are not conditional, so the deletion reads them again.
		return v.remove, nil
	}
	err = v.unowned(ctx, b)
	if bucketIsGone(err) {
		v.Opener.Invalidate(v.be, v.id.Bucket)
		return nil, nil
	}
	return nil, err
}

// unowned refuses a bucket without the volume's tags, unless it is empty.
func (v bucketVolume) unowned(ctx context.Context, b buckets.Bucket) error {
	empty, err := buckets.IsEmpty(ctx, b, "")
	if err == nil && !empty {
		err = fault.Errorf(fault.Precondition, "volume %s: %s contains data, but its tags do not show that %s created it for this volume: nothing is deleted; "+
			"delete the bucket by hand if it is unused, or remove the volume without deleting it (in Kubernetes: reclaim policy Retain)", v.id, b, v.Records.Owner)
	}
	return err
}

func (v bucketVolume) openWithTags(ctx context.Context, keys credentials.Keys) (buckets.Bucket, records.Tags, error) {
	b, err := v.Opener.OpenUncached(ctx, v.be, keys, v.id.Bucket)
	if err != nil {
		return buckets.Bucket{}, nil, err
	}
	have, err := records.ReadTags(ctx, b.Client, v.id.Bucket)
	return b, have, err
}

// lookup implements Lookup.
func (v bucketVolume) lookup(ctx context.Context, keys credentials.Keys) error {
	_, have, err := v.openWithTags(ctx, keys)
	switch {
	case bucketIsGone(err):
		v.Opener.Invalidate(v.be, v.id.Bucket)
		return err
	case err != nil:
		return err
	case !have.Of(v.Records.Owner, v.id) || have[records.TagState] != string(records.StateActive):
		return fault.Errorf(fault.NotFound, "there is no volume %s of %s", v.id, v.Records.Owner)
	}
	return nil
}

// lookupPlace implements LookupPlace.
func (v bucketVolume) lookupPlace(ctx context.Context, keys credentials.Keys) error {
	b, err := v.Opener.OpenUncached(ctx, v.be, keys, v.id.Bucket)
	if err != nil {
		return err
	}
	// Who may mount a bucket may not be allowed to read its tags.
	have, err := records.ReadTags(ctx, b.Client, v.id.Bucket)
	if err == nil && v.isDeleting(have) {
		return fault.Errorf(fault.NotFound, "volume %s of %s is being deleted", v.id, v.Records.Owner)
	}
	return nil
}

// remove deletes the volume, in any state that an earlier attempt left.
func (v bucketVolume) remove(ctx context.Context, d *deletion) error {
	release, err := v.Opener.Lock(ctx, v.be, v.id.Bucket)
	if err != nil {
		return err
	}
	defer release()
	err = v.removeLocked(ctx, d)
	if err == nil || bucketIsGone(err) {
		v.Opener.Invalidate(v.be, v.id.Bucket)
		return nil
	}
	return err
}

func (v bucketVolume) removeLocked(ctx context.Context, d *deletion) error {
	b, err := v.openToDelete(ctx, v.be, d, volumeTarget(v.id))
	if err != nil {
		return err
	}
	have, err := records.ReadTags(ctx, b.Client, v.id.Bucket)
	switch {
	case err != nil:
		return err
	case !have.Of(v.Records.Owner, v.id):
		return v.unowned(ctx, b)
	case have[records.TagState] == string(records.StateDeleted):
		return nil
	}
	if d.hasWorker() && !v.isDeleting(have) {
		return v.errNotDeleting(b) // the volume was created again before this deletion got its worker
	}
	if d.unfilled && have[records.TagState] == string(records.StateActive) {
		return errFilled(v.id)
	}
	onDelete := volume.OnDelete(have[records.TagOnDelete])
	if have[records.TagState] == string(records.StateFilling) && onDelete != volume.OnDeletePurge {
		onDelete = volume.OnDeleteDelete // nothing in it is a user's
		have = maps.Clone(have)
		have[records.TagOnDelete] = string(onDelete)
	}
	switch onDelete {
	case volume.OnDeleteRetain:
		return records.SetState(ctx, b, have, records.StateDeleted)
	case volume.OnDeleteRequireEmpty:
		if err := v.requireEmpty(ctx, b, v.id); err != nil {
			return reactivate(ctx, b, have, err)
		}
	case volume.OnDeleteDelete, volume.OnDeletePurge:
	default:
		return fault.Errorf(fault.Precondition, "tag %s of %s is %q: set it to delete, purge, retain or requireEmpty", records.TagOnDelete, b, onDelete)
	}
	if have[records.TagState] != string(records.StateDeleting) {
		if err := records.SetState(ctx, b, have, records.StateDeleting); err != nil {
			return err
		}
	}
	if onDelete == volume.OnDeleteRequireEmpty {
		if err := v.requireEmpty(ctx, b, v.id); err != nil {
			return reactivate(ctx, b, have, err)
		}
		err := dropBucket(ctx, b, v.id)
		if backend.ErrorCode(err) == "BucketNotEmpty" {
			return reactivate(ctx, b, have, fault.Errorf(fault.Precondition, "volume %s is not empty and its onDelete is %s: remove the objects, or versions of objects, that are left: %w", v.id, onDelete, err))
		}
		return err
	}
	return v.emptyAndDrop(ctx, b, d, onDelete)
}

// reactivate makes a volume usable again whose deletion failed with err.
func reactivate(ctx context.Context, b buckets.Bucket, have records.Tags, err error) error {
	if !fault.Is(err, fault.Precondition) {
		return err
	}
	if stateErr := records.SetState(ctx, b, have, records.StateActive); stateErr != nil {
		return fault.Errorf(fault.Busy, "%w; making the volume usable again: %w", err, stateErr)
	}
	return err
}

// emptyAndDrop removes all that is in the bucket, then the bucket.
//
// A bucket's name has no generations. So each upload, each page and the bucket itself are deleted only while the tags show that
// this volume is being deleted: a delayed deletion stops if the volume was created again. A race between that check and the
// following request remains.
func (v bucketVolume) emptyAndDrop(ctx context.Context, b buckets.Bucket, d *deletion, onDelete volume.OnDelete) error {
	still := func(ctx context.Context) error {
		have, err := records.ReadTags(ctx, b.Client, b.Info.Name)
		if err == nil && !v.isDeleting(have) {
			err = v.errNotDeleting(b)
		}
		return err
	}
	task := erase.Task{Bucket: b, Versions: onDelete == volume.OnDeletePurge, Progress: &d.progress, Still: still}
	var err error
	for range maxRaces {
		if err = v.erase(ctx, d, task); err != nil {
			return err
		}
		if err = still(ctx); err != nil {
			return err
		}
		if err = dropBucket(ctx, b, v.id); backend.ErrorCode(err) != "BucketNotEmpty" {
			return err
		}
		if onDelete == volume.OnDeleteDelete && hasVersions(ctx, b) {
			return fault.Errorf(fault.Precondition, "volume %s: its objects are deleted, but versions of them keep %s from being deleted: to delete versions too, set the bucket's tag %s to %s: %w",
				v.id, b, records.TagOnDelete, volume.OnDeletePurge, err)
		}
	}
	return fault.Errorf(fault.Busy, "volume %s: another process still writes to %s: %w", v.id, b, err)
}

// isDeleting reports whether a bucket's tags show that the volume is being deleted.
func (v bucketVolume) isDeleting(have records.Tags) bool {
	return have.Of(v.Records.Owner, v.id) && have[records.TagState] == string(records.StateDeleting)
}

func (v bucketVolume) errNotDeleting(b buckets.Bucket) error {
	return fault.Errorf(fault.Busy, "the tags of %s no longer say that volume %s is being deleted: another controller uses it", b, v.id)
}

func dropBucket(ctx context.Context, b buckets.Bucket, id volume.ID) error {
	_, err := b.Client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: b.Name()})
	return backend.Classify(err, "deleting the bucket of volume "+id.String())
}

func hasVersions(ctx context.Context, b buckets.Bucket) bool {
	out, err := b.Client.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: b.Name(), MaxKeys: aws.Int32(1), EncodingType: types.EncodingTypeUrl})
	return err == nil && len(out.Versions)+len(out.DeleteMarkers) > 0
}
