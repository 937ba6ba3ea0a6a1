package monitor

import (
	"context"
	"sync"
	"time"
)

// lingerRetry is the time until a lingering mount that did not end is reconciled again.
const lingerRetry = 5 * time.Second

// watchLingers reconciles each lingering mount when its time is over, until ctx ends.
func (m *Monitor) watchLingers(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ending, ended := map[string]bool{}, make(chan string)
	for {
		changed := m.Tracker.LingerChanged()
		wait := reconcileEvery
		for _, l := range m.Tracker.Lingering() {
			left := time.Until(l.Until)
			switch {
			case ending[l.Name]:
			case left > 0:
				wait = min(wait, left)
			default:
				ending[l.Name] = true
				wg.Go(func() {
					m.endLinger(ctx, l.Name)
					select {
					case ended <- l.Name:
					case <-ctx.Done():
					}
				})
			}
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-changed:
		case name := <-ended:
			delete(ending, name)
		case <-timer.C:
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// endLinger reconciles a mount whose time to linger is over. If the mount does not end, it returns when the next attempt is due.
func (m *Monitor) endLinger(ctx context.Context, name string) {
	_, gone, err := m.Mounts.Reconcile(ctx, name)
	if gone || ctx.Err() != nil {
		return
	}
	if err != nil {
		m.Tracker.LogError(ctx, name, err, "Cannot end lingering mount", "mount", name, "retryIn", lingerRetry)
	}
	select {
	case <-ctx.Done():
	case <-time.After(lingerRetry):
	}
}
