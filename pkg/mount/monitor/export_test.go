package monitor

import (
	"context"
	"sync"
)

// Pass is one reconcile pass.
func (m *Monitor) Pass(ctx context.Context) error { return m.reconcile(ctx) }

// ProbeAll is one probe of all clients.
func (m *Monitor) ProbeAll(ctx context.Context) {
	var wg sync.WaitGroup
	m.probeAll(ctx, &wg)
	wg.Wait()
}
