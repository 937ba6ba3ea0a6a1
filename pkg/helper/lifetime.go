package helper

import (
	"context"
	"net"
	"os"
	"syscall"
	"time"
)

const (
	idleLimit = 2 * time.Minute
	endGrace  = time.Minute
	// quitGrace is how long a killed client is waited for. One that hangs in the kernel goes when its connection does.
	quitGrace = 5 * time.Second
)

// run serves everything until the helper has to end. signals are those that ask it to stop.
func (h *helper) run(ctx context.Context, l *net.UnixListener, uid uint32, signals <-chan os.Signal) {
	serveCtx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // ctx only asks to stop
	served := make(chan struct{})
	go func() {
		defer close(served)
		h.serve(serveCtx, l, uid)
	}()
	credentialsServed := make(chan struct{})
	go func() {
		defer close(credentialsServed)
		h.endpoint.serve()
	}()
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		h.renew(serveCtx)
	}()
	clean := h.live(ctx, signals)
	cancel()
	<-served
	h.endpoint.close()
	<-credentialsServed
	<-renewed
	if clean {
		h.runs.Wait()
		h.log.printf("ended")
	} else {
		h.log.printf("ended while the killed client still hangs in the kernel")
	}
}

// live returns when the helper has to end; false: a client that was killed is still there.
func (h *helper) live(ctx context.Context, signals <-chan os.Signal) bool {
	cancelled, killed := ctx.Done(), h.killed
	var overdue <-chan time.Time
	var idle idleness
	look := time.NewTicker(idleLook)
	look.Stop() // until somebody asks the helper to stop
	defer look.Stop()
	for {
		_, changed := h.snapshot()
		var timer *time.Timer
		var expired <-chan time.Time
		if wait, bounded := h.patience(); bounded {
			if wait <= 0 {
				return true
			}
			timer = time.NewTimer(wait)
			expired = timer.C
		}
		select {
		case <-h.done:
			return true
		case <-changed:
		case <-expired: // look again: somebody may have talked meanwhile
		case s := <-signals:
			if s != syscall.SIGPIPE && s != syscall.SIGHUP {
				h.stop(s.String())
				look.Reset(idleLook)
			}
		case <-cancelled:
			cancelled = nil
			h.stop("cancelled")
			look.Reset(idleLook)
		case <-look.C:
			h.endIdle(&idle)
		case <-killed:
			killed, overdue = nil, time.After(quitGrace)
		case <-overdue:
			return false
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// patience is how long the helper lives on if nothing happens.
func (h *helper) patience() (wait time.Duration, bounded bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	idle := h.now().Sub(h.lastTalk)
	switch {
	case h.status.State == StateRunning:
		return 0, false
	case h.waiting > 0:
		return h.idleLimit, true // look again then
	case h.status.Ending && !h.endedBadly():
		return h.endGrace - idle, true
	case h.status.State == StateIdle:
		return h.idleLimit - idle, true
	}
	return 0, false
}
