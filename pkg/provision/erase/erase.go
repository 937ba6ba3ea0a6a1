// Package erase removes everything below a prefix of a bucket: unfinished uploads, objects, versions. It does not depend on volumes.
package erase

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

const (
	// maxPasses is how often a prefix is listed. Usually there are two, and the second finds nothing. More mean that another
	// process still writes there.
	maxPasses = 10
	// roundPages is how many pages of versions are read before they are deleted. Unlike a continuation token, a marker names a
	// version, and not every service can continue from one that no longer exists.
	roundPages = 8
	// maxTracked is the maximum number of objects of a pass that are remembered until the next one.
	maxTracked = 100_000
)

// Eraser removes everything below a prefix. All methods may be called concurrently.
type Eraser struct {
	uploads   Uploads
	workers   int
	throttles *throttle.Set // all erasures of a backend share one
	singles   sync.Map      // by backend: until when its service is known to have no multi-delete
}

// Uploads lists unfinished uploads; *buckets.Opener does.
type Uploads interface {
	UploadsBelow(ctx context.Context, b buckets.Bucket, prefix string, each func(key, id string) error) error
}

// New returns an Eraser that has up to workers requests in flight per backend.
func New(uploads Uploads, workers int) *Eraser {
	return &Eraser{uploads: uploads, workers: workers, throttles: throttle.NewSet(workers)}
}

// Task is what to erase.
type Task struct {
	Bucket   buckets.Bucket
	Prefix   string // "" is the whole bucket; otherwise it ends in "/"
	Versions bool   // versions and delete markers too
	Except   string // Look does not count what is below this prefix; "": everything counts
	Progress *Progress
	// Still is called before each page and each upload. It returns an error if the prefix must no longer be erased; nil: no check.
	Still func(context.Context) error
}

// Erase returns nil when a listing showed that nothing is left.
func (e *Eraser) Erase(ctx context.Context, t Task) error { return e.start(t).run(ctx) }

func (e *Eraser) start(t Task) *erasure {
	return &erasure{task: t, uploads: e.uploads, workers: e.workers, throttle: e.throttles.Of(t.Bucket.Backend.Name), singles: &e.singles}
}

// erasure is one Task in progress.
type erasure struct {
	task     Task
	uploads  Uploads
	workers  int
	throttle *throttle.Throttle
	singles  *sync.Map // see Eraser

	mu      sync.Mutex
	refused refusals
	// before and now have what the service said it removed in the pass before and in this one, up to maxTracked each; again is what it said so of
	// twice.
	before, now map[buckets.Object]bool
	again       []buckets.Object
}

// refusals are the keys that a pass could not delete.
type refusals struct {
	count  int
	first  []string
	denied bool
}

func (r *refusals) add(what, code, message string) {
	r.count++
	r.denied = r.denied || code == "AccessDenied"
	if len(r.first) < buckets.ShownKeys {
		r.first = append(r.first, fmt.Sprintf("%q: %s %s", what, code, strings.TrimSpace(message)))
	}
}

// run makes passes over the prefix until it is empty: uploads first, then objects.
func (e *erasure) run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	for pass := 1; ; pass++ {
		e.refused, e.before, e.now, e.again = refusals{}, e.now, map[buckets.Object]bool{}, nil
		e.task.Progress.refused.Store(0)
		aborted, err := e.abortUploads(ctx)
		if err != nil {
			return err
		}
		found, removed, err := e.removeObjects(ctx)
		if err != nil {
			return err
		}
		if aborted == 0 && found == 0 {
			return nil
		}
		log.V(2).Info("Finished erasing pass", "pass", pass, "found", found, "removed", removed, "uploads", aborted, "refused", e.refused.count)
		switch {
		case e.refused.count > 0 && removed == 0:
			kind := fault.Busy // a directory that a pod still writes to, for example
			if e.refused.denied {
				kind = fault.Denied
			}
			return fault.Errorf(kind, "%s of %s could not be deleted from %s: %s", Count(e.refused.count, "object"),
				e.task.Bucket.Info.Name+"/"+e.task.Prefix, e.task.Bucket.Backend, strings.Join(e.refused.first, "; "))
		case pass == maxPasses:
			return e.unfinished(ctx, pass)
		}
	}
}

// unfinished is the error for objects that are listed again after each deletion. It names them.
func (e *erasure) unfinished(ctx context.Context, pass int) error {
	what := fmt.Sprintf("after %d passes objects are still below %q in %s", pass, e.task.Prefix, e.task.Bucket)
	var names, absent []string
	for _, o := range e.again {
		if len(names) < buckets.ShownKeys && !strings.HasPrefix(o.Version, uploadMark) {
			b := e.task.Bucket.AsOwn()
			if _, err := b.Client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: b.Name(), Key: &o.Key, VersionId: o.VersionID()}); backend.IsNotFound(err) {
				absent = append(absent, nameOf(o))
			}
		}
		names = append(names, nameOf(o))
	}
	switch {
	case len(absent) > 0:
		return fault.Errorf(fault.Busy, "%s: the service lists %s, but has no such objects: the names in its listings are not those of the objects; "+
			"remove these objects with a program that knows their names, and the deletion ends", what, buckets.Quoted(absent))
	case len(names) > 0:
		return fault.Errorf(fault.Busy, "%s: %s, which another process writes again, or the service does not delete although it says so", what, buckets.Quoted(names))
	}
	return fault.Errorf(fault.Busy, "%s: another process still writes there", what)
}

// uploadMark is what the version of an unfinished upload begins with in erasure.before and now.
const uploadMark = "unfinished upload "

// abortUploads aborts unfinished uploads. It runs first, so that none can be completed later.
func (e *erasure) abortUploads(ctx context.Context) (aborted int, err error) {
	err = e.uploads.UploadsBelow(ctx, e.task.Bucket, e.task.Prefix, func(key, id string) error {
		if err := buckets.CheckBelow(e.task.Prefix, key); err != nil {
			return err
		}
		if e.task.Still != nil {
			if err := e.task.Still(ctx); err != nil {
				return err
			}
		}
		err := e.send(ctx, func(ctx context.Context) error {
			_, err := e.task.Bucket.Client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: e.task.Bucket.Name(), Key: &key, UploadId: &id},
				buckets.NoRetry)
			if backend.IsNotFound(err) && !backend.IsNoSuchBucket(err) {
				return nil
			}
			return err
		})
		if err == nil {
			aborted++
			e.removed(buckets.Object{Key: key, Version: uploadMark + id}, &e.task.Progress.uploads)
		}
		return err
	})
	return aborted, backend.Classify(err, "aborting unfinished uploads below "+e.task.Bucket.Info.Name+"/"+e.task.Prefix)
}

// removeObjects lists the prefix once and deletes what it finds.
func (e *erasure) removeObjects(ctx context.Context) (found, removed int, err error) {
	before := e.task.Progress.objects.Load()
	if e.task.Versions {
		found, err = e.removeVersions(ctx)
		if backend.IsNotImplemented(err) { // a 400 may be about a marker, and would leave versions
			e.task.Versions = false
		}
	}
	if !e.task.Versions {
		found, err = e.removeCurrent(ctx)
	}
	return found, int(e.task.Progress.objects.Load() - before), backend.Classify(err, "deleting what is below "+e.task.Bucket.Info.Name+"/"+e.task.Prefix)
}

// removeCurrent deletes while it lists.
func (e *erasure) removeCurrent(ctx context.Context) (found int, err error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(e.workers) // Go waits for a free worker, so the listing never runs far ahead
	next, more := buckets.CurrentObjects(e.task.Bucket, e.task.Prefix, 0, buckets.NoRetry), true
	for more && err == nil {
		var page []buckets.Object
		if page, more, err = e.page(ctx, next); err == nil && len(page) > 0 {
			found += len(page)
			g.Go(func() error { return e.remove(ctx, page) })
		}
	}
	// The workers' error comes first: the listing may have ended only because of it.
	if workErr := g.Wait(); workErr != nil {
		return found, workErr
	}
	return found, err
}

// removeVersions reads some pages, deletes them, and starts again, until nothing is left or nothing more can be deleted.
func (e *erasure) removeVersions(ctx context.Context) (found int, err error) {
	next, more := buckets.AllVersions(e.task.Bucket, e.task.Prefix, 0, buckets.NoRetry), true
	var last buckets.Object // the first of the last round
	for more {
		var round [][]buckets.Object
		for more && len(round) < roundPages {
			var page []buckets.Object
			if page, more, err = e.page(ctx, next); err != nil {
				return found, err
			}
			if len(page) > 0 {
				round = append(round, page)
				found += len(page)
			}
		}
		if len(round) == 0 {
			return found, nil
		}
		refused := e.refused.count
		g, gctx := errgroup.WithContext(ctx)
		g.SetLimit(e.workers)
		for _, page := range round {
			g.Go(func() error { return e.remove(gctx, page) })
		}
		if err := g.Wait(); err != nil {
			return found, err
		}
		// If all of them are deleted, the next ones are at the beginning.
		if first := round[0][0]; more && e.refused.count == refused && first != last {
			next, last = buckets.AllVersions(e.task.Bucket, e.task.Prefix, 0, buckets.NoRetry), first
		}
	}
	return found, nil
}

// page reads a page and checks that it may be deleted.
func (e *erasure) page(ctx context.Context, next buckets.Pager) (page []buckets.Object, more bool, err error) {
	err = e.send(ctx, func(ctx context.Context) error {
		page, more, err = next(ctx)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	for _, o := range page {
		if err := buckets.CheckBelow(e.task.Prefix, o.Key); err != nil {
			return nil, false, err
		}
	}
	return page, more, nil
}

// Progress counts what an erasure has done.
type Progress struct {
	objects atomic.Int64 // or versions and delete markers, removed
	uploads atomic.Int64 // aborted
	refused atomic.Int64 // objects that the service refused to delete, in this pass
}

// String returns "1,234 objects removed".
func (p *Progress) String() string {
	s := Count(int(p.objects.Load()), "object") + " removed"
	if n := p.uploads.Load(); n > 0 {
		s += ", " + Count(int(n), "unfinished upload") + " aborted"
	}
	if n := p.refused.Load(); n > 0 {
		s += ", " + Count(int(n), "object") + " refused by the service"
	}
	return s
}

// Count returns "1,234 objects".
func Count(n int, what string) string {
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if n != 1 {
		what += "s"
	}
	return digits + " " + what
}
