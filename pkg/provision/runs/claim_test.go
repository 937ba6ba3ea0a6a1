package runs

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestARunThatTookOverIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lag = time.Minute
		c := NewClaims(lag)
		if !c.MayTakeOver("b") {
			t.Error("a run whose process may have ended is not taken over")
		}
		c.LostTo("b")
		time.Sleep(lag)
		c.LostTo("b") // again, which is no news
		if c.MayTakeOver("b") || !c.MayTakeOver("c") {
			t.Error("the run that took over is taken over, or another one is not")
		}
		time.Sleep(lag)
		if !c.MayTakeOver("b") {
			t.Error("a run that does not finish is never taken over")
		}
		c.LostTo("c")
		if len(c.lost) != 1 {
			t.Errorf("remembered: %v", c.lost)
		}
	})
}

func TestWhichRunsMayStillWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lag = time.Minute
		c, other := NewClaims(lag), NewClaims(lag)
		open := func(what string, list []string, want ...string) {
			t.Helper()
			if got := c.Open(list); !slices.Equal(got, want) {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}
		theirs, ours := other.New(), c.New()
		list := ours.Add(theirs.Add(nil))
		if !ours.Is(list) || theirs.Is(list) || !slices.Equal(ours.Others(list), []string{theirs.ID}) {
			t.Errorf("%q: the last one is not ours", list)
		}
		c.Revoke(list)
		open("both in progress", list, theirs.ID, ours.ID)
		ours.End()
		open("ours ended", list, theirs.ID)
		time.Sleep(lag - time.Second)
		c.Revoke(list) // which is no news
		open("theirs has had nearly the lag", list, theirs.ID)
		time.Sleep(time.Second)
		open("theirs has had the lag", list)
		open("of another process, not revoked yet", []string{"a"}, "a")

		next := c.New()
		next.Unanswered()
		next.End()
		list = []string{next.ID}
		open("ours ended without an answer", list, next.ID)
		time.Sleep(lag)
		open("ours ended without an answer, and nothing comes any more", list)
		c.Revoke([]string{"a"})
		time.Sleep(2 * time.Hour)
		c.Revoke(list)
		if len(c.last) != 0 || len(c.running) != 0 {
			t.Errorf("remembered: %v, %v", c.last, c.running)
		}
	})
}

func TestARecordHasFewClaims(t *testing.T) {
	var list []string
	for range 3 * maxClaims {
		list = NewClaims(time.Minute).New().Add(list)
	}
	if len(list) != maxClaims {
		t.Errorf("%d claims", len(list))
	}
}

func TestPauseEndsWithItsContext(t *testing.T) {
	ctx, why := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	why(stopped)
	if err := NewClaims(time.Hour).Pause(ctx); !errors.Is(err, stopped) {
		t.Error(err)
	}
}
