package provision

import (
	"context"
	"errors"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// maxRaces is how often a decision is made anew because a record changed meanwhile.
const maxRaces = 4

// createPrefix makes a prefix volume: one look at the place, then the record where none is.
func (p *Provisioner) createPrefix(ctx context.Context, be backend.Backend, who identity, keys credentials.Keys, r CreateRequest) (volume.ID, error) {
	pl, err := p.preparePlace(ctx, be, who, keys, r)
	if err != nil {
		return volume.ID{}, err
	}
	c := creation{p: p, pl: pl, r: r, segment: volume.NameSegment(r.Name), digest: r.Parameters.Digest()}
	id, err := c.run(ctx)
	if backend.IsNoSuchBucket(err) {
		err = p.noBucket(pl, err)
	}
	return id, err
}

// preparePlace does what has to be done once per bucket and base prefix.
func (p *Provisioner) preparePlace(ctx context.Context, be backend.Backend, who identity, keys credentials.Keys, r CreateRequest) (place, error) {
	params := r.Parameters
	pl, err := p.place(ctx, be, keys, params.BucketName, params.ExpectedBucketOwner)
	if err != nil {
		if fault.Is(err, fault.NotFound) {
			err = fault.Errorf(fault.Precondition, "parameters.bucketName: there must be a bucket %s: %w", params.BucketName, err)
		}
		return place{}, err
	}
	if err := p.deletableLater(ctx, pl, params); err != nil {
		return place{}, err
	}
	if err := p.notBucketVolume(ctx, pl); err != nil {
		return place{}, err
	}
	if err := p.proveScope(ctx, pl, who, r); err != nil {
		return place{}, err
	}
	if _, err := p.conditional(ctx, pl); err != nil {
		return place{}, err
	}
	return pl, p.reserveBase(ctx, pl, params.Prefix, volume.NameSegment(r.Name))
}

// deletableLater refuses volumes that DeleteVolume could not delete as they ask for.
func (p *Provisioner) deletableLater(ctx context.Context, pl place, params volume.Parameters) error {
	// DeleteVolume is not told the parameters, and expects the owner that the backend says.
	if params.ExpectedBucketOwner != "" && params.ExpectedBucketOwner != pl.be.ExpectedBucketOwner {
		if _, err := p.buckets.Validate(ctx, pl.be, pl.keys, params.BucketName, ""); err != nil {
			if fault.Is(err, fault.Denied) {
				return fault.Errorf(fault.Precondition, "parameters.expectedBucketOwner: the volume could be made but not deleted, because DeleteVolume does not know this parameter: set expectedBucketOwner on %s: %w", pl.be, err)
			}
			return err
		}
	}
	if params.OnDelete != volume.OnDeletePurge {
		return nil
	}
	versioning, err := p.buckets.Versioning(ctx, pl.be, pl.keys, pl.info)
	if err != nil {
		return err
	}
	if versioning.MFADelete {
		return fault.Errorf(fault.Precondition, "parameters.onDelete: purge cannot work in %s: its versions can only be deleted with MFA. Use onDelete: delete, which leaves versions", pl)
	}
	retention, err := p.buckets.Retention(ctx, pl.be, pl.keys, pl.info)
	if err != nil {
		return err
	}
	if retention.Mode != "" {
		return fault.Errorf(fault.Precondition, "parameters.onDelete: purge cannot work in %s: its object lock keeps every version (%s, %d days, %d years by default), and this driver bypasses no retention. Use onDelete: delete, which leaves versions",
			pl, retention.Mode, retention.Days, retention.Years)
	}
	return nil
}

// creation is one CreateVolume of a prefix volume.
type creation struct {
	p       *Provisioner
	pl      place
	r       CreateRequest
	segment string
	digest  string
}

func (c *creation) run(ctx context.Context) (volume.ID, error) {
	id := c.r.Parameters.ID(c.r.Name, 1)
	empty, err := c.isFree(ctx, id.Prefix)
	if err != nil {
		return volume.ID{}, err
	}
	if empty {
		if err := c.write(ctx, id, stored{}); !errors.Is(err, errLost) {
			return id, err
		}
	}
	for range maxRaces {
		found, err := c.p.readRecord(ctx, c.pl, c.segment)
		switch {
		case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
			if empty {
				return volume.ID{}, fault.Errorf(fault.Busy, "the record of volume %q in %s came and went", c.r.Name, c.pl)
			}
			return volume.ID{}, c.unexplained(id)
		case err != nil:
			return volume.ID{}, err
		}
		next, err := c.p.decideCreate(found.record, c.r.Name, c.digest)
		if err != nil {
			return volume.ID{}, err
		}
		id = c.r.Parameters.ID(c.r.Name, found.Generation)
		if !next {
			if found.VolumeID != id.String() {
				return volume.ID{}, fault.Errorf(fault.Exists, "the record of volume %q in %s says %s where %s is expected: it was not written for these parameters", c.r.Name, c.pl, found.VolumeID, id)
			}
			return id, nil
		}
		id = c.r.Parameters.ID(c.r.Name, found.Generation+1)
		if empty, err = c.isFree(ctx, id.Prefix); err != nil {
			return volume.ID{}, err
		}
		if !empty {
			// Another controller may have made that generation, and a pod may have written to it, just now.
			again, err := c.p.readRecord(ctx, c.pl, c.segment)
			if err == nil && again.etag == found.etag {
				err = c.unexplained(id)
			}
			if err != nil {
				return volume.ID{}, err
			}
			continue
		}
		if err := c.write(ctx, id, found); !errors.Is(err, errLost) {
			return id, err
		}
	}
	return volume.ID{}, fault.Errorf(fault.Busy, "the record of volume %q in %s keeps changing: other controllers work on the same name", c.r.Name, c.pl)
}

// isFree tells whether the volume's end would take nothing along that was there before it: one request. Versions of objects that
// somebody deleted can be brought back, and a purge would take them.
func (c *creation) isFree(ctx context.Context, prefix string) (bool, error) {
	if c.r.Parameters.OnDelete == volume.OnDeletePurge {
		versioning, err := c.p.buckets.Versioning(ctx, c.pl.be, c.pl.keys, c.pl.info) // remembered by deletableLater
		if err != nil {
			return false, err
		}
		if versioning.Enabled || versioning.Suspended {
			return isUnused(ctx, c.pl, prefix)
		}
	}
	return isEmpty(ctx, c.pl, prefix)
}

func (c *creation) unexplained(id volume.ID) error {
	return fault.Errorf(fault.Exists, "below %q in %s there is data that no record of this driver explains: it is not taken over; move it away, or use it as a static volume", id.Prefix, c.pl)
}

// write writes the record of a new generation, where there is none or over a tombstone.
func (c *creation) write(ctx context.Context, id volume.ID, over stored) error {
	r := c.p.newRecord(c.r, id, c.digest, c.p.now().UTC())
	if over.etag != "" {
		r.FirstPrefix, r.PreviousVolumeID = over.FirstPrefix, over.VolumeID
	}
	return c.p.writeRecord(ctx, c.pl, c.segment, over.etag, r)
}

func (p *Provisioner) newRecord(r CreateRequest, id volume.ID, digest string, now time.Time) record {
	_, generation, _ := id.NameSegment()
	return record{
		Version: recordVersion, Driver: p.owner.driver, Cluster: p.owner.cluster, Name: r.Name, VolumeID: id.String(),
		ParametersDigest: digest, OnDelete: r.Parameters.OnDelete, State: stateActive, Generation: generation, FirstPrefix: id.Prefix,
		Created: now, Updated: now,
	}
}

// decideCreate decides what a record means for a CreateVolume of that name and digest: nil is either the volume itself or, with
// next, a tombstone after which the next generation may come.
func (p *Provisioner) decideCreate(r record, name, digest string) (next bool, err error) {
	switch {
	case r.State == stateBase:
		return false, fault.Errorf(fault.Exists, "the name %q is a directory of a base prefix (parameters.prefix) of other volumes in this bucket, which would then lie inside this volume: choose another name, or another bucket", name)
	case r.State == stateDeleted:
		// Whoever's it was: nothing is left of it, and nobody who deletes it reaches the next generation.
		if r.Generation >= volume.MaxGeneration {
			return false, fault.Errorf(fault.Exhausted, "the volume name %q was used %d times in this bucket, which is as often as it can be: choose another name", name, r.Generation)
		}
		return true, nil
	case r.owner() != p.owner:
		return false, fault.Errorf(fault.Exists, "the volume name %q is taken in this bucket by %s (%s); this is %s", name, r.owner(), r.VolumeID, p.owner)
	case r.Name != name:
		return false, fault.Errorf(fault.Exists, "the volume names %q and %q lead to the same prefix, and the first one has it (%s): choose another name", r.Name, name, r.VolumeID)
	case r.State == stateDeleting:
		return false, fault.Errorf(fault.Busy, "volume %s of that name is being deleted", r.VolumeID)
	case r.ParametersDigest != digest:
		return false, fault.Errorf(fault.Exists, "volume %q is there (%s) and was made with other parameters", name, r.VolumeID)
	}
	return false, nil
}
