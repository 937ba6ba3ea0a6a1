package runs

import (
	"context"
	"errors"
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

func TestOutwaitWaitsOnlyAfterATakeOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		c := NewClaim()
		if err := c.Outwait(t.Context(), time.Minute); err != nil || time.Since(began) != 0 {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		c.TookOver()
		time.Sleep(20 * time.Second)
		if err := c.Outwait(t.Context(), time.Minute); err != nil || time.Since(began) != time.Minute {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		ended, why := context.WithCancelCause(t.Context())
		stopped := errors.New("stopped")
		why(stopped)
		if err := c.Outwait(ended, time.Hour); !errors.Is(err, stopped) {
			t.Error(err)
		}
	})
}
