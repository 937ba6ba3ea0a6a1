package tracker

import (
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
)

// Drain is the observed state of a client that is being stopped. Its methods can be called by several goroutines.
type Drain struct {
	mu sync.Mutex
	drainState
}

type drainState struct {
	silent    time.Time // since when the helper does not answer; zero: it does
	orphaned  time.Time // since when the helper is known to have exited
	refreshed time.Time // when the client got credentials
	active    time.Time // when the client last did something
	cpu       time.Duration
	revision  uint64
	queue     *client.Queue // as last reported
}

// HelperAnswered notes whether the helper answered, and returns for how long it has not.
func (d *Drain) HelperAnswered(answered bool) (silent time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case answered:
		d.silent, d.orphaned = time.Time{}, time.Time{}
	case d.silent.IsZero():
		d.silent = time.Now()
	default:
		silent = time.Since(d.silent)
	}
	return silent
}

// OrphanedSince returns since when the client is known to have no helper. The first call notes that.
func (d *Drain) OrphanedSince() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.orphaned.IsZero() {
		d.orphaned = time.Now()
	}
	return d.orphaned
}

// RefreshDue reports, each time that every has passed, that the client should get new credentials.
func (d *Drain) RefreshDue(every time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := d.refreshed.IsZero() // it was just given some
	due := !first && time.Since(d.refreshed) >= every
	if first || due {
		d.refreshed = time.Now()
	}
	return due
}

// Progress notes the CPU time of the client and the revision of its helper's status, and returns for how long
// neither has changed.
func (d *Drain) Progress(cpu time.Duration, revision uint64) (idle time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.active.IsZero() || cpu != d.cpu || revision != d.revision {
		d.active, d.cpu, d.revision = time.Now(), cpu, revision
		return 0
	}
	return time.Since(d.active)
}

// Active notes that the client did something, as far as is known.
func (d *Drain) Active() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.active = time.Now()
}

// Queued records the upload queue of the client.
func (d *Drain) Queued(q *client.Queue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queue = q
}

// Queue returns the upload queue of the client; nil: unknown.
func (d *Drain) Queue() *client.Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.queue
}

// restarted discards what was of the previous client.
func (d *Drain) restarted() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drainState = drainState{}
}
