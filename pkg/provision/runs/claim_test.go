package runs

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestClaims_RunThatTookOverIsLeftAlone(t *testing.T) {
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

func TestClaims_ShowWhichRunsMayStillWrite(t *testing.T) {
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

func TestClaims_OfARecordAreFew(t *testing.T) {
	var list []string
	for range 3 * maxClaims {
		list = NewClaims(time.Minute).New().Add(list)
	}
	if len(list) != maxClaims {
		t.Errorf("%d claims", len(list))
	}
}

func TestClaims_OutwaitEndsWithTheLagOrItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClaims(time.Minute)
		began := time.Now()
		theirs := func(context.Context) ([]string, error) { return []string{"theirs"}, nil }
		if err := c.Outwait(t.Context(), theirs); err != nil || time.Since(began) < time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		failed := errors.New("failed")
		if err := c.Outwait(t.Context(), func(context.Context) ([]string, error) { return nil, failed }); !errors.Is(err, failed) {
			t.Error(err)
		}
		ctx, stop := context.WithCancelCause(t.Context())
		stopped := errors.New("stopped")
		stop(stopped)
		if err := c.Outwait(ctx, func(context.Context) ([]string, error) { return []string{"other"}, nil }); !errors.Is(err, stopped) {
			t.Error(err)
		}
	})
}
