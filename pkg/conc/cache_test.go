package conc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func keepFor(d time.Duration) func(int, error) time.Duration {
	return func(int, error) time.Duration { return d }
}

func TestConcurrentCallersShareOneLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache[string](time.Now, 10, time.Minute, keepFor(time.Minute))
		var calls atomic.Int32
		var group sync.WaitGroup
		for range 50 {
			group.Go(func() {
				v, err := c.Get(t.Context(), "a", func(context.Context) (int, error) {
					calls.Add(1)
					time.Sleep(time.Second)
					return 7, nil
				})
				if v != 7 || err != nil {
					t.Errorf("got %d, %v", v, err)
				}
			})
		}
		group.Wait()
		if n := calls.Load(); n != 1 {
			t.Errorf("%d calls", n)
		}
	})
}

func TestCache_LoadContinuesForOtherCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache[string](time.Now, 10, time.Minute, keepFor(time.Minute))
		fn := func(ctx context.Context) (int, error) {
			select {
			case <-time.After(10 * time.Second):
				return 7, nil
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
		first, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var group sync.WaitGroup
		group.Go(func() {
			if _, err := c.Get(first, "a", fn); !fault.Is(err, fault.Timeout) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the first caller: %v", err)
			}
		})
		group.Go(func() {
			if v, err := c.Get(t.Context(), "a", fn); v != 7 || err != nil {
				t.Errorf("the second caller: %d, %v", v, err)
			}
		})
		group.Wait()
	})
}

func TestCache_LoadIsCancelledWithoutCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache[string](time.Now, 10, time.Minute, keepFor(time.Minute))
		canceled := make(chan struct{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Get(ctx, "a", func(ctx context.Context) (int, error) {
			<-ctx.Done()
			close(canceled)
			return 1, nil
		})
		if !fault.Is(err, fault.Timeout) {
			t.Errorf("got %v", err)
		}
		<-canceled
		synctest.Wait()
		if v, err := c.Get(t.Context(), "a", func(context.Context) (int, error) { return 2, nil }); v != 2 || err != nil {
			t.Errorf("got %d, %v", v, err)
		}
	})
}

func TestCache_LoadIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache[string](time.Now, 10, time.Minute, keepFor(0))
		_, err := c.Get(t.Context(), "a", func(ctx context.Context) (int, error) { <-ctx.Done(); return 0, ctx.Err() })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

func TestInvalidateDropsALoadInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache[string](time.Now, 10, time.Minute, keepFor(time.Minute))
		var group sync.WaitGroup
		group.Go(func() {
			_, _ = c.Get(t.Context(), "a", func(context.Context) (int, error) { time.Sleep(time.Second); return 1, nil })
		})
		synctest.Wait()
		c.Invalidate(func(string) bool { return true })
		group.Wait()
		if v, _ := c.Get(t.Context(), "a", func(context.Context) (int, error) { return 2, nil }); v != 2 {
			t.Errorf("an old answer came back: %d", v)
		}
	})
}

func TestCache_ResultsExpireAndAreBounded(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	c := NewCache[int](func() time.Time { return now }, 3, time.Minute, keepFor(time.Minute))
	calls := 0
	ask := func(key int) {
		t.Helper()
		if _, err := c.Get(t.Context(), key, func(context.Context) (int, error) { calls++; return key, nil }); err != nil {
			t.Fatal(err)
		}
	}
	ask(1)
	now = now.Add(59 * time.Second)
	ask(1)
	if calls != 1 {
		t.Errorf("%d calls within the time", calls)
	}
	now = now.Add(time.Second)
	ask(1)
	if calls != 2 {
		t.Errorf("%d calls after the time", calls)
	}
	for key := range 10 {
		now = now.Add(time.Second)
		ask(key)
	}
	if len(c.known) != 3 {
		t.Errorf("%d answers are kept", len(c.known))
	}
	calls = 0
	ask(9)
	if calls != 0 {
		t.Error("the newest answer was dropped")
	}
}

func TestCache_PutAndPeek(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	c := NewCache[string](func() time.Time { return now }, 3, time.Minute, func(_ int, err error) time.Duration {
		if err != nil {
			return 0
		}
		return time.Minute
	})
	c.Put("a", 1, nil)
	c.Put("b", 0, errors.New("not kept"))
	if v, ok, err := c.Peek("a"); v != 1 || err != nil || !ok {
		t.Errorf("%d, %v, %t", v, err, ok)
	}
	if _, ok, _ := c.Peek("b"); ok {
		t.Error("an answer is kept that should not be")
	}
	now = now.Add(time.Minute)
	if _, ok, _ := c.Peek("a"); ok {
		t.Error("an expired answer is returned")
	}
}
