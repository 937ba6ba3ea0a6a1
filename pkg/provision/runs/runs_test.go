package runs

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type progress string

func (p progress) String() string { return string(p) }

// queueTest is a queue in a bubble, and its calls.
type queueTest struct {
	*testing.T
	q    *Queue
	end  context.CancelFunc
	done chan error
}

func testQueue(t *testing.T, test func(t *queueTest), limits ...int) {
	synctest.Test(t, func(t *testing.T) {
		q := &queueTest{T: t, q: New(limits...), done: make(chan error, 1)}
		test(q)
		if q.end == nil {
			q.run()
		}
		q.shutDown()
		if len(q.q.byID) != 0 {
			t.Errorf("%d runs are kept", len(q.q.byID))
		}
	})
}

func (t *queueTest) run() {
	ctx, cancel := context.WithCancel(context.Background())
	t.end = cancel
	go func() { t.done <- t.q.Run(ctx) }()
	synctest.Wait()
}

func (t *queueTest) shutDown() {
	t.Helper()
	t.end()
	if err := <-t.done; err != nil {
		t.Error(err)
	}
	t.done <- nil
}

type job func(ctx context.Context, r *Run) error

func work(id string, job job) Work {
	return Work{ID: id, What: "making " + id, Progress: progress("3 of 5"), Job: job}
}

// call calls Do with a deadline of a minute.
func (t *queueTest) call(id string, job job) <-chan error {
	result := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		result <- t.q.Do(ctx, work(id, job))
	}()
	synctest.Wait()
	return result
}

// busy expects an error that says that the caller should retry.
func (t *queueTest) busy(err error, text string) {
	t.Helper()
	if !fault.Is(err, fault.Busy) || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("got %v, want Busy with %q", err, text)
	}
}

func succeed(context.Context, *Run) error { return nil }

func untilStopped(ctx context.Context, _ *Run) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestQueue_CallsJoinARunAndGetItsProgress(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		var runs int
		gate := make(chan struct{})
		var run *Run
		first := t.call("a", func(_ context.Context, r *Run) error { runs++; run = r; <-gate; return nil })
		second := t.call("a", succeed)
		if joined, _ := t.q.Join(context.Background(), "b", identity.Identity{}); joined {
			t.Error("a run that does not exist was joined")
		}
		short, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		joined, err := t.q.Join(short, "a", identity.Identity{Role: "latest"})
		t.busy(err, "making a: so far 3 of 5 (19s)")
		if !joined || short.Err() != nil || run.Latest().Role != "latest" {
			t.Errorf("joined: %t, deadline: %v, identity: %v", joined, short.Err(), run.Latest())
		}
		close(gate)
		if a, b := <-first, <-second; a != nil || b != nil || runs != 1 {
			t.Errorf("%v and %v after %d runs", a, b, runs)
		}
		if err := t.q.Run(t.Context()); err == nil {
			t.Error("Run can be called again")
		}
	}, 2)
}

func TestQueue_CallsAreAnsweredBeforeTheirDeadline(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		wait := func(patience, want time.Duration, text string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			began := time.Now()
			t.busy(t.q.Do(ctx, work("a", untilStopped)), text)
			if ctx.Err() != nil || time.Since(began) != want {
				t.Errorf("answered after %v, want %v", time.Since(began), want)
			}
		}
		wait(4*time.Second, 3500*time.Millisecond, "starts when the driver has started")
		t.run()
		wait(4*time.Second, 3500*time.Millisecond, "so far")
		wait(time.Second, 750*time.Millisecond, "so far")
	}, 1)
}

func TestQueue_RunsQueuedBeforeRunAreExecuted(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		result := t.call("a", succeed)
		t.run()
		if err := <-result; err != nil {
			t.Error(err)
		}
	}, 1)
}

func TestQueue_FinalFailureIsKeptForTheNextCall(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		want := fault.Errorf(fault.Denied, "no")
		gate := make(chan struct{})
		fail := func(context.Context, *Run) error { <-gate; return want }
		if err := t.q.Start(work("unseen", fail)); err != nil {
			t.Error(err)
		}
		seen := t.call("seen", fail)
		passing := func(context.Context, *Run) error { return fault.Errorf(fault.Busy, "not now") }
		if err := t.q.Start(work("not final", passing)); err != nil {
			t.Error(err)
		}
		close(gate)
		if err := <-seen; !errors.Is(err, want) {
			t.Errorf("the caller that waits: %v", err)
		}
		synctest.Wait()
		if err := t.q.Failure("unseen"); !errors.Is(err, want) {
			t.Error(err)
		}
		for _, id := range []string{"unseen", "seen", "not final", "unknown"} {
			if err := t.q.Failure(id); err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
	}, 2)
}

func TestQueue_ProgressNamesThePreviousFailure(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		locked := func(context.Context, *Run) error { return fault.Errorf(fault.Denied, "locked") }
		if err := <-t.call("a", locked); !fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), "making a (3 of 5)") {
			t.Error(err)
		}
		t.busy(<-t.call("a", untilStopped), "the previous attempt failed: making a (3 of 5): locked")
		if err := t.q.Stop(t.Context(), "a"); err != nil {
			t.Error(err)
		}
		if len(t.q.failures) != 0 {
			t.Errorf("kept after the run was stopped: %v", t.q.failures)
		}
		for n := range 2 * keptFailures {
			if err := <-t.call(fmt.Sprint(n), locked); err == nil || len(t.q.failures) > keptFailures {
				t.Fatalf("%v, and %d failures are kept", err, len(t.q.failures))
			}
		}
	}, 1)
}

func TestQueue_StopEndsRunsThatWaitAndThatAreExecuted(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		executed := t.call("a", untilStopped)
		queued := t.call("queued", func(context.Context, *Run) error { return errors.New("it ran") })
		for _, id := range []string{"queued", "a", "unknown"} {
			if err := t.q.Stop(t.Context(), id); err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		for _, err := range []error{<-executed, <-queued} {
			if t.busy(err, ""); !errors.Is(err, errStopped) {
				t.Error(err)
			}
		}
		gate := make(chan struct{})
		stubborn := t.call("stubborn", func(context.Context, *Run) error { <-gate; return nil })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		t.busy(t.q.Stop(ctx, "stubborn"), "is being stopped")
		close(gate)
		if err := <-stubborn; err != nil {
			t.Errorf("a run that had finished when it was stopped: %v", err)
		}
	}, 1)
}

func TestQueue_ShutdownEndsRunsOfAllLanes(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		second := func(ctx context.Context, r *Run) error {
			if r.Lane() == 0 {
				return ErrNextLane
			}
			return untilStopped(ctx, r)
		}
		calls := []<-chan error{t.call("a", second), t.call("b", second), t.call("c", untilStopped), t.call("d", succeed)}
		t.shutDown()
		for _, c := range calls {
			t.busy(<-c, "the driver is shutting down; a retry continues")
		}
		t.busy(<-t.call("e", succeed), "the driver is shutting down")
		t.busy(t.q.Start(work("f", succeed)), "the driver is shutting down")
	}, 1, 1)
}

func TestQueue_RunsAreOnePerIDAndBounded(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		var now, most, jobs atomic.Int64
		var results []<-chan error
		for range 4 {
			for id := range 5 {
				results = append(results, t.call(fmt.Sprint(id), func(context.Context, *Run) error {
					jobs.Add(1)
					most.Store(max(most.Load(), now.Add(1)))
					time.Sleep(time.Second)
					now.Add(-1)
					return nil
				}))
			}
		}
		for _, r := range results {
			if err := <-r; err != nil {
				t.Error(err)
			}
		}
		if most.Load() != 2 || jobs.Load() != 5 {
			t.Errorf("%d jobs, %d at once", jobs.Load(), most.Load())
		}
	}, 2)
}

func TestQueue_RunsOfTheFirstLaneDoNotWaitForTheSecond(t *testing.T) {
	testQueue(t, func(t *queueTest) {
		t.run()
		gate := make(chan struct{})
		var runs int
		long := func(_ context.Context, r *Run) error {
			if r.Lane() == 0 {
				return ErrNextLane
			}
			runs++
			<-gate
			return nil
		}
		results := []<-chan error{t.call("a", long), t.call("b", long)}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		t.busy(t.q.Do(short, work("b", nil)), "queued behind 0 others")
		for n := range 8 {
			if err := <-t.call(fmt.Sprintf("short %d", n), succeed); err != nil {
				t.Error(err)
			}
		}
		close(gate)
		for _, r := range results {
			if err := <-r; err != nil {
				t.Error(err)
			}
		}
		if runs != 2 {
			t.Errorf("%d long runs", runs)
		}
	}, 1, 1)
}
