package provision

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// findPrefix finds out whether there is something to delete: the volume's state, or stateGone. An error is a refusal.
func (p *Provisioner) findPrefix(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) (state, error) {
	pl, err := p.placeNow(ctx, be, keys, id.Bucket)
	if err == nil {
		var found stored
		found, err = p.ownRecord(ctx, pl, id)
		if err == nil {
			if found.State == stateDeleted || found.VolumeID != id.String() {
				return stateGone, nil
			}
			return found.State, nil
		}
		if errors.Is(err, errNotOurs) {
			var empty bool
			if empty, err = isEmpty(ctx, pl, id.Prefix); err == nil && !empty {
				return stateGone, fault.Errorf(fault.Precondition, "volume %s: there is data below %q in %s, and no record says that %s made this volume: nothing is deleted. "+
					"Delete the data by hand if nobody needs it, or set the PersistentVolume's reclaim policy to Retain", id, id.Prefix, pl, p.owner)
			}
		}
	}
	if bucketIsGone(err) {
		return stateGone, p.goneWith(be, id, err)
	}
	return stateGone, err
}

// placeNow is place where an absent bucket ends a volume: that there was none a moment ago is no proof.
func (p *Provisioner) placeNow(ctx context.Context, be backend.Backend, keys credentials.Keys, bucket string) (place, error) {
	pl, err := p.place(ctx, be, keys, bucket, "")
	if bucketIsGone(err) {
		p.forget(be, bucket)
		pl, err = p.place(ctx, be, keys, bucket, "")
	}
	return pl, err
}

// goneWith is the end of a prefix volume whose bucket is gone: nil, unless the bucket may be there under its own name.
func (p *Provisioner) goneWith(be backend.Backend, id volume.ID, err error) error {
	p.forget(be, id.Bucket)
	if kind, nameErr := volume.ValidateBucketName(id.Bucket); nameErr == nil && kind == volume.BucketAccessPoint {
		return fault.Errorf(fault.Precondition, "volume %s: the access point is gone, and what is in its bucket may be there: nothing is deleted. "+
			"Make the access point again, or delete the data by hand and set the PersistentVolume's reclaim policy to Retain: %w", id, err)
	}
	return nil
}

// bucketIsGone tells whether the service said that there is no such bucket.
func bucketIsGone(err error) bool { return fault.Is(err, fault.NotFound) }

// errNotOurs says that no record of this owner is for exactly that id.
var errNotOurs = errors.New("no record of this driver")

// ownRecord reads the record of exactly that id, made by this owner, or that of a later generation, which proves that this one
// was deleted. errNotOurs: there is neither. NotFound: there is no bucket.
func (p *Provisioner) ownRecord(ctx context.Context, pl place, id volume.ID) (stored, error) {
	segment, _, ok := id.NameSegment()
	if !ok {
		return stored{}, errNotOurs
	}
	found, err := p.readRecord(ctx, pl, segment)
	switch {
	case backend.IsNoSuchBucket(err):
		return stored{}, err
	case fault.Is(err, fault.NotFound):
		return stored{}, errNotOurs
	case err != nil:
		return stored{}, err
	case found.outlived(id):
		return found, nil
	case found.State == stateBase || found.owner() != p.owner || found.VolumeID != id.String():
		return stored{}, errNotOurs
	}
	return found, nil
}

// lookPrefix is Lookup for a prefix volume.
func (p *Provisioner) lookPrefix(ctx context.Context, be backend.Backend, keys credentials.Keys, id volume.ID) error {
	pl, err := p.place(ctx, be, keys, id.Bucket, "")
	if err != nil {
		return err
	}
	found, err := p.ownRecord(ctx, pl, id)
	switch {
	case errors.Is(err, errNotOurs), err == nil && (found.State != stateActive || found.VolumeID != id.String()):
		return fault.Errorf(fault.NotFound, "there is no volume %s of %s", id, p.owner)
	case bucketIsGone(err):
		p.forget(be, id.Bucket)
	}
	return err
}

// deletePrefix deletes a prefix volume, from whatever state an earlier attempt left it in. The tombstone comes last: until it is
// there, every attempt begins anew and does what is left.
func (p *Provisioner) deletePrefix(ctx context.Context, be backend.Backend, run *run, id volume.ID) error {
	err := p.deletePrefixIn(ctx, be, run, id)
	if bucketIsGone(err) {
		return p.goneWith(be, id, err)
	}
	return err
}

func (p *Provisioner) deletePrefixIn(ctx context.Context, be backend.Backend, run *run, id volume.ID) error {
	pl, err := p.placeToDelete(ctx, be, run, id)
	if err != nil {
		return err
	}
	segment, _, _ := id.NameSegment()
	for range maxRaces {
		found, err := p.ownRecord(ctx, pl, id)
		switch {
		case errors.Is(err, errNotOurs): // another process deleted it, and its name went on
			return nil
		case err != nil:
			return err
		case found.State == stateDeleted, found.VolumeID != id.String():
			return nil
		}
		if found.State == stateActive && found.OnDelete != volume.OnDeleteRetain {
			if found.OnDelete == volume.OnDeleteRequireEmpty {
				if err := p.requireEmpty(ctx, pl, id); err != nil {
					return err
				}
			}
			// Read again afterwards: the tag of what is there now is needed for the next write.
			if err := p.writeRecord(ctx, pl, segment, found.etag, found.with(stateDeleting, p.now().UTC())); err != nil && !errors.Is(err, errLost) {
				return err
			}
			continue
		}
		if err := p.removeData(ctx, pl, run, id, segment, found); err != nil {
			return err
		}
		err = p.writeRecord(ctx, pl, segment, found.etag, found.with(stateDeleted, p.now().UTC()))
		if !errors.Is(err, errLost) {
			return err
		}
	}
	return fault.Errorf(fault.Busy, "the record of volume %s keeps changing: another controller works on it", id)
}

// removeData does what onDelete says with the data of a volume that is being deleted.
func (p *Provisioner) removeData(ctx context.Context, pl place, run *run, id volume.ID, segment string, found stored) error {
	switch found.OnDelete {
	case volume.OnDeleteRetain:
		return nil
	case volume.OnDeleteRequireEmpty:
		// Somebody may have written between the first look and the change of state.
		notEmpty := p.requireEmpty(ctx, pl, id)
		if !fault.Is(notEmpty, fault.Precondition) {
			return notEmpty
		}
		if err := p.writeRecord(ctx, pl, segment, found.etag, found.with(stateActive, p.now().UTC())); err != nil {
			return fault.Errorf(fault.Busy, "%w; making the volume usable again: %w", notEmpty, err)
		}
		return notEmpty
	}
	e := eraser{p: p, pl: pl, prefix: id.Prefix, versions: found.OnDelete == volume.OnDeletePurge, progress: &run.progress}
	return e.erase(ctx)
}

var errStop = errors.New("stop")

// requireEmpty is a Precondition where an object or an unfinished upload is below the volume's prefix.
func (p *Provisioner) requireEmpty(ctx context.Context, pl place, id volume.ID) error {
	empty, err := isEmpty(ctx, pl, id.Prefix)
	if err != nil {
		return err
	}
	left := "objects"
	if empty {
		err := p.uploadsBelow(ctx, pl, id.Prefix, func(string, string) error { return errStop })
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, errStop):
			return backend.Classify(err, "listing unfinished uploads below "+pl.info.Name+"/"+id.Prefix)
		}
		left = "unfinished uploads"
	}
	return fault.Errorf(fault.Precondition, "volume %s is not empty and its onDelete is %s: remove the %s below %s/%s first", id, volume.OnDeleteRequireEmpty, left, pl.info.Name, id.Prefix)
}
