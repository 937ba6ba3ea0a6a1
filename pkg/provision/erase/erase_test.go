package erase

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestKeysThatXMLCannotHold(t *testing.T) {
	for key, want := range map[string]bool{"a b": true, "ä<&>": true, "a\x01": false, "a\nb": false, "a\uFFFE": false, "a\xff": false, "\U0001F600": true} {
		if got := xmlSafe(key); got != want {
			t.Errorf("%q: %t", key, got)
		}
	}
}

func TestEveryRefusalOfAMultiDeleteCounts(t *testing.T) {
	e := erasure{Task: Task{Progress: &Progress{}}}
	batch := []buckets.Object{{Key: "a"}, {Key: "b", Version: "1"}, {Key: "c"}}
	failed := []types.Error{
		{Key: aws.String("a"), Code: aws.String("SlowDown")},
		{Key: aws.String("b"), VersionId: aws.String("1"), Code: aws.String("AccessDenied"), Message: aws.String("locked")},
		{Key: aws.String("nobody asked"), Code: aws.String("InternalError")},
		{},
	}
	busy := e.judge(batch, failed, true)
	if len(busy) != 1 || busy[0].Key != "a" || e.refused.count != 3 || !e.refused.denied || e.Progress.refused.Load() != 3 {
		t.Errorf("busy %v, refused %+v", busy, e.refused)
	}
	if busy := e.judge(batch, failed[:1], false); len(busy) != 0 || e.refused.count != 4 {
		t.Errorf("after the last attempt: busy %v, refused %+v", busy, e.refused)
	}
}

func TestProgressIsReadable(t *testing.T) {
	var p Progress
	p.objects.Add(1234567)
	p.uploads.Add(1)
	if got := p.String(); got != "1,234,567 objects removed, 1 unfinished upload aborted" {
		t.Error(got)
	}
	for n, want := range map[int]string{0: "0 objects", 1: "1 object", 999: "999 objects", 1000: "1,000 objects", 123456: "123,456 objects"} {
		if got := Count(n, "object"); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}

func TestTheThrottleBoundsAndGivesWay(t *testing.T) {
	th := newThrottle(8)
	var now, most atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := th.acquire(t.Context(), erasing); err != nil {
				t.Error(err)
				return
			}
			most.Store(max(most.Load(), now.Add(1)))
			time.Sleep(time.Millisecond)
			now.Add(-1)
			th.release(erasing, false)
		})
	}
	wg.Wait()
	if most.Load() > 8 {
		t.Errorf("%d at once", most.Load())
	}
	for range 3 { // one burst counts once
		if err := th.acquire(t.Context(), erasing); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		th.release(erasing, true)
	}
	if th.limit != 4 {
		t.Errorf("the limit is %d after one burst, want 4", th.limit)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := th.acquire(ctx, erasing); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("during the pause: %v", err)
	}
	for range 200 {
		if err := th.acquire(t.Context(), erasing); err != nil {
			t.Fatal(err)
		}
		th.release(erasing, false)
	}
	if th.limit != 8 || th.busy[erasing] != 0 {
		t.Errorf("limit %d, busy %d after better times", th.limit, th.busy[erasing])
	}
}
