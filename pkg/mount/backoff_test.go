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
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 120, 120} {
		tr.mended("m")
		if w := tr.wait("m"); w != want*time.Second {
			t.Errorf("a death at once: %s, want %s", w, want*time.Second)
		}
		now = now.Add(want * time.Second)
		if w := tr.wait("m"); w != 0 {
			t.Errorf("after %s it still waits %s", want*time.Second, w)
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
