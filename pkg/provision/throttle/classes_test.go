package throttle

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// An erasure that uses all slots must not delay listings, but a service that throttles is spared by both.
func TestListingsHaveSlotsOfTheirOwnAndShareThePause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := New(2)
		acquire := func(n int, c Class) {
			t.Helper()
			for range n {
				if err := th.acquire(t.Context(), c); err != nil {
					t.Fatal(err)
				}
			}
		}
		full := func(c Class) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := th.acquire(ctx, c); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("class %d has more slots: %v", c, err)
			}
		}
		began := time.Now()
		acquire(2, Long)
		acquire(2*shortPerLong, Short)
		if time.Since(began) != 0 {
			t.Error("a listing waited for the erasure")
		}
		full(Long)
		full(Short)
		th.release(Long, false)
		th.release(Long, false)
		for range 2*shortPerLong - 1 {
			th.release(Short, false)
		}
		th.release(Short, true)
		if th.limit != 1 {
			t.Errorf("the limit is %d after the service throttled a listing, want 1", th.limit)
		}
		began = time.Now()
		acquire(1, Long)
		if time.Since(began) != minPause {
			t.Errorf("the erasure paused for %v, want %v", time.Since(began), minPause)
		}
		full(Long)
		acquire(shortPerLong, Short)
		full(Short)
	})
}
