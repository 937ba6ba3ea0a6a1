package copier

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// requests sends the requests of a task, as long as the copy is wanted.
type requests struct {
	copier     *Copier
	backend    string
	still      func(context.Context) error // Task.Still
	unanswered func()                      // Task.Unanswered
	throttle   *throttle.Throttle
	limit      *atomic.Int64             // see Copier.limits
	checked    atomic.Pointer[time.Time] // when still succeeded last
	checking   chan struct{}             // holds a token during a check
}

// checkOnce returns an error if the copy is no longer wanted.
func (q *requests) checkOnce(ctx context.Context) error {
	if q.still == nil {
		return nil
	}
	began := time.Now().Round(0) // by the wall clock, which also counts the time for which the machine was suspended
	if err := q.still(ctx); err != nil {
		return err
	}
	q.checked.Store(&began)
	return nil
}

// checkWanted is checkOnce for a check that is no part of a request, and is repeated while the service is busy.
func (q *requests) checkWanted(ctx context.Context) error { return throttle.Repeat(ctx, q.checkOnce) }

// recheck is checkOnce for a process that may have been slow, or stopped, since the last check.
func (q *requests) recheck(ctx context.Context) error {
	fresh := func() bool {
		last := q.checked.Load()
		if last == nil {
			return q.still == nil
		}
		age := time.Now().Round(0).Sub(*last)
		return age >= 0 && age < q.copier.opts.CheckEvery
	}
	if fresh() {
		return nil
	}
	select {
	case q.checking <- struct{}{}:
		defer func() { <-q.checking }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if fresh() {
		return nil
	}
	return q.checkOnce(ctx)
}

// send sends a request that is part of the run. It may wait for a while and be repeated, so that the copy may not be wanted any more.
func (q *requests) send(ctx context.Context, request func(context.Context) error) error {
	return q.throttle.Send(ctx, throttle.Long, func(ctx context.Context) error {
		if q.checked.Load() != nil {
			if err := q.recheck(ctx); err != nil {
				return err
			}
		}
		return request(ctx)
	})
}

// sender sends a request.
type sender func(ctx context.Context, request func(context.Context) error) error

// call sends one request of the S3 client, without retries of the SDK.
func call[I, O any](ctx context.Context, send sender, operation func(context.Context, *I, ...func(*s3.Options)) (*O, error), in *I) (out *O, err error) {
	err = send(ctx, func(ctx context.Context) (err error) {
		out, err = operation(ctx, in, buckets.NoRetry)
		return err
	})
	return out, err
}

// sendBounded sends one request with a timeout.
func (q *requests) sendBounded(ctx context.Context, request func(context.Context) error) error {
	return q.send(ctx, func(ctx context.Context) error { return q.sendWhole(ctx, request) })
}

// sendWhole sends a request at once, and does not break it off when ctx ends.
func (q *requests) sendWhole(ctx context.Context, request func(context.Context) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	ctx, cancel := q.copier.Whole(ctx)
	defer cancel()
	err := request(ctx)
	if backend.MayArrive(err) && q.unanswered != nil {
		q.unanswered()
	}
	return err
}

// slowShare is the part of a request's timeout after which a request without a response was too slow. One that fails earlier is not.
const slowShare = 8

// errSlow means that the service did not finish a copy in time.
var errSlow = errors.New("the service did not copy so much data in time")

// copyOf returns a sender of a request that copies n bytes, for which the service may be silent as long as the request may take. If the service is
// too slow, the error is errSlow, and later requests copy at most half as much. n 0: the request has no smaller form.
func (q *requests) copyOf(n int64) sender {
	return func(ctx context.Context, request func(context.Context) error) error {
		return q.sendBounded(ctx, func(ctx context.Context) error {
			began := time.Now()
			err := request(backend.WithoutHeaderTimeout(ctx))
			if n <= minPart || !backend.MayArrive(err) || time.Since(began) < q.copier.opts.Bound/slowShare {
				return err
			}
			smaller := max(minPart, n/2)
			for now := q.limit.Load(); smaller < now && !q.limit.CompareAndSwap(now, smaller); {
				now = q.limit.Load()
			}
			klog.FromContext(ctx).Info("Copy timed out, copying smaller parts", "backend", q.backend, "bytes", n, "partBytes", smaller, "reason", err)
			return fault.Errorf(fault.Busy, "%w: %w", errSlow, err)
		})
	}
}
