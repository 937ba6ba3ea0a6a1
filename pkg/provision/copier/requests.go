package copier

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// requests sends the requests of a task, as long as that is wanted.
type requests struct {
	Task
	*Copier
	throttle *throttle.Throttle
	limit    *atomic.Int64             // see Copier.limits
	checked  atomic.Pointer[time.Time] // when still succeeded last
	checking chan struct{}             // holds a token during a check
}

func (r *requests) still(ctx context.Context) error {
	if r.Still == nil {
		return nil
	}
	began := time.Now().Round(0) // by the wall clock, which also counts the time for which the machine was suspended
	if err := r.Still(ctx); err != nil {
		return err
	}
	r.checked.Store(&began)
	return nil
}

// wanted is still for a check that is no part of a request, and is repeated while the service is busy.
func (r *requests) wanted(ctx context.Context) error { return throttle.Repeat(ctx, r.still) }

// recheck is still for a process that may have been slow, or stopped, since the last check.
func (r *requests) recheck(ctx context.Context) error {
	fresh := func() bool {
		last := r.checked.Load()
		if last == nil {
			return r.Still == nil
		}
		age := time.Now().Round(0).Sub(*last)
		return age >= 0 && age < r.CheckEvery
	}
	if fresh() {
		return nil
	}
	select {
	case r.checking <- struct{}{}:
		defer func() { <-r.checking }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if fresh() {
		return nil
	}
	return r.still(ctx)
}

// send sends a request that is part of the run. It may wait for a while and be repeated, so that the copy may not be wanted any more.
func (r *requests) send(ctx context.Context, request func(context.Context) error) error {
	return r.throttle.Send(ctx, throttle.Long, func(ctx context.Context) error {
		if r.checked.Load() != nil {
			if err := r.recheck(ctx); err != nil {
				return err
			}
		}
		return request(ctx)
	})
}

// bounded sends one request with a timeout.
func (r *requests) bounded(ctx context.Context, request func(context.Context) error) error {
	return r.send(ctx, func(ctx context.Context) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		ctx, cancel := r.Whole(ctx)
		defer cancel()
		err := request(ctx)
		if backend.MayArrive(err) {
			r.unanswered()
		}
		return err
	})
}

// slowShare is the part of a request's timeout after which a request without a response was too slow. One that fails earlier is not.
const slowShare = 8

// errSlow means that the service did not finish a copy in time.
var errSlow = errors.New("the service did not copy so much data in time")

// copying sends a request that copies n bytes, for which the service may be silent as long as the request may take. If the service is too slow,
// the error is errSlow, and later requests copy at most half as much. n 0: the request has no smaller form.
func (r *requests) copying(ctx context.Context, n int64, request func(context.Context) error) error {
	return r.bounded(ctx, func(ctx context.Context) error {
		began := time.Now()
		err := request(backend.WithoutHeaderTimeout(ctx))
		if n <= minPart || !backend.MayArrive(err) || time.Since(began) < r.Bound/slowShare {
			return err
		}
		smaller := max(minPart, n/2)
		for now := r.limit.Load(); smaller < now && !r.limit.CompareAndSwap(now, smaller); {
			now = r.limit.Load()
		}
		klog.FromContext(ctx).Info("Copy timed out, copying smaller parts", "backend", r.Target.Bucket.Backend.Name, "bytes", n, "partBytes", smaller, "reason", err)
		return fault.Errorf(fault.Busy, "%w: %w", errSlow, err)
	})
}

// unanswered notes that a request ended without an answer.
func (r *requests) unanswered() {
	if r.Unanswered != nil {
		r.Unanswered()
	}
}
