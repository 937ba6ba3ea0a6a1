package driver

import (
	"slices"
	"sync"
	"sync/atomic"
)

// Health is the state that Probe, /healthz and /readyz report. It is in memory, so that a liveness probe never waits for S3 or for a
// mount. The zero value is a driver that has not started.
type Health struct {
	serving, stopping, unfit atomic.Bool

	mu    sync.Mutex
	notes []string
}

// Serving marks the driver as serving requests.
func (h *Health) Serving() { h.serving.Store(true) }

// Stopping marks the driver as shutting down. It cannot be undone.
func (h *Health) Stopping() { h.stopping.Store(true) }

// Note adds a line to /readyz: a degraded feature and the reason. It does not change the driver's readiness.
func (h *Health) Note(text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !slices.Contains(h.notes, text) {
		h.notes = append(h.notes, text)
	}
}

// Unfit marks a driver that serves requests but must not publish volumes, and adds the reason to the notes. /readyz then fails. Probe
// does not, because a CO would restart the plugin instead of showing the error of a publication.
func (h *Health) Unfit(reason string) {
	h.Note(reason)
	h.unfit.Store(true)
}

// Alive reports whether the driver is not shutting down, for /healthz.
func (h *Health) Alive() bool { return !h.stopping.Load() }

// Ready reports whether the driver serves requests, for Probe.
func (h *Health) Ready() bool { return h.serving.Load() && h.Alive() }

// Fit reports whether the driver is ready and Unfit was not called, for /readyz.
func (h *Health) Fit() bool { return h.Ready() && !h.unfit.Load() }

// Notes returns the notes.
func (h *Health) Notes() []string { h.mu.Lock(); defer h.mu.Unlock(); return slices.Clone(h.notes) }
