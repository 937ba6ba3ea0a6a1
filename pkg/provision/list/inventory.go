package list

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Kind is the kind of an Entry.
type Kind string

// The kinds of entries.
const (
	KindVolume      Kind = "volume"
	KindSnapshot    Kind = "snapshot"
	KindReservation Kind = "reservation" // of a name that is a directory of a base prefix
)

// Entry is what a record, or the tags of a bucket, say. Unlike a Volume it can have any state and any owner.
type Entry struct {
	Kind             Kind
	Backend, Bucket  string
	Key              string // of the record; "": the bucket's tags
	ID               string // "" if Err is set
	Name             string // as the CO gave it, or its hash
	Owner            records.Owner
	State            records.State
	OnDelete         string
	Bytes            int64  // the size that was asked for; of a snapshot, that of its objects; 0: unknown
	Source           string // the volume of a snapshot; the volume or the snapshot that a volume was created from
	Changed          int64  // how many objects changed or were deleted while a snapshot was made
	Failure          string // why a snapshot could not be made
	Created, Updated time.Time
	// Err is why the record cannot be read.
	Err error
}

// Unread is a backend, or one of its buckets, that could not be read.
type Unread struct {
	Backend string
	Bucket  string // "": all
	Err     error
}

// Inventory returns all records and tags of volumes and snapshots in the buckets where volumes are looked for, of all owners, sorted. Those
// of a backend whose credentials are in requests' secrets cannot be read. name limits it to one backend; "": all.
func (l *Lister) Inventory(ctx context.Context, name string) (entries []Entry, unread []Unread, err error) {
	all := l.Config.Config().Declared()
	if name != "" {
		be, err := l.Config.Config().Backend(name)
		if err != nil {
			return nil, nil, err
		}
		all = []backend.Backend{be}
	}
	i := inventory{lister: l}
	for _, be := range all {
		if err := i.backend(ctx, be); err != nil {
			i.unread = append(i.unread, Unread{Backend: be.Name, Err: err})
		}
	}
	slices.SortFunc(i.entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Backend, b.Backend), cmp.Compare(a.Bucket, b.Bucket), cmp.Compare(a.Key, b.Key))
	})
	return i.entries, i.unread, ctx.Err()
}

type inventory struct {
	lister  *Lister
	entries []Entry
	unread  []Unread
}

func (i *inventory) backend(ctx context.Context, be backend.Backend) (err error) {
	if be.ControllerCredentials == credentials.SourceSecret {
		return fault.Errorf(fault.Unsupported, "the credentials of the controller are in the secrets of its requests (controllerCredentials: secret)")
	}
	be, who, err := i.lister.Identities.Find(be.Name, credentials.Keys{}, "")
	if err != nil {
		return err
	}
	keys, err := i.lister.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { i.lister.Identities.Invalidate(be, who, keys, err) }()
	names, err := i.lister.bucketNames(ctx, be, keys)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := i.bucket(ctx, be, keys, name); err != nil && !fault.Is(err, fault.NotFound) {
			i.unread = append(i.unread, Unread{be.Name, name, err})
		}
	}
	return nil
}

// bucket adds the volume that a bucket is, or those in it, and the snapshots.
func (i *inventory) bucket(ctx context.Context, be backend.Backend, keys credentials.Keys, name string) error {
	b, err := i.lister.Opener.Open(ctx, be, keys, name, "")
	if err != nil {
		return err
	}
	tags, err := records.ReadTags(ctx, b.Client, name)
	switch {
	case err == nil && len(tags.Ours()) > 0:
		i.entries = append(i.entries, Entry{
			Kind: KindVolume, Backend: be.Name, Bucket: name, ID: tags[records.TagVolume], Name: tags[records.TagName], Owner: tags.Owner(),
			State: records.State(tags[records.TagState]), OnDelete: tags[records.TagOnDelete], Bytes: tags.Capacity(),
		})
		return nil
	case err != nil && !fault.Is(err, fault.Denied) && !fault.Is(err, fault.Unsupported):
		return err
	}
	if err := i.read(ctx, b, volumeRecords); err != nil {
		return err
	}
	return i.read(ctx, b, snapshotRecords)
}

// recordKind is how the records of one kind are read.
type recordKind struct {
	kind Kind
	key  func(segment string) string
	list func(s *records.Store, ctx context.Context, b buckets.Bucket, after string) ([]string, bool, error)
	read func(s *records.Store, ctx context.Context, b buckets.Bucket, segment string) (Entry, error)
}

var (
	volumeRecords = recordKind{KindVolume, records.Key, (*records.Store).Segments,
		func(s *records.Store, ctx context.Context, b buckets.Bucket, segment string) (Entry, error) {
			r, err := s.Read(ctx, b, segment)
			return ofVolume(r.Record), err
		}}
	snapshotRecords = recordKind{KindSnapshot, records.SnapshotKey, (*records.Store).SnapshotSegments,
		func(s *records.Store, ctx context.Context, b buckets.Bucket, segment string) (Entry, error) {
			r, err := s.ReadSnapshot(ctx, b, segment)
			return ofSnapshot(r.Snapshot), err
		}}
)

// read adds the records of one kind in a bucket.
func (i *inventory) read(ctx context.Context, b buckets.Bucket, k recordKind) error {
	after := ""
	for more := true; more; {
		var segments []string
		var err error
		if segments, more, err = k.list(i.lister.Records, ctx, b, after); err != nil {
			return err
		}
		found := make([]Entry, len(segments))
		group, reading := errgroup.WithContext(ctx)
		group.SetLimit(readers)
		for n, segment := range segments {
			group.Go(func() error {
				e, err := k.read(i.lister.Records, reading, b, segment)
				switch {
				case fault.Is(err, fault.Precondition):
					e.Err = err
				case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err): // removed meanwhile
					return nil
				case err != nil:
					return fmt.Errorf("reading the records of %s: %w", b, err)
				}
				e.Kind, e.Backend, e.Bucket, e.Key = cmp.Or(e.Kind, k.kind), b.Backend.Name, b.Info.Name, k.key(segment)
				found[n] = e
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
		i.entries = append(i.entries, slices.DeleteFunc(found, func(e Entry) bool { return e.Key == "" })...)
		if len(segments) > 0 {
			after = segments[len(segments)-1]
		}
	}
	return nil
}

func ofVolume(r records.Record) Entry {
	e := Entry{
		ID: r.VolumeID, Name: r.Name, Owner: r.Owner(), State: r.State, OnDelete: string(r.OnDelete), Bytes: r.CapacityBytes, Source: r.ContentSource,
		Created: r.Created, Updated: r.Updated,
	}
	if r.State == records.StateReserved {
		e.Kind = KindReservation
	}
	return e
}

func ofSnapshot(s records.Snapshot) Entry {
	return Entry{
		ID: s.SnapshotID, Name: s.Name, Owner: s.Owner(), State: s.State, OnDelete: string(s.OnDelete), Bytes: s.Bytes, Source: s.Source,
		Changed: s.Changed, Failure: s.Failure, Created: s.Created, Updated: s.Updated,
	}
}

// Misplaced reports whether a record names a volume that is not in its bucket and backend, so that it proves nothing: a copy of a record.
func (e Entry) Misplaced() bool {
	if e.Kind != KindVolume || e.Err != nil {
		return false
	}
	id, err := volume.ParseID(e.ID)
	return err != nil || id.Backend != e.Backend || id.Bucket != e.Bucket
}
