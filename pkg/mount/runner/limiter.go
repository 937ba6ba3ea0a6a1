package runner

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// maxStarts is how many mounts of one backend start at a time, so that an unreachable backend does not delay those of others.
const maxStarts = 32

// startLimiter limits the cold starts of each backend, in order of arrival.
type startLimiter struct {
	mu        sync.Mutex
	byBackend map[string]*semaphore.Weighted
}

// acquire waits for a turn. release must be called.
func (l *startLimiter) acquire(ctx context.Context, backend string) (release func(), err error) {
	l.mu.Lock()
	if l.byBackend == nil {
		l.byBackend = map[string]*semaphore.Weighted{}
	}
	s := l.byBackend[backend]
	if s == nil {
		s = semaphore.NewWeighted(maxStarts)
		l.byBackend[backend] = s
	}
	l.mu.Unlock()
	if err := s.Acquire(ctx, 1); err != nil {
		return nil, fault.Errorf(fault.Busy, "%d mounts of backend %s are already starting, and none finished in time: %w", maxStarts, backend, err)
	}
	return func() { s.Release(1) }, nil
}
