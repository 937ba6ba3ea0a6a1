package helper

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// At a shutdown systemd stops helpers after containers, and unmounts file systems only when all services have stopped. So the
// client would run until it is killed. A helper that was asked to stop kills its client once that has uploaded everything and
// is idle; a busy client keeps the time that systemd gives it.
const (
	idleInterval = 250 * time.Millisecond
	idleQueue    = 3 * time.Second
	idleSilent   = 10 * time.Second
	// idleCPU is the CPU time that a client without a reported queue may use within idleInterval and still be idle. The
	// kernel counts in steps of 10 ms.
	idleCPU = 20 * time.Millisecond
)

// idleness records since when a client has been idle.
type idleness struct {
	pid   int
	since time.Time
	cpu   time.Duration // CPU time used until the last check
}

// idle checks the running client and reports whether it has been idle for long enough. Call under mu.
func (h *helper) idle(i *idleness) bool {
	now := h.now()
	cpu, err := proc.CPUTime(h.status.ClientPID)
	q, limit := h.status.Queue, h.idleQueue
	busy := q != nil && (q.Uploads > 0 || q.Bytes > 0)
	if q == nil {
		busy, limit = cpu-i.cpu > idleCPU, h.idleSilent
	}
	if err != nil || busy || i.pid != h.status.ClientPID {
		*i = idleness{h.status.ClientPID, now, cpu}
		return false
	}
	i.cpu = cpu
	return now.Sub(i.since) >= limit
}

// endIdle kills the client of a helper that was asked to stop once it is idle.
func (h *helper) endIdle(i *idleness) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopping || h.pgid == 0 || !h.idle(i) {
		return
	}
	h.log.printf("killing idle client")
	h.idleKilled = true
	killGroup(h.pgid)
}
