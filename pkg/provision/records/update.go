package records

import (
	"context"
	"errors"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Place is where a record is kept: an object of the bucket or, if the volume is a bucket, the bucket's tags. S is Stored or StoredSnapshot.
type Place[S any] struct {
	What string // names the record for messages: "the record of volume lab:data/v/"
	// Lock keeps this process from other writes of a place without conditional ones, which tags are; nil: not necessary.
	Lock func(ctx context.Context) (release func(), err error)
	Read func(ctx context.Context) (S, error)
	// Write writes next, which Read returned except for what changes, and returns it as it is stored. ErrChanged: Read would return another one.
	Write func(ctx context.Context, next S) (S, error)
}

// maxRaces is how often a decision is repeated because a record changed meanwhile.
const maxRaces = 8

// Repeat calls attempt, which reads, decides and writes what it names, until the error is not ErrChanged. Busy: that does not end.
func Repeat(what string, attempt func() error) error {
	for range maxRaces {
		if err := attempt(); !errors.Is(err, ErrChanged) {
			return err
		}
	}
	return fault.Errorf(fault.Busy, "%s keeps changing: another controller uses it", what)
}

// Update reads a record and writes what decide returns for it, or for the error of the read. If decide returns nil, nothing is written. Update
// returns the record as it is afterwards. The place must not be locked already.
func Update[S any](ctx context.Context, at Place[S], decide func(found S, err error) (*S, error)) (S, error) {
	var now S
	if at.Lock != nil {
		release, err := at.Lock(ctx)
		if err != nil {
			return now, err
		}
		defer release()
	}
	err := Repeat(at.What, func() error {
		found, err := at.Read(ctx)
		now = found
		next, err := decide(found, err)
		if err == nil && next != nil {
			now, err = at.Write(ctx, *next)
		}
		return err
	})
	return now, err
}

// OfName returns the place of the record, of any owner, of the volume name with that segment. See Read.
func (s *Store) OfName(b buckets.Bucket, segment string) Place[Stored] {
	return Place[Stored]{
		What: "the record of the name " + segment + " in " + b.String(),
		Read: func(ctx context.Context) (Stored, error) { return s.Read(ctx, b, segment) },
		Write: func(ctx context.Context, next Stored) (Stored, error) {
			data, err := encode(next.Record, next.check())
			if err == nil {
				next.ETag, err = s.Put(ctx, b, Key(segment), next.ETag, data)
			}
			return next, err
		},
	}
}

// OfVolume returns the place of the record or the tags of this owner's volume. See ReadOwn.
func (s *Store) OfVolume(b buckets.Bucket, id volume.ID) Place[Stored] {
	segment, _, _ := id.NameSegment()
	at := s.OfName(b, segment)
	at.What = "the record of volume " + id.String()
	at.Read = func(ctx context.Context) (Stored, error) { return s.ReadOwn(ctx, b, id) }
	if id.Prefix == "" {
		at.Lock = func(ctx context.Context) (release func(), err error) { return s.opener.Lock(ctx, b.Backend, id.Bucket) }
		at.Write = func(ctx context.Context, next Stored) (Stored, error) {
			next.Tags = next.Tags.with(next.Record)
			return next, WriteTags(ctx, b.Client, id.Bucket, next.Tags)
		}
	}
	return at
}

// OfSnapshot returns the place of the record, of any owner, of that snapshot's name. See ReadSnapshot.
func (s *Store) OfSnapshot(b buckets.Bucket, id volume.SnapshotID) Place[StoredSnapshot] {
	return Place[StoredSnapshot]{
		What: "the record of snapshot " + id.String(),
		Read: func(ctx context.Context) (StoredSnapshot, error) { return s.ReadSnapshot(ctx, b, id.Segment) },
		Write: func(ctx context.Context, next StoredSnapshot) (StoredSnapshot, error) {
			data, err := encode(next.Snapshot, next.check())
			if err == nil {
				next.ETag, err = s.Put(ctx, b, SnapshotKey(id.Segment), next.ETag, data)
			}
			return next, err
		},
	}
}
