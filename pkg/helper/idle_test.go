package helper

import (
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// At a shutdown file systems are unmounted after all services have stopped. The helper must not wait for that once everything is
// uploaded.
func TestIdle_StoppedHelperKillsAClientWithAnEmptyQueue(t *testing.T) {
	t.Parallel()
	short := func(o *options) { o.idleQueue = 600 * time.Millisecond }
	r := newRig(t, short)
	r.start("print:queue 2 100", "wait:"+r.dir+"/stored", "print:queue 0 0", "wait:/nowhere")
	r.until("a queue", func(s Status) bool { return s.Queue != nil })
	r.signals <- syscall.SIGTERM
	time.Sleep(3 * 600 * time.Millisecond)
	r.mustLive()
	touch(t, r.dir+"/stored")
	r.mustEnd()
	end, ok, err := ReadEnd(r.h.mount.StateDir)
	if err != nil || !ok || end.Signal != "SIGKILL" || !strings.Contains(end.Reason, "it was idle") {
		t.Errorf("record: %+v, %v, %v", end, ok, err)
	}
}

func TestIdle_SilentClientIsKilledWhenItUsesNoCPU(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(o *options) { o.idleSilent = 600 * time.Millisecond })
	r.start("wait:/nowhere")
	time.Sleep(3 * 600 * time.Millisecond)
	r.mustLive() // no request to stop
	r.signals <- syscall.SIGTERM
	r.mustEnd()
}

func TestIdle_BusyClientIsNotKilled(t *testing.T) {
	t.Parallel()
	const idle = 3 * idleInterval
	var looks atomic.Int64
	var rests atomic.Bool
	r := newRig(t, func(o *options) {
		o.idleSilent = idle
		o.cpuTime = func(int) (time.Duration, error) { // how much a client gets depends on what else runs
			if rests.Load() {
				return time.Duration(looks.Load()) * time.Second, nil
			}
			return time.Duration(looks.Add(1)) * time.Second, nil
		}
	})
	r.start("wait:/nowhere")
	r.signals <- syscall.SIGTERM
	for looks.Load() < 4*int64(idle/idleInterval) {
		time.Sleep(idleInterval / 10)
		r.mustLive()
	}
	rests.Store(true)
	r.mustEnd()
}
