package launcher

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// processScan finds the uids that have running processes of mounts. A scan reads the status of every process on the host.
// Callers that arrive during a scan share the next one, so that a hundred mounts that start at once do not need a hundred scans.
type processScan struct {
	find finder // nil: findOnHost

	mu      sync.Mutex
	next    *scanResult
	last    *scanResult // of the latest successful scan
	running sync.Mutex  // held by the one scan that runs
}

// scanResult is the result of one scan. uids and err are final when done is closed.
type scanResult struct {
	began time.Time
	done  chan struct{}
	uids  map[uint32]bool
	err   error
}

const (
	// scanTimeout bounds a scan, which reads only /proc.
	scanTimeout = 30 * time.Second
	// maxScanAge is the age up to which a scan is accepted as proof that a uid is free. The reconcile loop scans more often.
	maxScanAge = 3 * time.Minute
)

// free reports whether no process of a mount has a uid; see Process.Free.
func (s *processScan) free(ctx context.Context, uid uint32) (bool, error) {
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	if last != nil && time.Since(last.began) < maxScanAge && !last.uids[uid] {
		return true, nil
	}
	uids, err := s.uids(ctx)
	return err == nil && !uids[uid], err
}

// uids returns the uids that have processes, from a scan that begins after the call.
func (s *processScan) uids(ctx context.Context) (map[uint32]bool, error) {
	s.mu.Lock()
	result := s.next
	if result == nil {
		result = &scanResult{done: make(chan struct{})}
		s.next = result
		go s.run(context.WithoutCancel(ctx), result) // other callers share it
	}
	s.mu.Unlock()
	select {
	case <-result.done:
		return result.uids, result.err
	case <-ctx.Done():
		return nil, fmt.Errorf("look for processes: %w", context.Cause(ctx))
	}
}

// run fills in a result, after the scan that is running.
func (s *processScan) run(ctx context.Context, result *scanResult) {
	s.running.Lock()
	defer s.running.Unlock()
	s.mu.Lock()
	s.next = nil // callers from now on need a scan that begins later
	s.mu.Unlock()
	defer close(result.done)
	result.began = time.Now()
	ctx, cancel := context.WithTimeout(ctx, scanTimeout)
	defer cancel()
	find := s.find
	if find == nil {
		find = findOnHost
	}
	found := make(chan map[uint32]bool, 1) // buffered: after ctx ends, no caller receives it
	result.err = find(ctx, func(is member) error {
		uids := map[uint32]bool{}
		err := eachProcess(ctx, func(pid int, status proc.Status) {
			if uid, _, ok := status.UIDs(); ok && uid >= minUID && !uids[uid] && runsAs(status, uid) && is(pid, uid, status) {
				uids[uid] = true
			}
		})
		found <- uids
		return err
	})
	if result.err == nil {
		result.uids = <-found
		s.mu.Lock()
		defer s.mu.Unlock()
		s.last = result
	}
}
