package podclient

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

type connections struct{ err error }

func (c connections) Abort(context.Context, uint32) error { return c.err }

func testReconciler(t *testing.T, c Connections) *reconciler {
	t.Helper()
	ns := host.Own()
	s := &Server{Options: Options{Namespace: ns, Connections: c}, records: records{ns, t.TempDir()}, metrics: newMetrics(), active: map[string]*reconciler{}}
	return newReconciler(s, podvolume.Volume{Target: filepath.Join(t.TempDir(), "pods/0b9c7f1e/volumes/kubernetes.io~csi/data/mount"), EmptyDir: "e", Socket: "s"})
}

// A client can make calls of the driver wait until its account is exhausted. The driver must still be able to end its connection.
func TestAClientCannotExhaustTheReconciler(t *testing.T) {
	r := testReconciler(t, connections{})
	ns, release := r.s.Namespace, make(chan struct{})
	defer close(release)
	ctx, cancel := context.WithCancel(host.For(t.Context(), account(r.volume)))
	for range 100 {
		if fault.Is(ns.Do(ctx, "trying", func() error { return nil }), fault.Exhausted) {
			break
		}
		bounded, cancel := context.WithTimeout(ctx, time.Millisecond)
		_ = ns.Do(bounded, "waiting for the client", func() error { <-release; return nil })
		cancel()
	}
	cancel()
	if ns.Overdue() == 0 {
		t.Fatal("no call waits")
	}
	r.client, r.aborted = 5, true // unmounted by now
	r.step(t.Context())
	if r.client != 0 || r.aborted {
		t.Errorf("the reconciler did not look: client %d, aborted %t", r.client, r.aborted)
	}
}

// An abort that fails is repeated with the usual pause.
func TestFailedAbort(t *testing.T) {
	failure := errors.New("no control file system")
	r := testReconciler(t, connections{failure})
	if err := r.abort(t.Context(), own{n: 1}); !errors.Is(err, failure) || r.aborted {
		t.Errorf("%v, aborted: %t", err, r.aborted)
	}
	r = testReconciler(t, connections{})
	if err := r.abort(t.Context(), own{n: 1}); err != nil || !r.aborted {
		t.Errorf("%v, aborted: %t", err, r.aborted)
	}
}

func TestPace(t *testing.T) {
	var p pace
	now := time.Now()
	admitted := 0
	for ; p.wait(now) <= 0; admitted++ {
		p.admit(now)
	}
	if admitted != handoverBurst || p.wait(now) != handoverEvery || p.wait(now.Add(handoverEvery)) > 0 {
		t.Errorf("%d at once, and then after %s", admitted, p.wait(now))
	}
	for now = now.Add(time.Hour); p.wait(now) <= 0; admitted++ {
		p.admit(now)
	}
	if admitted != 2*handoverBurst {
		t.Errorf("after a pause: %d", admitted-handoverBurst)
	}
}

// A publish after an unpublish that timed out starts a new reconciler, when the stopped one has ended.
func TestPublishAfterAnUnpublishThatTimedOut(t *testing.T) {
	stuck := testReconciler(t, connections{})
	s, v := stuck.s, stuck.volume
	ctx, cancel := context.WithCancel(t.Context())
	s.base, stuck.cancel = ctx, func() {} // it is in a call, and has not noticed yet
	s.active[idOf(v.Target)] = stuck
	ended, end := context.WithTimeout(ctx, time.Millisecond)
	defer end()
	if err := s.stop(ended, v.Target); !fault.Is(err, fault.Busy) {
		t.Fatalf("stop: %v", err)
	}
	if r, err := s.reconcile(ended, v); !fault.Is(err, fault.Busy) {
		t.Errorf("while it is stopping: %v, %v", r == stuck, err)
	}
	close(stuck.done)
	r, err := s.reconcile(ctx, v)
	if err != nil || r == stuck || r.cancel == nil {
		t.Fatalf("the stopped one: %t, %v", r == stuck, err)
	}
	cancel()
	s.group.Wait()
}

func TestExitsAreCountedOnceByReason(t *testing.T) {
	for _, tc := range []struct {
		name             string
		state            State
		serving, aborted bool
		want, failure    string
	}{
		{"exit", Serving, true, false, exitExit, ReasonExited},
		{"hang", Unresponsive, true, true, exitHang, ReasonUnresponsive},
		{"start", Starting, false, true, exitStart, ReasonUnresponsive},
		{"seen by an earlier driver", Unknown, false, false, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := testReconciler(t, connections{})
			r.set(tc.state)
			r.serving = tc.serving
			if tc.aborted {
				if err := r.abort(t.Context(), own{n: 1}); err != nil {
					t.Fatal(err)
				}
			}
			r.exited(tc.aborted)
			r.exited(false) // it is repeated until the file system is removed
			p := r.current()
			if p.State != Exited || (p.Failure == nil) != (tc.failure == "") || p.Failure != nil && p.Failure.Reason != tc.failure {
				t.Errorf("%+v, %+v", p, p.Failure)
			}
			for _, reason := range []string{exitExit, exitHang, exitStart} {
				want := 0.0
				if reason == tc.want {
					want = 1
				}
				if got := testutil.ToFloat64(r.s.metrics.exits.WithLabelValues(reason)); got != want {
					t.Errorf("exits with reason %s: %v, want %v", reason, got, want)
				}
			}
		})
	}
}

// What is shown stays as it is for a volume that is being unpublished, and a failure that continues keeps its time.
func TestProgress(t *testing.T) {
	r := testReconciler(t, connections{})
	r.set(Waiting)
	r.fail(ReasonSocket, time.Time{}, "cannot listen")
	first := r.current()
	r.set(Waiting)
	r.fail(ReasonSocket, time.Now(), "cannot listen")
	again := r.current()
	if again.Since != first.Since || again.Failure.Time != first.Failure.Time || again.Failure.Next.IsZero() {
		t.Errorf("%+v %+v, then %+v %+v", first, first.Failure, again, again.Failure)
	}
	r.handedOver()
	if p := r.current(); p.State != Starting || p.Handovers != 1 || p.Failure == nil {
		t.Errorf("%+v", p)
	}
	r.set(Stopped)
	r.set(Serving)
	if p := r.current(); p.State != Stopped {
		t.Errorf("%+v", p)
	}
}
