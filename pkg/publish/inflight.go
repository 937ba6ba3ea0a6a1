package publish

import (
	"context"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// inflight are the requests in flight, one for each target. A retry of the same request joins the running one; another request for
// the target is refused as busy.
type inflight struct {
	mu       sync.Mutex
	byTarget map[string]*call
	wg       sync.WaitGroup
}

type call struct {
	request string // for comparing
	done    chan struct{}
	err     error // valid when done is closed
}

// do runs work for a target, or joins it, and waits until it has finished or ctx ends. The work does not end with its callers: one
// that timed out retries and joins it.
func (f *inflight) do(ctx context.Context, target, request string, work func() error) error {
	f.mu.Lock()
	c := f.byTarget[target]
	switch {
	case c == nil:
		c = &call{request: request, done: make(chan struct{})}
		if f.byTarget == nil {
			f.byTarget = map[string]*call{}
		}
		f.byTarget[target] = c
		f.wg.Go(func() {
			c.err = work()
			f.mu.Lock()
			delete(f.byTarget, target)
			f.mu.Unlock()
			close(c.done)
		})
	case c.request != request:
		f.mu.Unlock()
		return fault.Errorf(fault.Busy, "another request for target %s is in flight", target)
	}
	f.mu.Unlock()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return fault.Errorf(fault.Timeout, "target %s: the request is still in progress, and a retry joins it: %w", target, context.Cause(ctx))
	}
}

// wait waits until no request is in flight, for at most d.
func (f *inflight) wait(d time.Duration) {
	idle := make(chan struct{})
	go func() { f.wg.Wait(); close(idle) }() // ends with the last request, which is bounded
	select {
	case <-idle:
	case <-time.After(d):
	}
}
