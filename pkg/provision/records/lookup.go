package records

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// ReadActive reads the record or the tags of a volume that this driver created and does not delete. NotFound: there is none.
func (s *Store) ReadActive(ctx context.Context, b buckets.Bucket, id volume.ID) (Stored, error) {
	found, err := s.ReadOwn(ctx, b, id)
	switch {
	case errors.Is(err, ErrNotOurs), err == nil && !found.Is(id, StateActive):
		return Stored{}, fault.Errorf(fault.NotFound, "there is no volume %s of %s", id, s.Owner)
	case fault.Is(err, fault.NotFound):
		s.opener.Invalidate(b.Backend, id.Bucket)
	}
	return found, err
}

// Request names a volume to look up or delete.
type Request struct {
	ID      volume.ID
	Keys    credentials.Keys // of the request's secret; zero: none
	RoleARN string           // of the request's secret; "": none
}

// Finder looks volumes up. All methods may be called concurrently.
type Finder struct {
	Identities *identity.Identities
	Opener     *buckets.Opener
	Records    *Store
}

// Lookup returns NotFound unless this driver's volume of that id exists and is not being deleted.
func (f *Finder) Lookup(ctx context.Context, r Request) error {
	return f.look(ctx, r, func(b buckets.Bucket) error {
		_, err := f.Records.ReadActive(ctx, b, r.ID)
		return err
	})
}

// LookupPlace returns NotFound unless the bucket exists and, for a prefix, has an object below it, created by any program. It also returns
// NotFound while this driver is deleting the volume of that id.
func (f *Finder) LookupPlace(ctx context.Context, r Request) error {
	return f.look(ctx, r, func(b buckets.Bucket) error {
		found, err := f.Records.ReadOwn(ctx, b, r.ID)
		switch {
		case err == nil && found.Is(r.ID, StateDeleting):
			return fault.Errorf(fault.NotFound, "volume %s of %s is being deleted", r.ID, f.Records.Owner)
		case r.ID.Prefix == "": // who may mount a bucket may not be allowed to read its tags
			return nil
		case err != nil && !errors.Is(err, ErrNotOurs) && !fault.Is(err, fault.NotFound):
			return err
		}
		empty, err := buckets.IsEmpty(ctx, b, r.ID.Prefix)
		if err == nil && empty {
			err = fault.Errorf(fault.NotFound, "there is no volume %s of %s, and no object is below its prefix", r.ID, f.Records.Owner)
		}
		return err
	})
}

func (f *Finder) look(ctx context.Context, r Request, in func(buckets.Bucket) error) (err error) {
	be, who, err := f.Identities.Find(r.ID.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return err
	}
	keys, err := f.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { f.Identities.Invalidate(be, who, keys, err) }()
	b, err := f.Opener.OpenUncached(ctx, be, keys, r.ID.Bucket)
	if err != nil {
		return err
	}
	return in(b)
}
