package create

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/proofs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// createPrefix creates a prefix volume:
//
//  1. once per bucket and base prefix: check that volumes can be there and be deleted, reserve the names of the base prefix
//  2. check that the prefix is empty, and write the record if there is none
//  3. if there is a record: it is the volume itself, or a tombstone that the next generation replaces, or a conflict
func (c *Creator) createPrefix(ctx context.Context, a identity.Access, r Request) (volume.ID, error) {
	b, err := c.prepareBucket(ctx, a, r)
	if err != nil {
		return volume.ID{}, err
	}
	v := creation{creator: c, b: b, r: r, segment: volume.NameSegment(r.Name)}
	id, err := v.run(ctx)
	if backend.IsNoSuchBucket(err) {
		err = c.noBucket(b, err)
	}
	return id, err
}

// prepareBucket makes the checks and reservations that are needed once per bucket and base prefix.
func (c *Creator) prepareBucket(ctx context.Context, a identity.Access, r Request) (buckets.Bucket, error) {
	params := r.Parameters
	b, err := c.Opener.Open(ctx, a.Backend, a.Keys, params.BucketName, params.Node.ExpectedBucketOwner)
	if err != nil {
		if fault.Is(err, fault.NotFound) {
			err = fault.Errorf(fault.Precondition, "parameters.bucketName: bucket %s must exist: %w", params.BucketName, err)
		}
		return buckets.Bucket{}, err
	}
	if err := c.checkDeletable(ctx, b, params); err != nil {
		return buckets.Bucket{}, err
	}
	if err := c.NotBucketVolume(ctx, b); err != nil {
		return buckets.Bucket{}, err
	}
	if err := c.Proofs.Prefix(ctx, b, proofs.Subject{Who: a.Who, Bucket: b.Info.Name, Prefix: params.VolumePrefix(r.Name, 1), Parameters: params}); err != nil {
		return buckets.Bucket{}, err
	}
	if _, err := c.Opener.Conditional(ctx, b); err != nil {
		return buckets.Bucket{}, err
	}
	return b, c.reserveBase(ctx, b, params.Prefix, volume.NameSegment(r.Name))
}

// checkDeletable refuses volumes that DeleteVolume could not delete according to onDelete.
func (c *Creator) checkDeletable(ctx context.Context, b buckets.Bucket, params volume.Parameters) error {
	// DeleteVolume does not get the parameters. It expects the backend's owner.
	if params.Node.ExpectedBucketOwner != "" && params.Node.ExpectedBucketOwner != b.Backend.ExpectedBucketOwner {
		if _, err := c.Service.Validate(ctx, b.Backend, b.Keys, backend.BucketInfo{Name: params.BucketName}); err != nil {
			if fault.Is(err, fault.Denied) {
				return fault.Errorf(fault.Precondition, "parameters.expectedBucketOwner: the volume could be created but not deleted, because "+
					"DeleteVolume does not get this parameter: set expectedBucketOwner on %s: %w", b.Backend, err)
			}
			return err
		}
	}
	if params.OnDelete != volume.OnDeletePurge {
		return nil
	}
	versioning, err := c.Service.Versioning(ctx, b.Backend, b.Keys, b.Info)
	if err != nil {
		return err
	}
	why, err := buckets.Unpurgeable(ctx, c.Service, b, versioning)
	if err == nil && why != "" {
		err = fault.Errorf(fault.Precondition, "parameters.onDelete: purge cannot work in %s: %s", b, why)
	}
	return err
}

// creation is one CreateVolume of a prefix volume.
type creation struct {
	creator *Creator
	b       buckets.Bucket
	r       Request
	segment string
}

func (c *creation) run(ctx context.Context) (id volume.ID, err error) {
	first := c.r.Parameters.ID(c.r.Name, 1)
	empty, err := c.isFree(ctx, first.Prefix)
	if err != nil {
		return volume.ID{}, err
	}
	// A record is read first if a new volume must pass a check, which an existing one need not.
	written := empty && c.r.Check == nil
	if written {
		if err := c.write(ctx, first, records.Stored{}); !errors.Is(err, records.ErrChanged) {
			return first, err
		}
	}
	at := c.creator.Records.OfName(c.b, c.segment)
	err = records.Repeat(at.What, func() error {
		found, err := at.Read(ctx)
		switch missing := fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err); {
		case missing && !empty:
			return c.errUnexplained(first)
		case missing && written:
			return fault.Errorf(fault.Busy, "the record of volume %q in %s appeared and disappeared: retry", c.r.Name, c.b)
		case missing:
			written, id = true, first
			return c.write(ctx, first, records.Stored{})
		case err != nil:
			return err
		}
		id, err = c.createBeside(ctx, found)
		return err
	})
	return id, err
}

// createBeside returns the id of the volume with that record, or creates the next generation in place of a deleted one.
func (c *creation) createBeside(ctx context.Context, found records.Stored) (volume.ID, error) {
	next, err := c.decideCreate(found.Record)
	if err != nil {
		return volume.ID{}, err
	}
	id := c.r.Parameters.ID(c.r.Name, found.Generation)
	if !next {
		if found.VolumeID != id.String() {
			err = fault.Errorf(fault.Exists, "the record of volume %q in %s names %s instead of %s: it was not written for these parameters",
				c.r.Name, c.b, found.VolumeID, id)
		}
		return id, err
	}
	id = c.r.Parameters.ID(c.r.Name, found.Generation+1)
	empty, err := c.isFree(ctx, id.Prefix)
	switch {
	case err != nil:
		return volume.ID{}, err
	case empty:
		return id, c.write(ctx, id, found)
	}
	// Another controller may have created that generation just now, and a pod may have written to it.
	again, err := c.creator.Records.Read(ctx, c.b, c.segment)
	switch {
	case err != nil:
		return volume.ID{}, err
	case again.ETag == found.ETag:
		return volume.ID{}, c.errUnexplained(id)
	}
	return volume.ID{}, records.ErrChanged
}

// isFree reports whether deleting the volume would delete nothing that existed before it: one request. Deleted objects can be restored
// from their versions, and a purge would delete those.
func (c *creation) isFree(ctx context.Context, prefix string) (bool, error) {
	if c.r.Parameters.OnDelete == volume.OnDeletePurge {
		versioning, err := c.creator.Service.Versioning(ctx, c.b.Backend, c.b.Keys, c.b.Info) // cached since checkDeletable
		if err != nil {
			return false, err
		}
		if versioning.Enabled || versioning.Suspended {
			return buckets.IsUnused(ctx, c.b, prefix)
		}
	}
	return buckets.IsEmpty(ctx, c.b, prefix)
}

func (c *creation) errUnexplained(id volume.ID) error {
	return fault.Errorf(fault.Exists, "there is data below %q in %s without a record of this driver: it is not adopted; move it, or use it as a static "+
		"volume", id.Prefix, c.b)
}

// write writes the record of a new generation, if there is none or a tombstone.
func (c *creation) write(ctx context.Context, id volume.ID, over records.Stored) error {
	if err := c.r.check(ctx); err != nil {
		return err
	}
	r := c.creator.Records.New(c.r.Name, id, c.r.Parameters)
	r.Options = backend.RequestOptions(c.r.Options)
	if over.ETag != "" {
		r.FirstPrefix, r.PreviousVolumeID = over.FirstPrefix, over.VolumeID
	}
	_, err := c.creator.Records.OfName(c.b, c.segment).Write(ctx, records.Stored{Record: r, ETag: over.ETag})
	return err
}

// decideCreate decides what a record means for the creation. nil: it is the volume itself or, with next, a tombstone that the next
// generation may replace.
func (c *creation) decideCreate(r records.Record) (next bool, err error) {
	name, owner := c.r.Name, c.creator.Records.Owner
	switch {
	case r.State == records.StateReserved:
		return false, fault.Errorf(fault.Exists, "the name %q is a directory of a base prefix (parameters.prefix) of other volumes in this bucket, "+
			"which would then be inside this volume: choose another name, or another bucket", name)
	case r.State == records.StateDeleted:
		// The owner does not matter: nothing is left of the volume, and deleting it again does not reach the next generation.
		if r.Generation >= volume.MaxGeneration {
			return false, fault.Errorf(fault.Exhausted, "the volume name %q was used %d times in this bucket, which is the limit: choose another name",
				name, r.Generation)
		}
		return true, nil
	case r.Owner() != owner:
		return false, fault.Errorf(fault.Exists, "the volume name %q is taken in this bucket by %s (%s); this is %s", name, r.Owner(), r.VolumeID, owner)
	case r.Name != name:
		return false, fault.Errorf(fault.Exists, "the volume names %q and %q have the same prefix, and the first one uses it (%s): choose another name",
			r.Name, name, r.VolumeID)
	case r.State == records.StateDeleting:
		return false, fault.Errorf(fault.Busy, "%w", &DeletingError{r.VolumeID})
	case r.ParametersDigest != c.r.Parameters.Digest():
		return false, fault.Errorf(fault.Exists, "volume %q exists (%s) with other parameters", name, r.VolumeID)
	}
	return false, nil
}
