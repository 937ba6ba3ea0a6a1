// Package conc has what concurrent callers share: locks by name, reads, a cache, and a bound of the log.
package conc

import (
	"context"
	"sync"
)

// Locks is a set of locks by name. A name has one holder at a time; different names are independent. The zero value is ready for use.
// Unused names take no memory.
type Locks struct {
	mu    sync.Mutex
	names map[string]*lock
}

type lock struct {
	held  chan struct{} // holds one token while the lock is taken
	users int           // holder and waiters
}

// Lock acquires the lock of name and returns the function that releases it, which must be called once. If ctx ends first, Lock
// returns its cause.
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

// TryLock acquires the lock of name if it is free.
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
