package copier

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

const (
	// version is the format of segments. No other version is accepted.
	version = 1
	// maxSegment is the maximum size of a segment: 1000 keys of 1024 bytes, six bytes for each if they are escaped, and the rest.
	maxSegment = 8 << 20
	// segmentAttempts is how often a segment is written whose outcome is unknown.
	segmentAttempts = 5
	digits          = 8 // of a segment's number, so that keys sort by number
)

// segment is the part of a manifest for one page. Version 1.
type segment struct {
	Version int     `json:"version"`
	Number  int     `json:"number"`
	Last    string  `json:"last"`   // the next page starts after it
	More    bool    `json:"more"`   // false: this is the last one
	Totals  Totals  `json:"totals"` // of all segments up to this one
	Objects []entry `json:"objects"`
}

// entry is one object of a copy.
type entry struct {
	Key        string `json:"key"` // below the prefix
	Size       int64  `json:"size"`
	ETag       string `json:"etag,omitempty"`       // of the copy
	SourceETag string `json:"sourceETag,omitempty"` // "": it was there before the page was listed again
	Version    string `json:"version,omitempty"`    // of the source
}

// next returns the segment of the page after this one.
func (s segment) next(page Page, entries []entry) segment {
	next := segment{Version: version, Number: s.Number + 1, Last: page.Last, More: page.More, Objects: entries, Totals: s.Totals}
	next.Totals.add(entries)
	return next
}

// manifest is where the segments of a copy are.
type manifest struct {
	store  *records.Store
	bucket buckets.Bucket
	prefix string
}

func (m manifest) key(number int) string { return fmt.Sprintf("%s%0*d", m.prefix, digits, number) }

// lastSegment finds the segment with the highest number.
func (r *run) lastSegment(ctx context.Context) (segment, error) {
	last := ""
	next, more := buckets.CurrentObjects(r.manifest.bucket.AsOwn(), r.manifest.prefix, 0, buckets.NoRetry), true
	for more {
		var page []buckets.Object
		err := r.requests.send(ctx, func(ctx context.Context) (err error) {
			page, more, err = next(ctx)
			return err
		})
		if err != nil {
			return segment{}, backend.Classify(err, "listing the manifest "+r.manifest.prefix+" of "+r.target.Bucket.String())
		}
		for _, o := range page {
			last = max(last, o.Key)
		}
	}
	if last == "" {
		return segment{Number: -1, More: true}, nil // before the first one
	}
	number, err := strconv.Atoi(strings.TrimPrefix(last, r.manifest.prefix))
	if err != nil {
		return segment{}, fault.Errorf(fault.Precondition, "%s of %s is not a segment of a manifest: find out which program wrote it", last, r.target.Bucket)
	}
	return r.manifest.read(ctx, number)
}

func (m manifest) read(ctx context.Context, number int) (segment, error) {
	key := m.key(number)
	data, _, err := m.store.Get(ctx, m.bucket.AsOwn(), key, maxSegment)
	if err != nil {
		return segment{}, err
	}
	var s segment
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err = d.Decode(&s)
	switch {
	case err != nil:
	case s.Version != version:
		err = fmt.Errorf("version %d, this driver reads version %d", s.Version, version)
	case s.Number != number:
		err = fmt.Errorf("it has number %d", s.Number)
	}
	if err != nil {
		return segment{}, fault.Errorf(fault.Precondition, "%s of %s is not a segment of a manifest that this driver can read: %w", key, m.bucket, err)
	}
	return s, nil
}

// writeSegment writes a segment, or returns that of the process that wrote one of that number first.
func (r *run) writeSegment(ctx context.Context, s segment) (segment, error) {
	data, err := json.Marshal(s)
	if err != nil {
		return segment{}, fault.Errorf(fault.Unknown, "encoding a manifest segment: %w", err)
	}
	for attempt := 1; ; attempt++ {
		err := r.requests.sendWhole(ctx, func(ctx context.Context) error {
			_, err := r.manifest.store.Put(ctx, r.manifest.bucket.AsOwn(), r.manifest.key(s.Number), "", data)
			return err
		})
		switch {
		case errors.Is(err, records.ErrChanged):
			return r.manifest.read(ctx, s.Number)
		case !fault.Is(err, fault.Busy) || attempt == segmentAttempts || !throttle.Pause(ctx, attempt):
			return s, err
		}
	}
}

// readPage returns a segment as a page of a source, with an object for each entry.
func (m manifest) readPage(ctx context.Context, number int, object func(e entry) Object) (Page, error) {
	s, err := m.read(ctx, number)
	page := Page{Last: s.Last, More: s.More}
	for _, e := range s.Objects {
		page.Objects = append(page.Objects, object(e))
	}
	return page, err
}

// Copied is the source of a copy of a copy: its pages are the segments of a manifest.
type Copied struct {
	Of       Place
	Manifest string
	Store    *records.Store
}

// Place implements Source.
func (c Copied) Place() Place { return c.Of }

// Page implements Source.
func (c Copied) Page(ctx context.Context, number int, _ string) (Page, error) {
	return manifest{c.Store, c.Of.Bucket, c.Manifest}.readPage(ctx, number, func(e entry) Object {
		return Object{Key: e.Key, ETag: e.ETag, Size: e.Size, Fixed: true}
	})
}

// Planned is the source of the objects of a plan.
type Planned struct {
	Of Place
	// Plan is the prefix of the plan's segments, which are in the bucket In.
	Plan  string
	In    buckets.Bucket
	Store *records.Store
}

// Place implements Source.
func (p Planned) Place() Place { return p.Of }

// Page implements Source.
func (p Planned) Page(ctx context.Context, number int, _ string) (Page, error) {
	return manifest{p.Store, p.In, p.Plan}.readPage(ctx, number, func(e entry) Object {
		return Object{Key: e.Key, ETag: e.SourceETag, Version: e.Version, Size: e.Size, Fixed: true}
	})
}
