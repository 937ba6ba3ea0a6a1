package helper

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

// At a shutdown nobody unmounts the file system before all services have ended: the helper must not wait for that when all
// is stored, and must wait as long as something is not.
func TestAHelperThatIsStoppedEndsAClientThatHasStoredEverything(t *testing.T) {
	short := func(o *options) { o.idleQueue = 600 * time.Millisecond }
	r := newRig(t, short)
	r.start("print:queue 2 100", "wait:"+r.dir+"/stored", "print:queue 0 0", "wait:/nowhere")
	r.until("a queue", func(s Status) bool { return s.Queue != nil })
	r.signals <- syscall.SIGTERM
	time.Sleep(3 * 600 * time.Millisecond)
	r.mustLive()
	touch(t, r.dir+"/stored")
	r.mustEnd()
	end, ok, err := ReadEnd(r.h.stateDir)
	if err != nil || !ok || end.Signal != "SIGKILL" || !strings.Contains(end.Reason, "nothing left to store") {
		t.Errorf("record: %+v, %v, %v", end, ok, err)
	}
}

func TestAClientThatSaysNothingIsEndedWhenItDoesNothing(t *testing.T) {
	r := newRig(t, func(o *options) { o.idleSilent = 600 * time.Millisecond })
	r.start("wait:/nowhere")
	time.Sleep(3 * 600 * time.Millisecond)
	r.mustLive() // nobody asked it to stop
	r.signals <- syscall.SIGTERM
	r.mustEnd()
}

func TestAClientAtWorkIsLeftAlone(t *testing.T) {
	r := newRig(t, func(o *options) { o.idleSilent = 600 * time.Millisecond })
	r.start("work:"+r.dir+"/done", "wait:/nowhere")
	r.signals <- syscall.SIGTERM
	time.Sleep(4 * 600 * time.Millisecond)
	r.mustLive()
	touch(t, r.dir+"/done")
	r.mustEnd()
}
