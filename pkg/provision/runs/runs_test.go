package runs

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type progress string

func (p progress) String() string { return string(p) }

// started runs a queue until the end of the test.
func started(t *testing.T, limit int) *Queue {
	t.Helper()
	q := New(limit)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- q.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return q
}

func (q *Queue) do1(ctx context.Context, id string, job Job) error {
	return q.Do(ctx, id, "making "+id, identity.Identity{}, progress("3 of 5"), job)
}

func TestCallsJoinARunAndGetItsProgress(t *testing.T) {
	q := started(t, 2)
	var runs atomic.Int64
	began, gate := make(chan struct{}), make(chan struct{})
	job := func(context.Context, *Run) error {
		runs.Add(1)
		close(began)
		<-gate
		return nil
	}
	first := make(chan error, 1)
	go func() { first <- q.do1(context.Background(), "a", job) }()
	<-began
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := q.do1(ctx, "a", job)
	if !fault.Is(err, fault.Busy) || err.Error() != "making a: so far 3 of 5" {
		t.Error(err)
	}
	close(gate)
	if err := <-first; err != nil || runs.Load() != 1 {
		t.Errorf("%v after %d runs", err, runs.Load())
	}
}

func TestAFinalFailureIsKeptForTheNextCall(t *testing.T) {
	q := started(t, 1)
	want := fault.Errorf(fault.Denied, "no")
	gate := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	began := make(chan struct{})
	go func() { <-began; cancel() }()
	if err := q.do1(ctx, "a", func(context.Context, *Run) error { close(began); <-gate; return want }); !fault.Is(err, fault.Busy) {
		t.Error(err)
	}
	close(gate)
	if err := q.do1(t.Context(), "b", func(context.Context, *Run) error { return want }); !errors.Is(err, want) {
		t.Errorf("the caller that waits: %v", err)
	}
	if err := q.Failure("a"); !errors.Is(err, want) {
		t.Error(err)
	}
	for _, id := range []string{"a", "b"} {
		if err := q.Failure(id); err != nil {
			t.Errorf("%s, again: %v", id, err)
		}
	}
}

func TestARunCanBeStopped(t *testing.T) {
	q := started(t, 1)
	began := make(chan struct{})
	ended := make(chan error, 2)
	go func() {
		ended <- q.do1(context.Background(), "a", func(ctx context.Context, _ *Run) error {
			close(began)
			<-ctx.Done()
			return ctx.Err()
		})
	}()
	<-began
	go func() {
		ended <- q.do1(context.Background(), "queued", func(context.Context, *Run) error { return errors.New("it ran") })
	}()
	for q.waitingFor("queued") == 0 {
		time.Sleep(time.Millisecond)
	}
	for _, id := range []string{"queued", "a", "unknown"} {
		if err := q.Stop(t.Context(), id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	for range 2 {
		if err := <-ended; !fault.Is(err, fault.Busy) || !errors.Is(err, errStopped) {
			t.Error(err)
		}
	}
}

func (q *Queue) waitingFor(id string) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range q.waiting {
		if r.id == id {
			n++
		}
	}
	return n
}

func TestAShutdownEndsRunsAndTheQueue(t *testing.T) {
	q := New(1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- q.Run(ctx) }()
	err := q.do1(t.Context(), "a", func(ctx context.Context, _ *Run) error { cancel(); <-ctx.Done(); return ctx.Err() })
	if !fault.Is(err, fault.Busy) {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := q.do1(t.Context(), "b", func(context.Context, *Run) error { return nil }); !fault.Is(err, fault.Busy) {
		t.Error(err)
	}
}
