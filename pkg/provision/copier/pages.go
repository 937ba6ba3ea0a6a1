package copier

import (
	"context"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// pageWork is a page in progress.
type pageWork struct {
	page Page
	// entries has an entry for each object of the page, without a key until it is copied, and if it was deleted meanwhile.
	entries []entry
	missing []int // the objects that are to be copied
	changed atomic.Int64
	left    atomic.Int64  // objects without an entry, and one for the reader
	done    chan struct{} // closed when left is 0
}

func newPageWork(page Page) *pageWork {
	w := &pageWork{page: page, entries: make([]entry, len(page.Objects)), done: make(chan struct{})}
	w.left.Store(int64(len(page.Objects)) + 1)
	return w
}

// setEntry sets the entry of an object. Each is set once.
func (w *pageWork) setEntry(i int, e entry) {
	w.entries[i] = e
	w.release()
}

func (w *pageWork) release() {
	if w.left.Add(-1) == 0 {
		close(w.done)
	}
}

// object is one object to copy.
type object struct {
	of *pageWork
	i  int
}

// writeManifest writes the segments of the source's pages that are not written yet, and returns the last one.
func (r *run) writeManifest(ctx context.Context) (segment, error) {
	last, err := r.lastSegment(ctx)
	if err != nil {
		return segment{}, err
	}
	for last.More {
		r.progress.set(last.Totals)
		if last, err = r.stream(ctx, last); err != nil {
			return segment{}, err
		}
	}
	return last, nil
}

// stream writes the segments after one, and returns the last one. One goroutine reads the pages and hands their objects to the workers, one for
// each request that may be in flight, and one writes the segments of pages that are complete. At most three pages are in memory.
//
// It returns early if another process wrote a segment that ends elsewhere than the page of this one.
func (r *run) stream(ctx context.Context, last segment) (segment, error) {
	g, ctx := errgroup.WithContext(ctx)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	pages := make(chan *pageWork, 1)
	objects := make(chan object, pageSize) // while the next page is read, the workers have those of this one
	g.Go(func() error {
		defer close(pages)
		defer close(objects)
		return r.readPages(ctx, last, pages, objects)
	})
	for range r.workers { // they stay, because the stack of a new goroutine grows with its first request
		g.Go(func() error { return r.copyObjects(ctx, objects) })
	}
	early := false
	g.Go(func() (err error) {
		if last, early, err = r.writeSegments(ctx, last, pages); early {
			stop()
		}
		return err
	})
	if err := g.Wait(); err != nil && !early {
		return segment{}, err
	}
	return last, nil
}

// readPages reads the pages after a segment and hands them and their objects on.
func (r *run) readPages(ctx context.Context, last segment, pages chan<- *pageWork, objects chan<- object) error {
	after, more := last.Last, true
	for number := last.Number + 1; more; number++ {
		if err := r.requests.checkWanted(ctx); err != nil {
			return err
		}
		page, err := r.readPage(ctx, number, after)
		if err != nil {
			return err
		}
		w := newPageWork(page)
		if err := r.prepare(ctx, after, w); err != nil {
			return err
		}
		select {
		case pages <- w:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		for _, i := range w.missing {
			select {
			case objects <- object{w, i}:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		w.release()
		after, more = page.Last, page.More
	}
	return nil
}

// findMissing finds out which objects of a page are at the target.
func (r *run) findMissing(ctx context.Context, after string, w *pageWork) error {
	if len(w.page.Objects) == 0 {
		return nil
	}
	there := map[string]Object{}
	if err := r.listSpan(ctx, span{r.target, after, w.page.Last, !w.page.More}, func(o Object) { there[o.Key] = o }); err != nil {
		return err
	}
	for i, o := range w.page.Objects {
		have, ok := there[o.Key]
		switch {
		case !ok:
			w.missing = append(w.missing, i)
		case have.Size != o.Size && o.Fixed:
			return r.errLost(o)
		default: // copied before this run
			w.setEntry(i, entry{Key: o.Key, Size: have.Size, ETag: have.ETag, Version: o.Version})
			r.countObject(have.Size)
		}
	}
	return nil
}

// copyObjects copies objects until there are no more.
func (r *run) copyObjects(ctx context.Context, objects <-chan object) error {
	for o := range objects {
		e, changed, err := r.copyObject(ctx, o.of.page.Objects[o.i])
		if err != nil {
			return err
		}
		if changed {
			o.of.changed.Add(1)
			r.progress.changed.Add(1)
		}
		if e.Key != "" {
			r.countObject(e.Size)
		}
		o.of.setEntry(o.i, e)
	}
	return nil
}

// goneAttempts is how often a page is listed again to find out whether objects are gone, because listings may be older than deletions.
const goneAttempts = 3

// confirmGone lists a page again in which objects have disappeared. What is still listed is copied, if it has come back. Otherwise the name in the
// listing is not that of the object, which a copy would lack.
func (r *run) confirmGone(ctx context.Context, after string, w *pageWork) error {
	gone := map[string]int{}
	for i, e := range w.entries {
		if e.Key == "" {
			gone[w.page.Objects[i].Key] = i
		}
	}
	for attempt := 1; len(gone) > 0; attempt++ {
		var listed []Object
		if err := r.listSpan(ctx, span{of: r.from, after: after, last: w.page.Last}, func(o Object) {
			if _, ok := gone[o.Key]; ok {
				listed = append(listed, o)
			}
		}); err != nil {
			return err
		}
		var left []string
		for _, o := range listed {
			e, _, err := r.copyObject(ctx, o)
			if err != nil {
				return err
			}
			if e.Key == "" {
				left = append(left, o.Key)
				continue
			}
			r.countObject(e.Size)
			w.entries[gone[o.Key]] = e
			delete(gone, o.Key)
		}
		switch {
		case len(left) == 0:
			return nil
		case attempt == goneAttempts:
			return fault.Errorf(fault.Precondition,
				"%s of %s cannot be copied: the service lists these keys, but has no such objects: the names in its listing are not those of the objects; "+
					"give them names without special characters", buckets.Quoted(left), r.from)
		case !throttle.Pause(ctx, attempt):
			return context.Cause(ctx)
		}
	}
	return nil
}

// countObject adds an object to the progress.
func (r *run) countObject(size int64) {
	r.progress.objects.Add(1)
	r.progress.bytes.Add(size)
}

// writeSegments writes the segments of pages, in their order, when they are complete. early is set if another process wrote a segment that ends
// elsewhere: then the pages that follow are not those of the copy.
func (r *run) writeSegments(ctx context.Context, last segment, pages <-chan *pageWork) (_ segment, early bool, err error) {
	for w := range pages {
		select {
		case <-w.done:
		case <-ctx.Done():
			return last, false, context.Cause(ctx)
		}
		if err := r.confirmGone(ctx, last.Last, w); err != nil {
			return last, false, err
		}
		s := last.next(w.page, slices.DeleteFunc(w.entries, func(e entry) bool { return e.Key == "" }))
		s.Totals.Changed += w.changed.Load()
		if err := r.task.Limits.check(s.Totals, !w.page.More); err != nil {
			return last, false, err
		}
		if last, err = r.writeSegment(ctx, s); err != nil {
			return last, false, err
		}
		klog.FromContext(ctx).V(4).Info("Wrote manifest segment", "page", last.Number, "objects", last.Totals.Objects, "bytes", last.Totals.Bytes)
		if last.Last != w.page.Last || last.More != w.page.More {
			return last, true, nil
		}
	}
	return last, false, nil
}
