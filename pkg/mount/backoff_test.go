package mount

import (
	"testing"
	"time"
)

func TestPausesGrowAndEnd(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	tr := troubles{now: func() time.Time { return now }}
	if w := tr.wait("m"); w != 0 {
		t.Errorf("the first restart waits %s", w)
	}
	for _, seconds := range []int{1, 2, 4, 8, 16, 32, 64, 120, 120} {
		want := time.Duration(seconds) * time.Second
		tr.mended("m")
		if w := tr.wait("m"); w != want {
			t.Errorf("a death at once: %s, want %s", w, want)
		}
		now = now.Add(want)
		if w := tr.wait("m"); w != 0 {
			t.Errorf("after %s it still waits %s", want, w)
		}
	}
	tr.failed("m")
	now = now.Add(goodLife)
	tr.mended("m")
	if w := tr.wait("m"); w != firstWait {
		t.Errorf("after a good life: %s", w)
	}
	tr.forget("m")
	if w := tr.wait("m"); w != 0 {
		t.Errorf("forgotten: %s", w)
	}
}

// What could not be started again does not hide of what the one before it died.
func TestADeathIsPutDownToItsFirstCause(t *testing.T) {
	ts := troubles{now: time.Now}
	crash, oom := cause{reasonCrash, "signal"}, cause{reasonOOM, "memory"}
	for i, step := range []struct {
		now, want cause
		mended    bool
	}{{oom, oom, false}, {crash, oom, false}, {crash, oom, true}, {crash, crash, false}, {oom, oom, false}, {crash, oom, true}, {crash, crash, true}} {
		if got := ts.died("m", step.now); got != step.want {
			t.Errorf("step %d: it is put down to %+v", i, got)
		}
		if step.mended {
			ts.mended("m")
		} else {
			ts.failed("m")
		}
	}
}
