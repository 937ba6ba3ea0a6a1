package mount

import (
	"context"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// flights is the work under way, one piece for each target. A retry of the same request joins the running one; another
// request for the same target is told that it is busy.
type flights struct {
	mu sync.Mutex
	at map[string]*flight
	wg sync.WaitGroup
}

type flight struct {
	request string // what is being done, for comparing
	done    chan struct{}
	err     error // valid when done is closed
}

// do runs work for target, or joins it, and waits until it ends or ctx does. The work goes on without its callers: a
// caller that timed out comes back and joins it.
func (f *flights) do(ctx context.Context, target, request string, work func() error) error {
	f.mu.Lock()
	fl := f.at[target]
	switch {
	case fl == nil:
		fl = &flight{request: request, done: make(chan struct{})}
		if f.at == nil {
			f.at = map[string]*flight{}
		}
		f.at[target] = fl
		f.wg.Go(func() {
			fl.err = work()
			f.mu.Lock()
			delete(f.at, target)
			f.mu.Unlock()
			close(fl.done)
		})
	case fl.request != request:
		f.mu.Unlock()
		return fault.Errorf(fault.Busy, "another request for target %s is under way", target)
	}
	f.mu.Unlock()
	select {
	case <-fl.done:
		return fl.err
	case <-ctx.Done():
		return fault.Errorf(fault.Timeout, "target %s: still at work; a retry joins it: %w", target, context.Cause(ctx))
	}
}

// wait waits until nothing is under way, for at most d.
func (f *flights) wait(d time.Duration) {
	idle := make(chan struct{})
	go func() { f.wg.Wait(); close(idle) }() // ends with the last flight, whose own bounds hold
	select {
	case <-idle:
	case <-time.After(d):
	}
}
