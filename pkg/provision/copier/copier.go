// Package copier copies the objects below a prefix to another prefix of the same service, on the server. It does not depend on volumes
// and snapshots.
//
// A copy is made page by page, in the order of keys:
//
//  1. list a page of the source
//  2. list what is at the target already in the range of the page
//  3. copy what is missing, with conditions on source and target; what is gone must be gone in a new listing, too
//  4. write a manifest segment, if there is none of that number: its last key is where the next page starts
//
// The steps of several pages run at the same time, so that requests are in flight all the time. Segments are written in their order.
//
// If the process is killed, any other process continues after the last segment. If two processes copy at the same time, the one that does not
// write a segment reads that of the other and continues after it. In the end the target is compared with all segments.
//
// Objects at the target are never overwritten: the copy requires that the target has no such object. Where the service does not honour that,
// step 2 comes after step 1, and the source must still have the ETag of the listing, so a copy that another process made has the same content.
package copier

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
	"github.com/s3-csi/s3-csi-driver/pkg/table"
)

const (
	// DefaultThreshold is the size above which an object is copied in parts. S3's limit for a copy in one request is 5 GB. Services that
	// copy the data before they answer need a lower one, because a request has a timeout.
	DefaultThreshold = 1 << 30
	// minPart is the smallest size of a part that S3 accepts, maxParts the largest number of parts.
	minPart  = 5 << 20
	maxParts = 10000
	// requestsPerPage is what a page takes beside its objects: two checks that the copy is still wanted, two listings of the source, one of
	// the target, a segment written and read.
	requestsPerPage = 7
	pageSize        = 1000
	// DefaultCheckEvery is the default of Options.CheckEvery.
	DefaultCheckEvery = 10 * time.Second
	// Lag is how long after a copy is no longer wanted its process may still write an object: its last check may be as old as
	// DefaultCheckEvery, and its last request as old as the limit for requests.
	Lag = DefaultCheckEvery + buckets.RequestBound
)

// Place is a prefix of a bucket. Prefix is "" for the whole bucket without the driver's records, and otherwise ends in "/".
type Place struct {
	Bucket buckets.Bucket
	Prefix string
}

// String returns the place for messages.
func (p Place) String() string { return p.Bucket.Info.Name + "/" + p.Prefix }

func (p Place) key(below string) *string { return aws.String(p.Prefix + below) }

// copySource names an object below the place for copy requests.
func (p Place) copySource(o Object) *string {
	return buckets.CopySource(p.Bucket, buckets.Object{Key: p.Prefix + o.Key, Version: o.Version})
}

// Object is an object of a source.
type Object struct {
	Key     string // below the prefix
	ETag    string
	Version string // "": the current one
	Size    int64
	// Fixed is set if the object must neither change nor disappear, because it is part of a snapshot or of a plan.
	Fixed bool
}

// Page is a part of a source. Last is the key after which the next page starts; with More false there is none.
type Page struct {
	Objects []Object
	Last    string
	More    bool
}

// Source lists the objects to copy.
type Source interface {
	// Place is where the objects are.
	Place() Place
	// Page returns the page with that number (from 0), which starts after a key ("": at the beginning).
	Page(ctx context.Context, number int, after string) (Page, error)
}

// Options are the dependencies and settings of a Copier.
type Options struct {
	Store   *records.Store  // of manifest segments
	Uploads *buckets.Opener // lists unfinished uploads
	// Workers is how many requests are in flight per backend.
	Workers int
	// Threshold is the size above which an object is copied in parts; 0 is DefaultThreshold.
	Threshold int64
	// CheckEvery is the age of a check that the copy is still wanted from which it is repeated before the next request is sent.
	CheckEvery time.Duration
	// Bound is the timeout of a request; 0 is buckets.RequestBound.
	Bound time.Duration
}

// Copier copies prefixes. All methods may be called concurrently.
type Copier struct {
	opts      Options
	throttles *throttle.Set
	limits    sync.Map        // by backend, as *atomic.Int64: the size above which an object is copied in parts, which requests that are too slow lower
	ending    context.Context // ends with End
	end       context.CancelFunc
}

// New returns a Copier. It starts nothing.
func New(o Options) *Copier {
	o.Threshold = cmp.Or(o.Threshold, DefaultThreshold)
	o.CheckEvery = cmp.Or(o.CheckEvery, DefaultCheckEvery)
	o.Bound = cmp.Or(o.Bound, buckets.RequestBound)
	c := &Copier{opts: o, throttles: throttle.NewSet(o.Workers)}
	c.ending, c.end = context.WithCancel(context.Background())
	return c
}

// Task is a copy.
type Task struct {
	Source Source
	Target Place
	// Manifest is the prefix of the manifest segments, in the target's bucket.
	Manifest string
	Limits   Limits
	Progress *Progress
	// Keep leaves objects at the target that are in no segment. Otherwise they are removed, which must not be where others write.
	Keep bool
	// Still is called before each page, every CheckEvery, and before the end. It returns an error if the copy is no longer wanted.
	Still func(context.Context) error
	// Unanswered is called when a request ended without an answer, so that the service may still carry it out; nil: no call.
	Unanswered func()
}

// Limits bound a copy; 0 is no limit.
type Limits struct{ Objects, Bytes int64 }

// Totals are the sums of a copy.
type Totals struct {
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
	// Changed is how many objects changed or disappeared after they were listed. A changed one is in the copy as it was later. Versions do not
	// change: one that has disappeared is an error.
	Changed int64 `json:"changed,omitempty"`
}

// Requests estimates how many requests a copy takes.
func (t Totals) Requests() int64 {
	return t.Objects + requestsPerPage*(t.Objects/pageSize+1) + t.Bytes/DefaultThreshold
}

func (t *Totals) add(entries []entry) {
	for _, e := range entries {
		t.Objects++
		t.Bytes += e.Size
	}
}

// check refuses totals above the limits. exact is false if there may be more.
func (l Limits) check(t Totals, exact bool) error {
	if (l.Objects == 0 || t.Objects <= l.Objects) && (l.Bytes == 0 || t.Bytes <= l.Bytes) {
		return nil
	}
	atLeast := ""
	if !exact {
		atLeast = "at least "
	}
	return fault.Errorf(fault.OutOfRange,
		"the source has %s%d objects and %d bytes, which are about %d requests; the limits are %d objects (maxObjects) and %d bytes (maxBytes)",
		atLeast, t.Objects, t.Bytes, t.Requests(), l.Objects, l.Bytes)
}

// Progress is how far a copy is.
type Progress struct{ objects, bytes, changed, expectObjects, expectBytes atomic.Int64 }

// String returns "1234 of 5000 objects (1.2GiB of 5.0GiB) copied, 2 changed or deleted meanwhile".
func (p *Progress) String() string {
	s := fmt.Sprintf("%d objects (%s) copied", p.objects.Load(), table.Bytes(uint64(p.bytes.Load())))
	if all := p.expectObjects.Load(); all > 0 {
		s = fmt.Sprintf("%d of %d objects (%s of %s) copied", p.objects.Load(), all, table.Bytes(uint64(p.bytes.Load())), table.Bytes(uint64(p.expectBytes.Load())))
	}
	if n := p.changed.Load(); n > 0 {
		s += fmt.Sprintf(", %d changed or deleted meanwhile", n)
	}
	return s
}

// Expect sets what String compares with.
func (p *Progress) Expect(t Totals) { p.expectObjects.Store(t.Objects); p.expectBytes.Store(t.Bytes) }

func (p *Progress) set(t Totals) {
	p.objects.Store(t.Objects)
	p.bytes.Store(t.Bytes)
	p.changed.Store(t.Changed)
}

// maxCount is how many pages above a limit are counted for the refusal.
const maxCount = 1000

// Count lists the source and refuses it (OutOfRange) if it is above the limits.
func (c *Copier) Count(ctx context.Context, source Source, limits Limits) (t Totals, err error) {
	r := c.newRun(Task{Source: source, Target: source.Place()})
	page, beyond := Page{More: true}, 0
	for n := 0; page.More; n++ {
		if page, err = r.readPage(ctx, n, page.Last); err != nil {
			return Totals{}, err
		}
		for _, o := range page.Objects {
			t.Objects++
			t.Bytes += o.Size
		}
		if err := limits.check(t, !page.More); err != nil {
			if beyond++; !page.More || beyond == maxCount {
				return Totals{}, err
			}
		}
	}
	return t, nil
}

// endBound is for how long a request that was sent goes on after End.
const endBound = 3 * time.Second

// End is called when the process ends, so that requests in flight do not delay that for long.
func (c *Copier) End() { c.end() }

// Whole returns a context for a request that must not be broken off: it goes on when ctx ends, until its timeout, or shortly after End. The service
// would carry out a request that is broken off, too, maybe after what was copied has been removed.
func (c *Copier) Whole(ctx context.Context) (context.Context, context.CancelFunc) {
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.opts.Bound)
	stop := context.AfterFunc(c.ending, func() {
		t := time.AfterFunc(endBound, cancel)
		context.AfterFunc(whole, func() { t.Stop() })
	})
	return whole, func() { stop(); cancel() }
}

// run is one Task in progress.
type run struct {
	task     Task
	source   Source
	from     Place // of the source
	target   Place
	manifest manifest
	progress *Progress
	workers  int
	requests *requests
	// bare is what copies are sent without, because the service refuses it.
	bare atomic.Int32
	// whole is set if the service does not copy parts of objects.
	whole atomic.Bool
	// prepare sets the entries that a page has before anything is copied, and what is missing. after is the key before the page.
	prepare func(ctx context.Context, after string, w *pageWork) error
}

func (c *Copier) newRun(t Task) *run {
	name := t.Target.Bucket.Backend.Name
	limit := &atomic.Int64{}
	limit.Store(c.opts.Threshold)
	if known, loaded := c.limits.LoadOrStore(name, limit); loaded {
		limit = known.(*atomic.Int64) //nolint:forcetypeassert // nothing else is stored
	}
	r := &run{
		task: t, source: t.Source, from: t.Source.Place(), target: t.Target, manifest: manifest{c.opts.Store, t.Target.Bucket, t.Manifest}, progress: t.Progress,
		workers: c.opts.Workers,
		requests: &requests{
			copier: c, backend: name, still: t.Still, unanswered: t.Unanswered, throttle: c.throttles.Of(name), limit: limit, checking: make(chan struct{}, 1),
		},
	}
	r.prepare = r.findMissing
	return r
}

// Copy copies the source to the target, or what an earlier call left, and compares the target with the manifest. Busy, Unavailable and Timeout
// mean that another call continues; other errors name what cannot be copied.
func (c *Copier) Copy(ctx context.Context, t Task) (Totals, error) {
	r := c.newRun(t)
	last, err := r.writeManifest(ctx)
	if err == nil {
		r.progress.set(last.Totals)
		err = r.verify(ctx, c.opts.Uploads, last)
	}
	if err == nil {
		err = r.requests.checkWanted(ctx)
	}
	return last.Totals, r.orUnwanted(ctx, err)
}

// Plan writes into the task's manifest what its source has, and copies nothing. Like Copy it continues an earlier call. A copy of a Planned source
// is the same however long it takes.
func (c *Copier) Plan(ctx context.Context, t Task) (Totals, error) {
	r := c.newRun(t)
	r.prepare = func(_ context.Context, _ string, w *pageWork) error {
		for i, o := range w.page.Objects {
			w.setEntry(i, entry{Key: o.Key, Size: o.Size, SourceETag: o.ETag, Version: o.Version})
		}
		return nil
	}
	last, err := r.writeManifest(ctx)
	return last.Totals, r.orUnwanted(ctx, err)
}

// orUnwanted returns the error, or that the copy is no longer wanted: something may be missing because it was deleted for that reason.
func (r *run) orUnwanted(ctx context.Context, err error) error {
	if err != nil && fault.KindOf(err).Permanent() && ctx.Err() == nil {
		if unwanted := r.requests.checkWanted(ctx); unwanted != nil {
			return unwanted
		}
	}
	return err
}
