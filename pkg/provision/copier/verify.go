package copier

import (
	"cmp"
	"context"

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
func (r *run) verify(ctx context.Context, uploads *buckets.Opener, last segment) error {
	err := uploads.UploadsBelow(ctx, r.target.Bucket, r.target.Prefix, func(key, id string) error {
		if err := buckets.CheckBelow(r.target.Prefix, key); err != nil {
			return err
		}
		r.abortUpload(ctx, key, id)
		return nil
	})
	if err != nil {
		return backend.Classify(err, "listing unfinished uploads below "+r.target.String())
	}
	var sum Totals
	var s segment
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(verifiers)
	for n := 0; n <= last.Number && err == nil; n++ {
		after := s.Last
		if s, err = r.manifest.read(gctx, n); err == nil {
			sum.add(s.Objects)
			compared := s
			g.Go(func() error { return r.verifySegment(gctx, after, compared) })
		}
	}
	// The error of a comparison comes first: the reading may have ended only because of it.
	if err := cmp.Or(g.Wait(), err); err != nil {
		return err
	}
	if sum.Objects != last.Totals.Objects || sum.Bytes != last.Totals.Bytes {
		return fault.Errorf(fault.Precondition, "the segments of the manifest %s have %d objects and %d bytes, the last one says %d and %d",
			r.manifest.prefix, sum.Objects, sum.Bytes, last.Totals.Objects, last.Totals.Bytes)
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
	err := r.listSpan(ctx, span{r.target, after, s.Last, !s.More}, func(o Object) {
		e, ok := want[o.Key]
		delete(want, o.Key)
		switch {
		case !ok && r.task.Keep:
		case !ok:
			extra = append(extra, o.Key)
		case e.Size != o.Size, e.ETag != "" && o.ETag != "" && e.ETag != o.ETag:
			differs = fault.Errorf(fault.Precondition, "the copy of %q below %s has %d bytes and ETag %s, the manifest says %d and %s: another program changed it, "+
				"or the service ignores the conditions of copies", o.Key, r.target, o.Size, o.ETag, e.Size, e.ETag)
		}
	})
	if err := cmp.Or(err, differs); err != nil {
		return err
	}
	for key := range want {
		return fault.Errorf(fault.Precondition, "%d copied objects are missing below %s, for example %q: another program deleted them", len(want), r.target, key)
	}
	for _, key := range extra {
		klog.FromContext(ctx).V(2).Info("Removing object that is not in the manifest", "bucket", r.target.Bucket.Info.Name, "key", r.target.Prefix+key)
		if err := r.dropObject(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
