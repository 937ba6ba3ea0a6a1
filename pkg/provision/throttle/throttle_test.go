package throttle

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheThrottleBoundsAndGivesWay(t *testing.T) {
	th := New(8)
	var now, most atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := th.acquire(t.Context(), Long); err != nil {
				t.Error(err)
				return
			}
			most.Store(max(most.Load(), now.Add(1)))
			time.Sleep(time.Millisecond)
			now.Add(-1)
			th.release(Long, false)
		})
	}
	wg.Wait()
	if most.Load() > 8 {
		t.Errorf("%d at once", most.Load())
	}
	for range 3 { // one burst counts once
		if err := th.acquire(t.Context(), Long); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		th.release(Long, true)
	}
	if th.limit != 4 {
		t.Errorf("the limit is %d after one burst, want 4", th.limit)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := th.acquire(ctx, Long); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("during the pause: %v", err)
	}
	for range 200 {
		if err := th.acquire(t.Context(), Long); err != nil {
			t.Fatal(err)
		}
		th.release(Long, false)
	}
	if th.limit != 8 || th.busy[Long] != 0 {
		t.Errorf("limit %d, busy %d after better times", th.limit, th.busy[Long])
	}
}
