package provision

import (
	"context"
	"sync"
	"time"
)

const (
	minPause = 200 * time.Millisecond
	maxPause = 20 * time.Second
)

// throttle bounds how many deletion requests are under way at a service, and gives way when the service asks to slow down:
// half as many at once and a pause, then slowly more again.
type throttle struct {
	max int

	mu     sync.Mutex
	limit  int
	busy   int
	good   int           // answers since the limit changed
	pause  time.Duration // of the next slow-down
	until  time.Time     // nothing is sent before
	change chan struct{} // closed when a waiter may have a chance
}

func newThrottle(limit int) *throttle {
	return &throttle{max: limit, limit: limit, pause: minPause, change: make(chan struct{})}
}

// acquire waits for a place. The place must be given back by release.
func (t *throttle) acquire(ctx context.Context) error {
	for {
		t.mu.Lock()
		wait := time.Until(t.until)
		if wait <= 0 && t.busy < t.limit {
			t.busy++
			t.mu.Unlock()
			return nil
		}
		change := t.change
		t.mu.Unlock()
		if wait <= 0 {
			wait = time.Minute // until a place is free
		}
		timer := time.NewTimer(wait)
		select {
		case <-change:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		timer.Stop()
	}
}

// release gives a place back. slow says that the service wanted less.
func (t *throttle) release(slow bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.busy--
	now := time.Now()
	switch {
	case slow && now.Before(t.until): // of the same burst
	case slow:
		t.limit, t.good = max(1, t.limit/2), 0
		t.until = now.Add(t.pause)
		t.pause = min(maxPause, 2*t.pause)
	default:
		if t.good++; t.good >= 2*t.limit {
			t.limit, t.good, t.pause = min(t.max, t.limit+1), 0, max(minPause, t.pause/2)
		}
	}
	close(t.change)
	t.change = make(chan struct{})
}

// throttle is the one of the backend: all deletions there share it.
func (p *Provisioner) throttle(name string) *throttle {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.throttles[name]
	if t == nil {
		t = newThrottle(p.workers)
		p.throttles[name] = t
	}
	return t
}
