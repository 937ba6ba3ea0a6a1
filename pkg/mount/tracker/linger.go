package tracker

import (
	"slices"
	"time"
)

// Why a lingering mount ended.
const (
	EndedTime    = "time"    // its time was over
	EndedMounts  = "mounts"  // too many mounts lingered, and it was the least recently used
	EndedMemory  = "memory"  // their memory was too large, and it was the least recently used
	EndedBackend = "backend" // its backend's configuration or rules changed
	EndedSession = "session" // its session could not be renewed
	EndedClient  = "client"  // its client exited
	EndedVolume  = "volume"  // its volume was published with other settings or another secret
	EndedOverlap = "overlap" // a mount that overlaps with it was started
)

// Linger is a lingering mount: it has no publication, and its client and its cache stay for a while.
type Linger struct {
	Name         string
	Since, Until time.Time
	Memory       uint64 // of its helper and its client, in bytes
}

// Linger notes that the mount lingers, until Set notes another state.
func (m *Mount) Linger(client string, l Linger) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set(client, Lingering)
	changed := m.linger == nil || *m.linger != l
	m.linger = &l
	if changed {
		m.t.lingers.notify()
	}
}

// Lingering returns the lingering mounts, the least recently used first.
func (t *Tracker) Lingering() []Linger {
	var all []Linger
	t.each(func(m *Mount) {
		if m.linger != nil {
			all = append(all, *m.linger)
		}
	})
	slices.SortFunc(all, func(a, b Linger) int { return a.Since.Compare(b.Since) })
	return all
}

// LingerChanged returns a channel that is closed when another mount lingers, or one lingers for another time.
func (t *Tracker) LingerChanged() <-chan struct{} { return t.lingers.changed() }

// CountLingerHit counts a publication that found its mount lingering.
func (t *Tracker) CountLingerHit(client string) { t.metrics.lingerHits.WithLabelValues(client).Inc() }

// CountLingerEnd counts the end of a lingering mount, for one of the reasons Ended….
func (t *Tracker) CountLingerEnd(client, reason string) {
	t.metrics.lingerEnds.WithLabelValues(client, reason).Inc()
}
