package launcher

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// census tells which uids have live processes. A look goes over all processes of the host, and when a hundred mounts start
// at once a hundred ask: those that ask while a look is under way share the next one.
type census struct {
	mu   sync.Mutex
	next *count
	turn sync.Mutex // one look at a time
}

// count is one look. alive and err are final when done is closed.
type count struct {
	done  chan struct{}
	alive map[uint32]bool
	err   error
}

// censusBound bounds a look, which reads nothing but /proc.
const censusBound = 30 * time.Second

// take gives the uids that have processes at a moment after the call.
func (c *census) take(ctx context.Context) (map[uint32]bool, error) {
	c.mu.Lock()
	look := c.next
	if look == nil {
		look = &count{done: make(chan struct{})}
		c.next = look
		go c.look(context.WithoutCancel(ctx), look) // it is not only this caller's
	}
	c.mu.Unlock()
	select {
	case <-look.done:
		return look.alive, look.err
	case <-ctx.Done():
		return nil, fmt.Errorf("look for processes: %w", context.Cause(ctx))
	}
}

func (c *census) look(ctx context.Context, look *count) {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.mu.Lock()
	c.next = nil // whoever comes from now on has to see what begins from now on
	c.mu.Unlock()
	defer close(look.done)
	ctx, cancel := context.WithTimeout(ctx, censusBound)
	defer cancel()
	look.alive = map[uint32]bool{}
	look.err = eachProcess(ctx, func(_ int, status []byte) {
		if uid, ok := statusUID(status); ok && uid >= minUID && !look.alive[uid] && statusIsOf(status, uid) {
			look.alive[uid] = true
		}
	})
}
