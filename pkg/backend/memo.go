package backend

import (
	"context"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// memo remembers answers for a while and makes one call of many that ask for the same at the same time.
//
// A call runs in a goroutine of its own, because its askers may leave one by one; when the last one left it is cancelled.
type memo[K comparable, V any] struct {
	now   func() time.Time
	size  int                          // entries kept
	bound time.Duration                // of one call, whatever its askers allow
	keep  func(V, error) time.Duration // how long an answer is kept; 0: not at all
	mu    sync.Mutex
	known map[K]memory[V]
	calls map[K]*call[V]
}

type memory[V any] struct {
	value V
	err   error
	until time.Time
}

type call[V any] struct {
	askers int
	cancel context.CancelFunc
	done   chan struct{} // closed when value and err are set
	value  V
	err    error
}

func newMemo[K comparable, V any](now func() time.Time, size int, bound time.Duration, keep func(V, error) time.Duration) *memo[K, V] {
	return &memo[K, V]{now: now, size: size, bound: bound, keep: keep, known: map[K]memory[V]{}, calls: map[K]*call[V]{}}
}

// do gives the remembered answer, or that of the call under way, or that of fn. It returns when ctx ends, with a Timeout.
// fn's context has the values of the first asker's.
func (m *memo[K, V]) do(ctx context.Context, key K, fn func(context.Context) (V, error)) (V, error) {
	var none V
	if err := ctx.Err(); err != nil {
		return none, fault.Errorf(fault.Timeout, "%w", err)
	}
	m.mu.Lock()
	if a, ok := m.known[key]; ok {
		if m.now().Before(a.until) {
			m.mu.Unlock()
			return a.value, a.err
		}
		delete(m.known, key)
	}
	c, ok := m.calls[key]
	if !ok {
		c = &call[V]{done: make(chan struct{})}
		var callCtx context.Context
		callCtx, c.cancel = context.WithTimeout(context.WithoutCancel(ctx), m.bound) //nolint:gosec // run and leave cancel it
		m.calls[key] = c
		go m.run(callCtx, key, c, fn)
	}
	c.askers++
	m.mu.Unlock()

	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
		m.leave(key, c)
		return none, fault.Errorf(fault.Timeout, "%w", ctx.Err())
	}
}

func (m *memo[K, V]) run(ctx context.Context, key K, c *call[V], fn func(context.Context) (V, error)) {
	defer c.cancel()
	c.value, c.err = fn(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls[key] == c { // else it was given up or forgotten meanwhile, and its answer must not stay
		delete(m.calls, key)
		if d := m.keep(c.value, c.err); d > 0 {
			m.store(key, memory[V]{c.value, c.err, m.now().Add(d)})
		}
	}
	close(c.done)
}

func (m *memo[K, V]) leave(key K, c *call[V]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.askers--; c.askers > 0 {
		return
	}
	c.cancel()
	if m.calls[key] == c {
		delete(m.calls, key)
	}
}

// store makes room by dropping what is over, or else what would be over first.
func (m *memo[K, V]) store(key K, a memory[V]) {
	if _, ok := m.known[key]; !ok && len(m.known) >= m.size {
		now := m.now()
		var first K
		var found bool
		for k, old := range m.known {
			if !now.Before(old.until) {
				delete(m.known, k)
			} else if !found || old.until.Before(m.known[first].until) {
				first, found = k, true
			}
		}
		if len(m.known) >= m.size {
			delete(m.known, first)
		}
	}
	m.known[key] = a
}

// forget drops the answers of all keys that match, and those of calls under way when they come.
func (m *memo[K, V]) forget(match func(K) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range m.known {
		if match(k) {
			delete(m.known, k)
		}
	}
	for k := range m.calls {
		if match(k) {
			delete(m.calls, k)
		}
	}
}
