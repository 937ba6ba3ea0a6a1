package provision

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// findBucket finds out whether there is a bucket volume to delete: its state, or stateGone. An error is a refusal.
func (p *Provisioner) findBucket(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) (state, error) {
	pl, have, err := p.placeAndTags(ctx, be, keys, id)
	if bucketIsGone(err) {
		p.forget(be, id.Bucket)
		return stateGone, nil
	}
	if err != nil {
		return stateGone, err
	}
	if have.of(p.owner, id) {
		switch s := state(have[tagState]); s {
		case stateDeleted:
			return stateGone, nil // it was to be retained
		case stateDeleting:
			return s, nil
		default: // somebody may have taken the tag away: that makes it no less a volume
			return stateActive, nil
		}
	}
	empty, err := isEmpty(ctx, pl, "")
	switch {
	case bucketIsGone(err):
		p.forget(be, id.Bucket)
		return stateGone, nil
	case err != nil:
		return stateGone, err
	case !empty:
		return stateGone, fault.Errorf(fault.Precondition, "volume %s: there is data in %s, and its tags do not say that %s made it for this volume: nothing is deleted. "+
			"Delete the bucket by hand if nobody needs it, or set the PersistentVolume's reclaim policy to Retain", id, pl, p.owner)
	}
	return stateGone, nil
}

func (p *Provisioner) placeAndTags(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) (place, tags, error) {
	pl, err := p.placeNow(ctx, be, keys, id.Bucket)
	if err != nil {
		return place{}, nil, err
	}
	have, err := readTags(ctx, pl.client, id.Bucket)
	return pl, have, err
}

// lookBucket is Lookup for a bucket volume.
func (p *Provisioner) lookBucket(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) error {
	_, have, err := p.placeAndTags(ctx, be, keys, id)
	switch {
	case bucketIsGone(err):
		p.forget(be, id.Bucket)
		return err
	case err != nil:
		return err
	case !have.of(p.owner, id) || have[tagState] != string(stateActive):
		return fault.Errorf(fault.NotFound, "there is no volume %s of %s", id, p.owner)
	}
	return nil
}

// deleteBucket deletes a bucket volume, from whatever state an earlier attempt left it in.
func (p *Provisioner) deleteBucket(ctx context.Context, be backend.Backend, run *run, id volume.ID) error {
	release, err := p.locks.Lock(ctx, "bucket "+be.Name+" "+id.Bucket)
	if err != nil {
		return err
	}
	defer release()
	err = p.deleteBucketOnce(ctx, be, run, id)
	if err == nil || bucketIsGone(err) {
		p.forget(be, id.Bucket)
		return nil
	}
	return err
}

func (p *Provisioner) deleteBucketOnce(ctx context.Context, be backend.Backend, run *run, id volume.ID) error {
	pl, err := p.placeToDelete(ctx, be, run, id)
	if err != nil {
		return err
	}
	have, err := readTags(ctx, pl.client, id.Bucket)
	if err != nil || !have.of(p.owner, id) || have[tagState] == string(stateDeleted) {
		return err
	}
	onDelete := volume.OnDelete(have[tagOnDelete])
	switch onDelete {
	case volume.OnDeleteRetain:
		return setState(ctx, pl, have, stateDeleted)
	case volume.OnDeleteRequireEmpty:
		if err := p.requireEmpty(ctx, pl, id); err != nil {
			return p.stillActive(ctx, pl, have, err)
		}
	case volume.OnDeleteDelete, volume.OnDeletePurge:
	default:
		return fault.Errorf(fault.Precondition, "the tag %s of %s is %q, which says nothing about what to delete: set it to delete, purge, retain or requireEmpty", tagOnDelete, pl, onDelete)
	}
	if have[tagState] != string(stateDeleting) {
		if err := setState(ctx, pl, have, stateDeleting); err != nil {
			return err
		}
	}
	if onDelete == volume.OnDeleteRequireEmpty {
		if err := p.requireEmpty(ctx, pl, id); err != nil {
			return p.stillActive(ctx, pl, have, err)
		}
		err := p.dropBucket(ctx, pl, id)
		if backend.ErrorCode(err) == "BucketNotEmpty" {
			return p.stillActive(ctx, pl, have, fault.Errorf(fault.Precondition, "volume %s is not empty and its onDelete is %s: objects, or versions of objects, are left in it: %w", id, onDelete, err))
		}
		return err
	}
	return p.emptyAndDrop(ctx, pl, run, id, onDelete)
}

// stillActive makes a volume usable again that is not to be deleted because of err.
func (p *Provisioner) stillActive(ctx context.Context, pl place, have tags, err error) error {
	if !fault.Is(err, fault.Precondition) {
		return err
	}
	if stateErr := setState(ctx, pl, have, stateActive); stateErr != nil {
		return fault.Errorf(fault.Busy, "%w; making the volume usable again: %w", err, stateErr)
	}
	return err
}

// emptyAndDrop removes all that is in the bucket, then the bucket.
//
// A bucket's name has no generations. So each upload, each page and the bucket itself are only deleted while the tags still say that this
// volume is being deleted: a deleter that was held up stops where somebody made the volume anew. What is left is the moment
// between that look and the request behind it.
func (p *Provisioner) emptyAndDrop(ctx context.Context, pl place, run *run, id volume.ID, onDelete volume.OnDelete) error {
	still := func(ctx context.Context) error {
		have, err := readTags(ctx, pl.client, pl.info.Name)
		if err == nil && !(have.of(p.owner, id) && have[tagState] == string(stateDeleting)) {
			err = fault.Errorf(fault.Busy, "the tags of %s no longer say that volume %s is being deleted: another controller works on it", pl, id)
		}
		return err
	}
	e := eraser{p: p, pl: pl, versions: onDelete == volume.OnDeletePurge, progress: &run.progress, still: still}
	var err error
	for range maxRaces {
		if err = e.erase(ctx); err != nil {
			return err
		}
		if err = still(ctx); err != nil {
			return err
		}
		if err = p.dropBucket(ctx, pl, id); backend.ErrorCode(err) != "BucketNotEmpty" {
			return err
		}
		if onDelete == volume.OnDeleteDelete && hasVersions(ctx, pl) {
			return fault.Errorf(fault.Precondition, "volume %s: its objects are deleted, but versions of them are left in %s, so that the bucket cannot be: to have versions deleted too, set the bucket's tag %s to %s: %w",
				id, pl, tagOnDelete, volume.OnDeletePurge, err)
		}
	}
	return fault.Errorf(fault.Busy, "volume %s: something still writes to %s: %w", id, pl, err)
}

func (p *Provisioner) dropBucket(ctx context.Context, pl place, id volume.ID) error {
	_, err := pl.client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: pl.bucket()})
	return backend.Classify(err, "deleting the bucket of volume "+id.String())
}

func hasVersions(ctx context.Context, pl place) bool {
	out, err := pl.client.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: pl.bucket(), MaxKeys: aws.Int32(1)})
	return err == nil && len(out.Versions)+len(out.DeleteMarkers) > 0
}
