package helper

import (
	"context"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	idleLimit = 2 * time.Minute
	endGrace  = time.Minute
	// quitGrace is how long to wait for a killed client. One that is blocked in the kernel exits when its FUSE connection ends.
	quitGrace = 5 * time.Second
)

// run serves everything until the helper must exit. signals are those that ask it to stop.
func (h *helper) run(ctx context.Context, l *net.UnixListener, uid uint32, signals <-chan os.Signal) {
	serveCtx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // ctx is a request to stop, not an end
	var requests, others sync.WaitGroup
	requests.Go(func() { h.serve(serveCtx, l, uid) })
	others.Go(h.endpoint.serve)
	others.Go(func() { h.renew(serveCtx) })
	clean := h.serveUntilDone(ctx, signals)
	cancel()
	requests.Wait()
	h.endpoint.close()
	others.Wait()
	if clean {
		h.runs.Wait()
		h.log.printf("exiting")
	} else {
		h.log.printf("exiting: killed client still blocked in the kernel")
	}
}

// serveUntilDone returns when the helper must exit, and reports whether the client has exited.
func (h *helper) serveUntilDone(ctx context.Context, signals <-chan os.Signal) bool {
	cancelled, killed := ctx.Done(), h.killed
	var overdue <-chan time.Time
	var idle idleness
	look := time.NewTicker(idleInterval)
	look.Stop() // started by a request to stop
	defer look.Stop()
	for {
		_, changed := h.snapshot()
		var expired <-chan time.Time
		if wait, bounded := h.untilExit(); bounded {
			if wait <= 0 {
				return true
			}
			expired = time.After(wait)
		}
		select {
		case <-h.done:
			return true
		case <-changed:
		case <-expired: // check again: a request may have come
		case s := <-signals:
			if s != syscall.SIGPIPE && s != syscall.SIGHUP {
				h.stop(s.String())
				look.Reset(idleInterval)
			}
		case <-cancelled:
			cancelled = nil
			h.stop("cancelled")
			look.Reset(idleInterval)
		case <-look.C:
			h.endIdle(&idle)
		case <-killed:
			killed, overdue = nil, time.After(quitGrace)
		case <-overdue:
			return false
		}
	}
}

// untilExit returns how long the helper stays if nothing happens.
func (h *helper) untilExit() (wait time.Duration, bounded bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	idle := h.options.now().Sub(h.lastActivity)
	switch {
	case h.status.State == StateRunning:
		return 0, false
	case h.waiting > 0:
		return h.options.idleLimit, true // check again then
	case h.status.Ending && !h.exitedAbnormally():
		return h.options.endGrace - idle, true
	case h.status.State == StateIdle:
		return h.options.idleLimit - idle, true
	}
	return 0, false
}

// At a shutdown systemd stops helpers after containers, and unmounts file systems only when all services have stopped. So the
// client would run until it is killed. A helper that was asked to stop kills its client once that has uploaded everything and
// is idle; a busy client has until systemd's timeout.
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
	now := h.options.now()
	cpu, err := h.options.cpuTime(h.status.ClientPID)
	q, limit := h.status.Queue, h.options.idleQueue
	busy := q != nil && (q.Uploads > 0 || q.Bytes > 0)
	if q == nil {
		busy, limit = cpu-i.cpu > idleCPU, h.options.idleSilent
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
