package mount

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

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

// startWidth is how many mounts of one backend come up at a time: a backend that does not answer takes no other's turn.
const startWidth = 32

// gates let in a bounded number for each name, in the order of their coming.
type gates struct {
	mu sync.Mutex
	of map[string]*semaphore.Weighted
}

// take waits for a turn and gives what ends it.
func (g *gates) take(ctx context.Context, name string) (release func(), err error) {
	g.mu.Lock()
	if g.of == nil {
		g.of = map[string]*semaphore.Weighted{}
	}
	if g.of[name] == nil {
		g.of[name] = semaphore.NewWeighted(startWidth)
	}
	gate := g.of[name]
	g.mu.Unlock()
	if err := gate.Acquire(ctx, 1); err != nil {
		return nil, fault.Errorf(fault.Busy, "%d mounts of backend %s are being started, and none came to its end within the deadline: %w", startWidth, name, err)
	}
	return func() { gate.Release(1) }, nil
}

// seen is a set of names.
type seen struct {
	mu    sync.Mutex
	names map[string]bool
}

// first adds a name and tells whether it was not there.
func (s *seen) first(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names[name] {
		return false
	}
	if s.names == nil {
		s.names = map[string]bool{}
	}
	s.names[name] = true
	return true
}

func (s *seen) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.names, name)
}
