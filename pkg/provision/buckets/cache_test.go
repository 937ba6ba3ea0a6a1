package buckets

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity/identitytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// at is a bucket of a backend at that endpoint.
func at(t *testing.T, endpoint, name string) Bucket {
	t.Helper()
	_, be := identitytest.Lab(t, "endpoint: '"+endpoint+"'")
	return Bucket{Backend: be, Info: backend.BucketInfo{Name: name}}
}

func TestFactsAreOfOneBucketAndExpire(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	c := newBucketCache(func() time.Time { return now })
	found := 0
	get := func(b Bucket, fact string, ttl time.Duration) {
		t.Helper()
		if _, err := c.get(t.Context(), b, fact, func(context.Context) (known, error) { found++; return known{ttl: ttl}, nil }); err != nil {
			t.Fatal(err)
		}
	}
	one := at(t, "http://127.0.0.1:1", "bucket")
	for i, step := range []struct {
		b    Bucket
		fact string
		want int
	}{
		{one, "x", 1}, {one, "x", 1}, {at(t, "http://127.0.0.1:1", "bucket"), "x", 1},
		{one, "y", 2}, {at(t, "http://127.0.0.1:1", "other"), "x", 3}, {at(t, "http://127.0.0.1:2", "bucket"), "x", 4},
	} {
		if get(step.b, step.fact, time.Hour); found != step.want {
			t.Errorf("step %d: found out %d times, want %d", i, found, step.want)
		}
	}
	now = now.Add(time.Hour)
	if get(one, "x", 0); found != 5 {
		t.Error("a fact did not expire")
	}
	if get(one, "x", time.Hour); found != 6 {
		t.Error("a fact without a time to live is kept")
	}
	c.invalidate(one.id())
	if get(one, "x", time.Hour); found != 7 {
		t.Error("a fact outlived its bucket's invalidation")
	}
}

func TestACallerDoesNotGetTheErrorOfAnothersCredentials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newBucketCache(time.Now)
		b := at(t, "http://127.0.0.1:1", "bucket")
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := c.get(t.Context(), b, "x", func(context.Context) (known, error) {
				time.Sleep(time.Second)
				return known{}, fault.Errorf(fault.Denied, "these keys may not")
			})
			if !fault.Is(err, fault.Denied) {
				t.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		for range 3 {
			wg.Go(func() {
				v, err := c.get(t.Context(), b, "x", func(context.Context) (known, error) { return known{value: 7, ttl: time.Hour}, nil })
				if v != 7 || err != nil {
					t.Errorf("got %d, %v", v, err)
				}
			})
		}
		wg.Wait()
	})
}

func TestACallerThatLeavesGetsATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newBucketCache(time.Now)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.get(ctx, at(t, "http://127.0.0.1:1", "bucket"), "x", func(ctx context.Context) (known, error) {
			<-ctx.Done()
			return known{}, ctx.Err()
		})
		if !fault.Is(err, fault.Timeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}
