package helper

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/cputime"
)

// Whoever stops a helper, systemd at a shutdown as a rule, has ended the containers before, but nobody unmounts the file
// system until all services are gone, and only that would end the client. So a client that has stored everything and does
// nothing any more is ended by its helper. One that is at work keeps the time that it is given.
const (
	idleLook   = 250 * time.Millisecond
	idleQueue  = 3 * time.Second
	idleSilent = 10 * time.Second
	// idleUse is the time of processors that a client that does not say may use within idleLook without being taken for one
	// at work. The kernel counts in steps of 10 ms, and may count one for a moment.
	idleUse = 20 * time.Millisecond
)

// idleness is since when a client has done nothing.
type idleness struct {
	pid   int
	since time.Time
	cpu   time.Duration // used by the last look
}

// idle looks at the running client, and tells whether it has been idle for long enough. Call under mu.
func (h *helper) idle(i *idleness) bool {
	now := h.now()
	cpu, err := cputime.Of(h.status.ClientPID)
	q, limit := h.status.Queue, h.idleQueue
	busy := q != nil && (q.Uploads > 0 || q.Bytes > 0)
	if q == nil {
		busy, limit = cpu-i.cpu > idleUse, h.idleSilent
	}
	if err != nil || busy || i.pid != h.status.ClientPID {
		*i = idleness{h.status.ClientPID, now, cpu}
		return false
	}
	i.cpu = cpu
	return now.Sub(i.since) >= limit
}

// endIdle kills the client of a helper that was asked to stop once it has nothing left to do.
func (h *helper) endIdle(i *idleness) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopping || h.pgid == 0 || !h.idle(i) {
		return
	}
	h.log.printf("the client has nothing left to store and does nothing: it is ended")
	h.released = true
	killGroup(h.pgid)
}
