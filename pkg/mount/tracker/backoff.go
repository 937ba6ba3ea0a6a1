package tracker

import "time"

const (
	// A client that ran for stable before it exited is restarted at once. Each exit after a shorter time, and each failure to
	// start, doubles the pause before the next restart.
	stable     = 10 * time.Minute
	firstPause = time.Second
	maxPause   = 2 * time.Minute
)

// Cause is why a client must be restarted.
type Cause struct {
	Reason string // for metrics: one of the Reason constants
	Detail string // for people
}

// Why a client was restarted.
const (
	ReasonCrash  = "crash"   // it exited
	ReasonOOM    = "oom"     // it was OOM-killed
	ReasonHang   = "hang"    // it was unresponsive and killed
	ReasonHelper = "helper"  // its helper exited
	ReasonSource = "source"  // its source was unmounted by another process
	ReasonConfig = "backend" // the backend's configuration changed
	ReasonSecret = "secret"  // it uses keys that its secret no longer has
)

// backoff is the crash-loop backoff of a mount's client. It is lost when the driver restarts, which costs one restart.
type backoff struct {
	tries int       // since the client last ran for stable
	last  time.Time // of the last restart, or failure of one
	cause Cause     // of an exit after which no restart has succeeded yet
}

// RestartPause returns how long to wait before the client is restarted.
func (m *Mount) RestartPause() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	since := m.t.now().Sub(m.backoff.last)
	if m.backoff.tries == 0 || since >= stable {
		return 0
	}
	pause := firstPause
	for i := 1; i < m.backoff.tries && pause < maxPause; i++ {
		pause *= 2
	}
	return max(0, min(pause, maxPause)-since)
}

// Exited notes why the client must be restarted and returns the cause to report: until a restart succeeds, clients that could not
// be started do not hide the cause of the exit before them.
func (m *Mount) Exited(cause Cause) Cause {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.backoff.cause.Reason == "" || cause.Reason == ReasonOOM {
		m.backoff.cause = cause
	}
	return m.backoff.cause
}

// RestartDone notes the result of a restart.
func (m *Mount) RestartDone(succeeded bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.t.now()
	if now.Sub(m.backoff.last) >= stable {
		m.backoff.tries = 0
	}
	m.backoff.tries++
	m.backoff.last = now
	if succeeded {
		m.backoff.cause = Cause{}
	}
}
