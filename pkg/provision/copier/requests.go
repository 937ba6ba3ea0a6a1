package copier

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// requests sends the requests of a task, as long as that is wanted.
type requests struct {
	Task
	*Copier
	throttle *throttle.Throttle
	checked  atomic.Pointer[time.Time] // when still succeeded last
	checking sync.Mutex
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
	r.checking.Lock()
	defer r.checking.Unlock()
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

// unanswered notes that a request ended without an answer.
func (r *requests) unanswered() {
	if r.Unanswered != nil {
		r.Unanswered()
	}
}
