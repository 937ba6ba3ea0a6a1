package driver

import (
	"slices"
	"sync"
)

// Health is what Probe, /healthz and /readyz answer from: memory only, so that a liveness probe never waits for S3 or
// for a mount. The zero value is a driver that has not started.
type Health struct {
	mu       sync.Mutex
	serving  bool
	stopping bool
	unfit    bool
	notes    []string
}

// Serving says that requests are answered from now on.
func (h *Health) Serving() { h.mu.Lock(); defer h.mu.Unlock(); h.serving = true }

// Stopping says that the driver is on its way out; there is no way back.
func (h *Health) Stopping() { h.mu.Lock(); defer h.mu.Unlock(); h.stopping = true }

// Note adds a line to what /readyz shows: something that works less well than it could, and why. It does not make the
// driver unready.
func (h *Health) Note(text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !slices.Contains(h.notes, text) {
		h.notes = append(h.notes, text)
	}
}

// Unfit marks a driver that answers requests but must not publish volumes, and adds the reason to the notes. /readyz is not ready;
// Probe still is: a CO would otherwise restart the plugin instead of showing the error of a publication.
func (h *Health) Unfit(reason string) {
	h.Note(reason)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unfit = true
}

// Alive is false once the driver is stopping: /healthz.
func (h *Health) Alive() bool { h.mu.Lock(); defer h.mu.Unlock(); return !h.stopping }

// Ready reports whether requests are answered: Probe.
func (h *Health) Ready() bool { h.mu.Lock(); defer h.mu.Unlock(); return h.serving && !h.stopping }

// Fit reports whether the driver is ready and nothing was reported by Unfit: /readyz.
func (h *Health) Fit() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.serving && !h.stopping && !h.unfit
}

// Notes are the lines of Note.
func (h *Health) Notes() []string { h.mu.Lock(); defer h.mu.Unlock(); return slices.Clone(h.notes) }
