package conc

import (
	"context"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Cache keeps results, including errors, and shares one load among concurrent callers of the same key.
//
// Unlike a load of x/sync/singleflight, one of a Cache is cancelled when its last caller leaves, and its result is not kept if
// the key was invalidated meanwhile.
type Cache[K comparable, V any] struct {
	now   func() time.Time
	size  int
	bound time.Duration
	keep  func(V, error) time.Duration
	mu    sync.Mutex
	known map[K]entry[V]
	loads map[K]*load[V]
}

type entry[V any] struct {
	value V
	err   error
	until time.Time
}

type load[V any] struct {
	callers int
	cancel  context.CancelFunc
	done    chan struct{} // closed when value and err are set
	value   V
	err     error
}

// NewCache returns a cache of at most size results. bound is the timeout of one load, regardless of its callers. keep returns how long a
// result is kept; 0 means not at all.
func NewCache[K comparable, V any](now func() time.Time, size int, bound time.Duration, keep func(V, error) time.Duration) *Cache[K, V] {
	return &Cache[K, V]{now: now, size: size, bound: bound, keep: keep, known: map[K]entry[V]{}, loads: map[K]*load[V]{}}
}

// Get returns the kept result, or that of the load in flight, or that of fn. It returns a Timeout when ctx ends. The context of
// fn has the values of the first caller's.
func (c *Cache[K, V]) Get(ctx context.Context, key K, fn func(context.Context) (V, error)) (V, error) {
	var none V
	if err := ctx.Err(); err != nil {
		return none, fault.Errorf(fault.Timeout, "%w", err)
	}
	c.mu.Lock()
	if e, ok := c.peek(key); ok {
		c.mu.Unlock()
		return e.value, e.err
	}
	l, ok := c.loads[key]
	if !ok {
		l = &load[V]{done: make(chan struct{})}
		var loading context.Context
		loading, l.cancel = context.WithTimeout(context.WithoutCancel(ctx), c.bound) //nolint:gosec // run and leave cancel it
		c.loads[key] = l
		go c.run(loading, key, l, fn)
	}
	l.callers++
	c.mu.Unlock()

	select {
	case <-l.done:
		return l.value, l.err
	case <-ctx.Done():
		c.leave(key, l)
		return none, fault.Errorf(fault.Timeout, "%w", ctx.Err())
	}
}

// Peek returns the kept result, if there is one. It does not load.
func (c *Cache[K, V]) Peek(key K) (value V, ok bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.peek(key)
	return e.value, ok, e.err
}

func (c *Cache[K, V]) peek(key K) (entry[V], bool) {
	e, ok := c.known[key]
	if ok && !c.now().Before(e.until) {
		delete(c.known, key)
		return entry[V]{}, false
	}
	return e, ok
}

// Put keeps a result that was determined without Get, for the time that keep returns.
func (c *Cache[K, V]) Put(key K, value V, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(key, value, err)
}

// put makes room by dropping what has expired, or else what would expire first.
func (c *Cache[K, V]) put(key K, value V, err error) {
	now, ttl := c.now(), c.keep(value, err)
	if ttl <= 0 {
		return
	}
	if _, ok := c.known[key]; !ok && len(c.known) >= c.size {
		var first K
		var found bool
		for k, old := range c.known {
			if !now.Before(old.until) {
				delete(c.known, k)
			} else if !found || old.until.Before(c.known[first].until) {
				first, found = k, true
			}
		}
		if len(c.known) >= c.size {
			delete(c.known, first)
		}
	}
	c.known[key] = entry[V]{value, err, now.Add(ttl)}
}

func (c *Cache[K, V]) run(ctx context.Context, key K, l *load[V], fn func(context.Context) (V, error)) {
	defer l.cancel()
	l.value, l.err = fn(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loads[key] == l { // otherwise it was abandoned or invalidated meanwhile, and its result must not be kept
		delete(c.loads, key)
		c.put(key, l.value, l.err)
	}
	close(l.done)
}

func (c *Cache[K, V]) leave(key K, l *load[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.callers--; l.callers > 0 {
		return
	}
	l.cancel()
	if c.loads[key] == l {
		delete(c.loads, key)
	}
}

// Invalidate drops the results of all keys that match, and discards those of loads in flight.
func (c *Cache[K, V]) Invalidate(match func(K) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.known {
		if match(k) {
			delete(c.known, k)
		}
	}
	for k := range c.loads {
		if match(k) {
			delete(c.loads, k)
		}
	}
}
