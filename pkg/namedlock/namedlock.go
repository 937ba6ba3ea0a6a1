// Package namedlock locks names: one holder per name, as many names at once as there are.
package namedlock

import (
	"context"
	"sync"
)

// Locks is a set of named locks. The zero value is ready for use; names that nobody holds take no memory.
type Locks struct {
	mu    sync.Mutex
	names map[string]*lock
}

type lock struct {
	held  chan struct{} // holds one token while the lock is taken
	users int           // holder and waiters
}

// Lock takes the lock of name and returns what releases it, or ctx's error if the lock was not to be had before ctx
// ended. The release function may be called once.
func (l *Locks) Lock(ctx context.Context, name string) (release func(), err error) {
	k := l.join(name)
	select {
	case k.held <- struct{}{}:
		return func() { <-k.held; l.leave(name, k) }, nil
	case <-ctx.Done():
		l.leave(name, k)
		return nil, context.Cause(ctx)
	}
}

// TryLock takes the lock of name if nobody holds it.
func (l *Locks) TryLock(name string) (release func(), ok bool) {
	k := l.join(name)
	select {
	case k.held <- struct{}{}:
		return func() { <-k.held; l.leave(name, k) }, true
	default:
		l.leave(name, k)
		return nil, false
	}
}

func (l *Locks) join(name string) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.names[name]
	if k == nil {
		if l.names == nil {
			l.names = map[string]*lock{}
		}
		k = &lock{held: make(chan struct{}, 1)}
		l.names[name] = k
	}
	k.users++
	return k
}

func (l *Locks) leave(name string, k *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.names, name)
	}
}
