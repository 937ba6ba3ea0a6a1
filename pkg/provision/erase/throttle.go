package erase

import (
	"context"
	"sync"
	"time"
)

const (
	minPause = 200 * time.Millisecond
	maxPause = 20 * time.Second
)

// throttle limits how many deletion requests are in flight at a service. When the service asks to slow down it halves the limit and
// pauses, then slowly raises the limit again.
type throttle struct {
	max int

	mu     sync.Mutex
	limit  int
	busy   int
	good   int           // answers since the limit last changed
	pause  time.Duration // of the next slow-down
	until  time.Time     // no request is sent before
	change chan struct{} // closed when a waiter may have a chance
}

func newThrottle(limit int) *throttle {
	return &throttle{max: limit, limit: limit, pause: minPause, change: make(chan struct{})}
}

// acquire waits for a slot, which release returns.
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
			wait = time.Minute // until a slot is free
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

// release returns a slot. slow reports that the service asked to slow down.
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
