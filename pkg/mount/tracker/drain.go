package tracker

import (
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
)

// Drain is the observed state of a client that is being stopped. Its methods can be called by several goroutines.
type Drain struct {
	mu  sync.Mutex
	now drainState
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
		d.now.silent, d.now.orphaned = time.Time{}, time.Time{}
	case d.now.silent.IsZero():
		d.now.silent = time.Now()
	default:
		silent = time.Since(d.now.silent)
	}
	return silent
}

// OrphanedSince returns since when the client is known to have no helper. The first call notes that.
func (d *Drain) OrphanedSince() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.now.orphaned.IsZero() {
		d.now.orphaned = time.Now()
	}
	return d.now.orphaned
}

// RefreshDue reports, each time that every has passed, that the client should get new credentials.
func (d *Drain) RefreshDue(every time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := d.now.refreshed.IsZero() // it was just given some
	due := !first && time.Since(d.now.refreshed) >= every
	if first || due {
		d.now.refreshed = time.Now()
	}
	return due
}

// Progress notes the CPU time of the client and the revision of its helper's status, and returns for how long
// neither has changed.
func (d *Drain) Progress(cpu time.Duration, revision uint64) (idle time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.now.active.IsZero() || cpu != d.now.cpu || revision != d.now.revision {
		d.now.active, d.now.cpu, d.now.revision = time.Now(), cpu, revision
		return 0
	}
	return time.Since(d.now.active)
}

// Active notes that the client did something, as far as is known.
func (d *Drain) Active() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now.active = time.Now()
}

// Queued records the upload queue of the client.
func (d *Drain) Queued(q *client.Queue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now.queue = q
}

// Queue returns the upload queue of the client; nil: unknown.
func (d *Drain) Queue() *client.Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.now.queue
}

// restarted discards what was of the previous client.
func (d *Drain) restarted() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now = drainState{}
}
