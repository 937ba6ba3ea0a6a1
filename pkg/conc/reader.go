package conc

import (
	"context"
	"sync"
	"time"
)

// Reader runs a function that reads something. No caller gets a result that is older than its call: each gets that of a read that
// began afterwards. Callers that arrive while a read runs share the next one, so that a hundred callers at once need two reads. The
// zero value is ready for use.
type Reader[T any] struct {
	mu   sync.Mutex
	next *result[T]    // of the read that has not begun yet; nil: there is none
	last chan struct{} // closed when the latest read that was asked for is done; nil: none was
}

// result is the result of one read. value and err are final when done is closed.
type result[T any] struct {
	done  chan struct{}
	value T
	err   error
}

// Read returns the result of read, which other callers may get, too: they must not modify it. If ctx ends first, Read returns its
// cause and the read runs on for the others. read gets a context with the values of a caller's, and bounds itself.
func (r *Reader[T]) Read(ctx context.Context, read func(ctx context.Context) (T, error)) (T, error) {
	r.mu.Lock()
	res := r.next
	if res == nil {
		res = &result[T]{done: make(chan struct{})}
		go r.run(context.WithoutCancel(ctx), r.last, res, read)
		r.next, r.last = res, res.done
	}
	r.mu.Unlock()
	select {
	case <-res.done:
		return res.value, res.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

// run does a read after the one before, whose end closes before.
func (r *Reader[T]) run(ctx context.Context, before <-chan struct{}, res *result[T], read func(ctx context.Context) (T, error)) {
	if before != nil {
		<-before
	}
	r.mu.Lock()
	r.next = nil // callers from now on need a read that begins later
	r.mu.Unlock()
	defer close(res.done)
	res.value, res.err = read(ctx)
}

// Sleep waits for d. It returns false if ctx ends first.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
