package create

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Volumes must not be nested: deleting the outer one would delete the inner one too.
//
// A volume's prefix is <base><segment>/ or, from generation 2 on, <base><segment>@<n>/. If volume V contains volume W, V's
// prefix is W's base prefix or an ancestor of it, because segments contain no "/" and two volumes with the same prefix would have
// the same record. Base prefixes contain no "@", so V is of generation 1 and its segment is a directory name of W's base.
//
// So, before a base prefix is used, every directory name of it that can be a segment gets a reservation: a record
// that is written if there is none. It reserves the name permanently, in every directory. The same conditional
// write decides the race between the reservation and a volume of that name: the loser sees the winner's record.
//
// An existing record is harmless unless that name's generation 1 contains the base: any further volume of that name has
// generation 2 or more. A tombstone counts like a volume: a delayed deletion of generation 1 may still run, and would find W's data
// in its prefix. That is why records keep their first prefix.
//
// A volume whose own segment is a directory name of its base ("${pv.name}/") takes that name by its own record instead.

// baseTTL is how long a reservation is cached, in case the bucket is emptied by other means.
const baseTTL = time.Hour

// reserveBase ensures that no volume contains or will contain the base prefix of the volume with that segment. If it is cached, it sends no
// requests.
func (c *Creator) reserveBase(ctx context.Context, b buckets.Bucket, base, segment string) error {
	names := reservedNames(base)
	all := !slices.Contains(names, segment)
	if len(names) == 0 {
		return nil
	}
	reserve := func(ctx context.Context) error {
		for _, name := range names {
			if name == segment {
				continue
			}
			if err := c.reserveName(ctx, b, base, name); err != nil {
				return err
			}
		}
		return nil
	}
	if !all {
		return reserve(ctx)
	}
	return c.Opener.Once(ctx, b, "the reservation of base prefix "+base, baseTTL, reserve)
}

// reservedNames are the directory names of a base prefix that can be segments of volume names.
func reservedNames(base string) []string {
	var names []string
	seen := map[string]bool{}
	for name := range strings.SplitSeq(strings.TrimSuffix(base, "/"), "/") {
		// A hashed segment is no name's own segment, but it can be another name's.
		if _, _, ok := (volume.ID{Prefix: name + "/"}).NameSegment(); ok && !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}

func (c *Creator) reserveName(ctx context.Context, b buckets.Bucket, base, name string) error {
	_, err := records.Update(ctx, c.Records.OfName(b, name), func(found records.Stored, err error) (*records.Stored, error) {
		switch {
		case err == nil:
			return nil, aroundBase(found.Record, base, b)
		case !fault.Is(err, fault.NotFound):
			return nil, err
		case backend.IsNoSuchBucket(err):
			return nil, c.noBucket(b, err)
		}
		return &records.Stored{Record: c.Records.NewReservation(name)}, nil
	})
	return err
}

// aroundBase refuses a record of a volume that contains, or contained, the base prefix.
func aroundBase(r records.Record, base string, b buckets.Bucket) error {
	if r.State == records.StateReserved || !strings.HasPrefix(base, r.FirstPrefix) {
		return nil
	}
	if r.State == records.StateDeleted || r.Generation > 1 {
		return fault.Errorf(fault.Precondition, "parameters.prefix: the base prefix %q in %s lies inside %q, where volume %q was before it was deleted: "+
			"choose another prefix, because an interrupted deletion might continue there",
			base, b, r.FirstPrefix, r.Name)
	}
	return fault.Errorf(fault.Precondition, "parameters.prefix: the base prefix %q in %s lies inside volume %q (%s): volumes cannot be nested, choose "+
		"another prefix", base, b, r.Name, r.VolumeID)
}

// noBucket is the error for a bucket that existed a moment ago.
func (c *Creator) noBucket(b buckets.Bucket, err error) error {
	c.Opener.Invalidate(b.Backend, b.Info.Name)
	return fault.Errorf(fault.Precondition, "parameters.bucketName: %s does not exist: %w", b, err)
}
