package records

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// ErrChanged means that the condition of a write was not met: read the record and decide again.
var ErrChanged = errors.New("another controller changed the record first")

// ErrNotOurs means that no record of this owner is for exactly that volume id.
var ErrNotOurs = errors.New("no record of this driver")

// writeAttempts is the maximum number of attempts of a write that failed without a response and had no effect.
const writeAttempts = 5

// Stored is a record as it was read.
type Stored struct {
	Record
	ETag string // of the object; "": there is none
	Tags Tags   // of a volume that is a bucket: all, which are written with the record's changes
}

// Store reads and writes the records of one owner.
type Store struct {
	Owner  Owner
	opener *buckets.Opener
	now    func() time.Time
	locks  conc.Locks // a bucket's writes, where it has no conditional ones
}

// NewStore returns a Store. It starts nothing. now is the clock.
func NewStore(owner Owner, opener *buckets.Opener, now func() time.Time) *Store {
	return &Store{Owner: owner, opener: opener, now: now}
}

// Settings are what a node reads of a volume.
type Settings struct {
	Usage         volume.Usage
	CapacityBytes int64 // 0: unknown
}

// ReadSettings reads the settings of a volume from its record or its bucket's tags. NotFound: there are none, or they are those of a volume
// with another id, or of one that is being deleted. It does not check the owner: settings are no authority.
func ReadSettings(ctx context.Context, client *s3.Client, id volume.ID) (Settings, error) {
	none := fault.Errorf(fault.NotFound, "volume %s has no record", id)
	if id.Prefix == "" {
		t, err := ReadTags(ctx, client, id.Bucket)
		if err == nil && (t[TagVolume] != id.String() || t[TagState] != string(StateActive)) {
			err = none
		}
		return Settings{t.Usage(), t.Capacity()}, err
	}
	segment, _, ok := id.NameSegment()
	if !ok {
		return Settings{}, none
	}
	b := buckets.Bucket{Client: client, Info: backend.BucketInfo{Name: id.Bucket}, Backend: backend.Backend{Name: id.Backend}}
	r, _, err := readRecord(ctx, b, Key(segment), decode)
	if err != nil {
		return Settings{}, err
	}
	if r.VolumeID != id.String() || r.State != StateActive {
		return Settings{}, none
	}
	usage, err := r.UsageSetting()
	return Settings{usage, r.CapacityBytes}, err
}

// Is reports whether the record is that of the volume, in that state.
func (s Stored) Is(id volume.ID, state State) bool {
	return s.VolumeID == id.String() && s.State == state
}

// Now returns the time for a record.
func (s *Store) Now() time.Time { return s.now().UTC() }

// Read reads a record. NotFound: there is none. Precondition: the object is not a valid record.
func (s *Store) Read(ctx context.Context, b buckets.Bucket, segment string) (Stored, error) {
	r, etag, err := readRecord(ctx, b, Key(segment), decode)
	return Stored{Record: r, ETag: etag}, err
}

// readRecord reads and decodes a record of a volume or a snapshot.
func readRecord[R any](ctx context.Context, b buckets.Bucket, key string, decode func([]byte) (R, error)) (r R, etag string, err error) {
	data, etag, err := readObject(ctx, b, key, maxRecord)
	if err != nil {
		return r, "", err
	}
	if r, err = decode(data); err != nil {
		var none R
		return none, "", fault.Errorf(fault.Precondition, "%s in %s is not a record that this driver can read: %w; nothing was changed; "+
			"find out which program wrote it before you change it", key, b, err)
	}
	return r, etag, nil
}

// ReadOwn reads this owner's record, or tags, of exactly that id, or the record of a later generation, which proves that this one was deleted.
// ErrNotOurs: there is neither. NotFound: there is no bucket.
func (s *Store) ReadOwn(ctx context.Context, b buckets.Bucket, id volume.ID) (Stored, error) {
	if id.Prefix == "" {
		t, err := ReadTags(ctx, b.Client, id.Bucket)
		if err == nil && !t.Of(s.Owner, id) {
			err = ErrNotOurs
		}
		return Stored{Record: t.record(), Tags: t}, err
	}
	segment, _, ok := id.NameSegment()
	if !ok {
		return Stored{}, ErrNotOurs
	}
	found, err := s.Read(ctx, b, segment)
	switch {
	case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
		return Stored{}, ErrNotOurs
	case err != nil || found.Outlived(id):
		return found, err
	case found.State == StateReserved || found.Record.Owner() != s.Owner || found.VolumeID != id.String():
		return Stored{}, ErrNotOurs
	}
	return found, nil
}

// Segments returns the segments of the bucket's volume records after one ("": from the start), in their order: one page of the listing, or more
// while they have none. more is set if there are more. Objects below another "/" are no records.
func (s *Store) Segments(ctx context.Context, b buckets.Bucket, after string) (segments []string, more bool, err error) {
	return segmentsBelow(ctx, b, Key(""), after)
}

// SnapshotSegments is Segments for the bucket's snapshot records.
func (s *Store) SnapshotSegments(ctx context.Context, b buckets.Bucket, after string) (segments []string, more bool, err error) {
	return segmentsBelow(ctx, b, volume.SnapshotsPrefix, after)
}

func segmentsBelow(ctx context.Context, b buckets.Bucket, prefix, after string) (segments []string, more bool, err error) {
	for {
		start := ""
		if after != "" {
			start = prefix + after
		}
		page, err := buckets.List(ctx, b, prefix, buckets.From{After: start, Delimiter: "/"})
		if err != nil {
			return nil, false, backend.Classify(err, "listing "+prefix+" of "+b.String())
		}
		last := after
		for _, key := range page.Prefixes { // the data of snapshots
			// The next key that is not below the prefix: "0" follows "/".
			last = max(last, strings.TrimSuffix(strings.TrimPrefix(key, prefix), "/")+"0")
		}
		for _, o := range page.Objects {
			segment, below := strings.CutPrefix(o.Key, prefix)
			last = max(last, segment)
			if below && segment > after {
				segments = append(segments, segment)
			}
		}
		switch {
		case page.More && last == after:
			return nil, false, fault.Errorf(fault.Unavailable,
				"the service lists no more keys below %q of %s, but says that there are some: its listings are unreliable", prefix, b)
		case !page.More || len(segments) > 0:
			return segments, page.More, nil
		}
		after = last
	}
}

// Get reads an object, of which it returns up to limit bytes and one more. NotFound: there is none.
func (s *Store) Get(ctx context.Context, b buckets.Bucket, key string, limit int64) (data []byte, etag string, err error) {
	return readObject(ctx, b, key, limit)
}

func readObject(ctx context.Context, b buckets.Bucket, key string, limit int64) (data []byte, etag string, err error) {
	what := "reading " + key + " of " + b.String()
	out, err := b.Client.GetObject(ctx, &s3.GetObjectInput{Bucket: b.Name(), Key: &key})
	if err != nil {
		return nil, "", backend.Classify(err, what)
	}
	defer out.Body.Close()
	data, err = io.ReadAll(io.LimitReader(out.Body, limit+1))
	if err != nil {
		return nil, "", fault.Errorf(fault.Unavailable, "%s: %w", what, err)
	}
	return data, aws.ToString(out.ETag), nil
}

// Put writes an object under the condition that there is none (etag "") or that it is still the one with that etag. Two writes must have
// different data, or be equivalent.
//
// It returns the object's new ETag, or "" if the service did not return it: then read the object before the next write.
// ErrChanged: the condition does not hold. If the outcome is unknown it reads the object; if that fails too, the error is Busy or
// Timeout, because the write may still happen.
func (s *Store) Put(ctx context.Context, b buckets.Bucket, key, etag string, data []byte) (newETag string, err error) {
	conditional, err := s.opener.Conditional(ctx, b)
	if err != nil {
		return "", err
	}
	put := putIf
	if !conditional {
		put = s.putEmulated
	}
	w := write{key, etag, data}
	what := "writing " + key + " of " + b.String()
	for attempt := 1; attempt <= writeAttempts; attempt++ {
		newETag, err = put(ctx, b, w)
		switch {
		case err == nil && newETag != "", errors.Is(err, ErrChanged):
			return newETag, err
		case err == nil: // proves nothing
			err = fault.Errorf(fault.Unavailable, "the service reported success without an ETag, and the object is not there")
		case backend.IsConflict(err):
			return "", fault.Errorf(fault.Busy, "%s: another controller writes it at the same time: %w", what, err)
		}
		err = backend.Classify(err, what)
		if !buckets.Indeterminate(err) {
			if attempt > 1 { // the previous attempt may still arrive
				return "", buckets.UnknownOutcome(ctx, err)
			}
			return "", err
		}
		written, settleErr := settle(ctx, b, w)
		switch {
		case errors.Is(settleErr, errNotWritten):
		case settleErr == nil, errors.Is(settleErr, ErrChanged):
			return written, settleErr
		default:
			return "", buckets.UnknownOutcome(ctx, err)
		}
		if !throttle.Pause(ctx, attempt) {
			break
		}
	}
	return "", buckets.UnknownOutcome(ctx, err)
}

// write is a write of an object: see Put.
type write struct {
	key, etag string
	data      []byte
}

// errNotWritten means that a write has not happened yet.
var errNotWritten = errors.New("the record is not written yet")

// settle returns the record's ETag if a write has happened, and errNotWritten if it has not happened yet.
func settle(ctx context.Context, b buckets.Bucket, w write) (newETag string, err error) {
	now, nowEtag, err := readObject(ctx, b, w.key, int64(len(w.data)))
	switch {
	case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
		if w.etag == "" {
			return "", errNotWritten
		}
		return "", ErrChanged
	case err != nil:
		return "", err
	case bytes.Equal(now, w.data): // it has the time of the write, so it is this one
		return nowEtag, nil
	case w.etag != "" && nowEtag == w.etag:
		return "", errNotWritten
	}
	return "", ErrChanged
}

// putIf is a conditional write. It is sent once: a retry inside the SDK would hide that its first attempt succeeded.
func putIf(ctx context.Context, b buckets.Bucket, w write) (newETag string, err error) {
	in := buckets.PutInput(b, w.key, w.data)
	if w.etag == "" {
		in.IfNoneMatch = aws.String("*")
	} else {
		in.IfMatch = &w.etag
	}
	out, err := b.Client.PutObject(ctx, in, buckets.NoRetry)
	switch {
	case err == nil:
		return aws.ToString(out.ETag), nil
	case backend.IsPreconditionFailed(err):
		return "", ErrChanged
	case w.etag != "" && backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
		return "", ErrChanged // S3's answer to If-Match on a missing key
	}
	return "", err
}

// putEmulated is for services without conditional writes, where the operator promised that this is the only controller: then a lock in
// this process and a read before the write are equivalent.
func (s *Store) putEmulated(ctx context.Context, b buckets.Bucket, w write) (newETag string, err error) {
	release, err := s.locks.Lock(ctx, "write "+b.Backend.Name+" "+b.Info.Name)
	if err != nil {
		return "", err
	}
	defer release()
	_, now, err := readObject(ctx, b, w.key, maxRecord)
	switch {
	case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
		if w.etag != "" {
			return "", ErrChanged
		}
	case err != nil:
		return "", err
	case now != w.etag || w.etag == "":
		return "", ErrChanged
	}
	out, err := b.Client.PutObject(ctx, buckets.PutInput(b, w.key, w.data), buckets.NoRetry)
	if err != nil {
		return "", err
	}
	return aws.ToString(out.ETag), nil
}
