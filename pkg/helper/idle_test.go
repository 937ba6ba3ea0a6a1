package helper

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

// At a shutdown file systems are unmounted after all services have stopped. The helper must not wait for that once everything is
// uploaded.
func TestAHelperThatIsStoppedEndsAClientThatHasStoredEverything(t *testing.T) {
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
	end, ok, err := ReadEnd(r.h.dirs.state)
	if err != nil || !ok || end.Signal != "SIGKILL" || !strings.Contains(end.Reason, "it was idle") {
		t.Errorf("record: %+v, %v, %v", end, ok, err)
	}
}

func TestAClientThatSaysNothingIsEndedWhenItDoesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(o *options) { o.idleSilent = 600 * time.Millisecond })
	r.start("wait:/nowhere")
	time.Sleep(3 * 600 * time.Millisecond)
	r.mustLive() // no request to stop
	r.signals <- syscall.SIGTERM
	r.mustEnd()
}

func TestAClientAtWorkIsLeftAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(o *options) { o.idleSilent = 600 * time.Millisecond })
	r.start("work:"+r.dir+"/done", "wait:/nowhere")
	r.signals <- syscall.SIGTERM
	time.Sleep(4 * 600 * time.Millisecond)
	r.mustLive()
	touch(t, r.dir+"/done")
	r.mustEnd()
}
