package launcher

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// census finds which uids have live processes of mounts. A look goes over all processes of the host, and when a hundred mounts
// start at once a hundred ask: those that ask while a look is under way share the next one.
type census struct {
	find finder // nil: findOnHost

	mu   sync.Mutex
	next *count
	last *count     // the latest that ended well
	turn sync.Mutex // one look at a time
}

// count is one look. alive and err are final when done is closed.
type count struct {
	began time.Time
	done  chan struct{}
	alive map[uint32]bool
	err   error
}

const (
	// censusBound bounds a look, which reads nothing but /proc.
	censusBound = 30 * time.Second
	// censusAge is how old a look may be that says that a uid is free. Whoever looks after mounts looks more often.
	censusAge = 3 * time.Minute
)

// free reports whether no process of a mount has a uid; see Process.Free.
func (c *census) free(ctx context.Context, uid uint32) (bool, error) {
	c.mu.Lock()
	last := c.last
	c.mu.Unlock()
	if last != nil && time.Since(last.began) < censusAge && !last.alive[uid] {
		return true, nil
	}
	alive, err := c.take(ctx)
	return err == nil && !alive[uid], err
}

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
	look.began = time.Now()
	ctx, cancel := context.WithTimeout(ctx, censusBound)
	defer cancel()
	find := c.find
	if find == nil {
		find = findOnHost
	}
	found := make(chan map[uint32]bool, 1) // buffered: after ctx ends, no caller receives it
	look.err = find(ctx, func(is member) error {
		alive := map[uint32]bool{}
		err := eachProcess(ctx, func(pid int, status []byte) {
			if uid, ok := statusUID(status); ok && uid >= minUID && !alive[uid] && statusIsOf(status, uid) && is(pid, uid, status) {
				alive[uid] = true
			}
		})
		found <- alive
		return err
	})
	if look.err == nil {
		look.alive = <-found
		c.mu.Lock()
		defer c.mu.Unlock()
		c.last = look
	}
}
