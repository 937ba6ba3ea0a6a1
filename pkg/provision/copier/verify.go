package copier

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// verifiers is how many segments are read and compared at a time.
const verifiers = 8

// verify compares the target with the manifest, page by page: keys, sizes and ETags, and the totals. It removes objects that are in no
// segment, which a process that was killed or that lost a race left, and unfinished uploads.
func (r *run) verify(ctx context.Context, last segment) error {
	err := r.Uploads.UploadsBelow(ctx, r.Target.Bucket, r.Target.Prefix, func(key, id string) error {
		if err := buckets.CheckBelow(r.Target.Prefix, key); err != nil {
			return err
		}
		r.abort(ctx, key, id)
		return nil
	})
	if err != nil {
		return backend.Classify(err, "listing unfinished uploads below "+r.Target.String())
	}
	var mu sync.Mutex
	var sum Totals
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(verifiers)
	before := make(chan string, 1) // the last key of the segment before
	before <- ""
	for n := 0; n <= last.Number; n++ {
		mine := before
		next := make(chan string, 1)
		before = next
		g.Go(func() error {
			s, err := readSegment(ctx, r.Store, r.Target.Bucket, r.Manifest, n)
			if err != nil {
				return err
			}
			next <- s.Last
			mu.Lock()
			for _, e := range s.Objects {
				sum.Objects++
				sum.Bytes += e.Size
			}
			mu.Unlock()
			select {
			case after := <-mine:
				return r.verifySegment(ctx, after, s)
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if sum.Objects != last.Totals.Objects || sum.Bytes != last.Totals.Bytes {
		return fault.Errorf(fault.Precondition, "the segments of the manifest %s have %d objects and %d bytes, the last one says %d and %d", r.Manifest, sum.Objects, sum.Bytes, last.Totals.Objects, last.Totals.Bytes)
	}
	return nil
}

// verifySegment compares the target with a segment, in the range of its page.
func (r *run) verifySegment(ctx context.Context, after string, s segment) error {
	want := make(map[string]entry, len(s.Objects))
	for _, e := range s.Objects {
		want[e.Key] = e
	}
	var extra []string
	var differs error
	_, err := r.there(ctx, r.Target, after, s.Last, !s.More, func(o Object) {
		e, ok := want[o.Key]
		delete(want, o.Key)
		switch {
		case !ok && r.Keep:
		case !ok:
			extra = append(extra, o.Key)
		case e.Size != o.Size, e.ETag != "" && o.ETag != "" && e.ETag != o.ETag:
			differs = fault.Errorf(fault.Precondition, "the copy of %q below %s has %d bytes and ETag %s, the manifest says %d and %s: another program changed it, or the service ignores the conditions of copies",
				o.Key, r.Target, o.Size, o.ETag, e.Size, e.ETag)
		}
	})
	if err != nil || differs != nil {
		if err == nil {
			err = differs
		}
		return err
	}
	for key := range want {
		return fault.Errorf(fault.Precondition, "%d copied objects are missing below %s, for example %q: another program deleted them", len(want), r.Target, key)
	}
	for _, key := range extra {
		klog.FromContext(ctx).V(2).Info("Removing object that is not in the manifest", "bucket", r.Target.Bucket.Info.Name, "key", r.Target.Prefix+key)
		if err := r.drop(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
