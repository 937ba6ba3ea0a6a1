package remove

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDeletionsAreOnePerVolumeAndBounded(t *testing.T) {
	q := newQueue(2)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- q.run(ctx) }()
	var now, most, jobs atomic.Int64
	asked := make(chan struct{})
	job := func(_ context.Context, d *deletion) error {
		if !d.hasWorker {
			return errNeedsWorker
		}
		jobs.Add(1)
		most.Store(max(most.Load(), now.Add(1)))
		<-asked // who comes when it is done gets another
		time.Sleep(5 * time.Millisecond)
		now.Add(-1)
		return nil
	}
	var wg sync.WaitGroup
	for range 4 {
		for _, id := range []string{"a", "b", "c", "d", "e"} {
			r, err := q.start(id, identity.Identity{}, job)
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				if err := q.wait(t.Context(), r); err != nil {
					t.Error(err)
				}
			})
		}
	}
	close(asked)
	wg.Wait()
	if most.Load() > 2 || jobs.Load() != 5 {
		t.Errorf("%d jobs, %d at once", jobs.Load(), most.Load())
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := q.run(t.Context()); err == nil {
		t.Error("Run can be called again")
	}
	if len(q.byID) != 0 {
		t.Errorf("%d deletions are kept", len(q.byID))
	}
}

func TestACallThatWaitsGetsTheFailureOfThePreviousAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(1)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- q.run(ctx) }()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}()
		r, err := q.start("v", identity.Identity{}, func(context.Context, *deletion) error { return fault.Errorf(fault.Denied, "locked") })
		if err != nil {
			t.Fatal(err)
		}
		if err := q.wait(t.Context(), r); !fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), "deleting volume v") {
			t.Errorf("%v", err)
		}
		r, err = q.start("v", identity.Identity{}, func(ctx context.Context, _ *deletion) error { <-ctx.Done(); return ctx.Err() })
		if err != nil {
			t.Fatal(err)
		}
		short, cancelShort := context.WithTimeout(t.Context(), time.Second)
		defer cancelShort()
		if err := q.wait(short, r); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "locked") || short.Err() != nil {
			t.Errorf("%v, %v", err, short.Err())
		}
	})
}

func TestACallIsAnsweredBeforeItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(1)
		busy := func(patience, want time.Duration) {
			t.Helper()
			d, err := q.start("v", identity.Identity{}, func(ctx context.Context, _ *deletion) error { <-ctx.Done(); return ctx.Err() })
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			began := time.Now()
			if err := q.wait(ctx, d); !fault.Is(err, fault.Busy) || ctx.Err() != nil || time.Since(began) != want {
				t.Errorf("%v after %v, want an answer after %v", err, time.Since(began), want)
			}
		}
		busy(4*time.Second, 3500*time.Millisecond) // before run
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- q.run(ctx) }()
		busy(4*time.Second, 3500*time.Millisecond)
		busy(time.Second, 750*time.Millisecond)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if _, err := q.start("w", identity.Identity{}, nil); !fault.Is(err, fault.Busy) {
			t.Errorf("after the end: %v", err)
		}
	})
}

func TestADeletionFromBeforeRunIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(1)
		d, err := q.start("v", identity.Identity{}, func(context.Context, *deletion) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- q.run(ctx) }()
		if err := q.wait(t.Context(), d); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestADeletionThatNeedsNoWorkerDoesNotWaitForOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(2)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- q.run(ctx) }()
		release := make(chan struct{})
		var runs atomic.Int64
		erase := func(_ context.Context, d *deletion) error {
			runs.Add(1)
			if !d.hasWorker {
				return errNeedsWorker
			}
			<-release
			return nil
		}
		start := func(id string, job job) *deletion {
			t.Helper()
			d, err := q.start(id, identity.Identity{}, job)
			if err != nil {
				t.Fatal(err)
			}
			return d
		}
		big := []*deletion{start("a", erase), start("b", erase)}
		synctest.Wait() // they have the workers
		big = append(big, start("c", erase))
		synctest.Wait()
		short, cancelShort := context.WithTimeout(t.Context(), time.Second)
		defer cancelShort()
		if err := q.wait(short, big[2]); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "queued behind 0 other deletions") {
			t.Errorf("without a free worker: %v", err)
		}
		for range 3 * maxChecks {
			if err := q.wait(t.Context(), start("empty", func(context.Context, *deletion) error { return nil })); err != nil {
				t.Error(err)
			}
		}
		close(release)
		for _, d := range big {
			if err := q.wait(t.Context(), d); err != nil {
				t.Error(err)
			}
		}
		if runs.Load() != 6 {
			t.Errorf("%d calls of three jobs", runs.Load())
		}
		// A deletion that waits for a worker when the driver exits gets an error that says so.
		stuck := func(ctx context.Context, d *deletion) error {
			if !d.hasWorker {
				return errNeedsWorker
			}
			<-ctx.Done()
			return ctx.Err()
		}
		last := []*deletion{start("a", stuck), start("b", stuck), start("c", stuck)}
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for _, d := range last {
			if err := q.wait(t.Context(), d); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "shutting down") {
				t.Errorf("after the end: %v", err)
			}
		}
		if len(q.byID) != 0 {
			t.Errorf("%d deletions are kept", len(q.byID))
		}
	})
}

func TestChecksAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(1)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- q.run(ctx) }()
		release := make(chan struct{})
		var now atomic.Int64
		for i := range 2 * maxChecks {
			if _, err := q.start(strings.Repeat("v", i+1), identity.Identity{}, func(context.Context, *deletion) error {
				now.Add(1)
				<-release
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if now.Load() != maxChecks {
			t.Errorf("%d at once, want %d", now.Load(), maxChecks)
		}
		close(release)
		synctest.Wait()
		if now.Load() != 2*maxChecks || len(q.byID) != 0 {
			t.Errorf("%d done, %d kept", now.Load(), len(q.byID))
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
