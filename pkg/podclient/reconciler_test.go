package podclient

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

type connections struct{ err error }

func (c connections) Abort(context.Context, uint32) error { return c.err }

func testReconciler(t *testing.T, c Connections) *reconciler {
	t.Helper()
	ns := host.Own()
	s := &Server{ns: ns, opts: Options{Connections: c}, records: records{ns, t.TempDir()}, metrics: newMetrics(), active: map[string]*reconciler{}}
	return newReconciler(s, podvolume.Volume{Target: filepath.Join(t.TempDir(), "pods/0b9c7f1e/volumes/kubernetes.io~csi/data/mount"), EmptyDir: "e", Socket: "s"})
}

// A client can make calls of the driver wait until its account is exhausted. The driver must still be able to end its connection.
func TestAClientCannotExhaustTheReconciler(t *testing.T) {
	r := testReconciler(t, connections{})
	ns, release := r.s.ns, make(chan struct{})
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

// Any number of clients that do not serve cost no read of the mount table each.
func TestReconcilers_ShareTheMountTable(t *testing.T) {
	first := testReconciler(t, connections{})
	const looks = 100
	for tries := 0; ; tries++ { // other processes of the machine may change mounts
		before := first.s.ns.Reads()
		for i := range looks {
			r := newReconciler(first.s, podvolume.Volume{Target: fmt.Sprintf("/target-%d", i)})
			if err := r.lookAtClient(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if reads := first.s.ns.Reads() - before; reads < looks/10 {
			return
		} else if tries == 10 {
			t.Fatalf("%d reads of the mount table for %d looks", reads, looks)
		}
	}
}

// An abort that fails is repeated with the usual pause.
func TestFailedAbort(t *testing.T) {
	failure := errors.New("no control file system")
	r := testReconciler(t, connections{failure})
	if err := r.abortClient(t.Context(), fileSystem{n: 1}); !errors.Is(err, failure) || r.aborted {
		t.Errorf("%v, aborted: %t", err, r.aborted)
	}
	r = testReconciler(t, connections{})
	if err := r.abortClient(t.Context(), fileSystem{n: 1}); err != nil || !r.aborted {
		t.Errorf("%v, aborted: %t", err, r.aborted)
	}
}

func TestPace(t *testing.T) {
	var p pace
	now := time.Now()
	admitted := 0
	for ; p.wait(now) <= 0; admitted++ {
		p.countEvent(now)
	}
	if admitted != handoverBurst || p.wait(now) != handoverEvery || p.wait(now.Add(handoverEvery)) > 0 {
		t.Errorf("%d at once, and then after %s", admitted, p.wait(now))
	}
	for now = now.Add(time.Hour); p.wait(now) <= 0; admitted++ {
		p.countEvent(now)
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
	if err := s.stopReconciler(ended, v.Target); !fault.Is(err, fault.Busy) {
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
		state            status.State
		serving, aborted bool
		want, failure    string
	}{
		{"exit", Serving, true, false, exitExit, status.ReasonExited},
		{"hang", status.Unresponsive, true, true, exitHang, status.ReasonUnresponsive},
		{"start", status.Starting, false, true, exitStart, status.ReasonUnresponsive},
		{"seen by an earlier driver", status.Unknown, false, false, "", ""},
		{"a descriptor that was not taken", Waiting, false, false, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := testReconciler(t, connections{})
			r.setState(tc.state)
			r.serving = tc.serving
			if tc.aborted {
				if err := r.abortClient(t.Context(), fileSystem{n: 1}); err != nil {
					t.Fatal(err)
				}
			}
			r.recordExit(tc.aborted)
			r.recordExit(false) // it is repeated until the file system is removed
			p := r.currentProgress()
			want := Exited
			if tc.state == Waiting {
				want = Waiting
			}
			if p.state != want || (p.lastFailure == nil) != (tc.failure == "") || p.lastFailure != nil && p.lastFailure.Reason != tc.failure {
				t.Errorf("%+v, %+v", p, p.lastFailure)
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
	r.setState(Waiting)
	r.recordFailure(ReasonSocket, time.Time{}, "cannot listen")
	first := r.currentProgress()
	r.setState(Waiting)
	r.recordFailure(ReasonSocket, time.Now(), "cannot listen")
	again := r.currentProgress()
	if again.since != first.since || again.lastFailure.Since != first.lastFailure.Since || again.lastFailure.NextTry.IsZero() {
		t.Errorf("%+v %+v, then %+v %+v", first, first.lastFailure, again, again.lastFailure)
	}
	r.recordHandover()
	if p := r.currentProgress(); p.state != status.Starting || p.handovers != 1 || p.lastFailure == nil {
		t.Errorf("%+v", p)
	}
	r.setState(Stopped)
	r.setState(Serving)
	if p := r.currentProgress(); p.state != Stopped {
		t.Errorf("%+v", p)
	}
}

// answerNothing is a client that serves, and whose service fails: it answers every request with an error.
func answerNothing(fuse *os.File) {
	const opInit, version = 26, 7<<0 | 31<<32 // include/uapi/linux/fuse.h
	buf := make([]byte, 1<<18)
	for {
		n, err := unix.Read(int(fuse.Fd()), buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n < 40 {
			return
		}
		answer := make([]byte, 16)
		if binary.NativeEndian.Uint32(buf[4:]) == opInit {
			answer = make([]byte, 16+64)
			binary.NativeEndian.PutUint64(answer[16:], version)
		} else {
			failed := int32(unix.EIO)
			binary.NativeEndian.PutUint32(answer[4:], uint32(-failed))
		}
		binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
		copy(answer[8:16], buf[8:16])
		if _, err := unix.Write(int(fuse.Fd()), answer); err != nil {
			return
		}
	}
}

// A program that connects while another one has the descriptor waits for that one to exit. The driver does not read the mount table, and ask
// the client, more than a few times for it.
func TestWaitingForAnExitIsCheap(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	r := k.served()
	before := r.s.ns.Reads()
	if err := r.awaitFreed(t.Context()); !fault.Is(err, fault.Busy) {
		t.Error(err)
	}
	if reads := r.s.ns.Reads() - before; reads == 0 || reads > 15 {
		t.Errorf("the mount table was read %d times", reads)
	}
}

// The file system of a client that cannot be shown at the target, as that of a hostile one, is not tried again with each look.
func TestAClientThatCannotBeShownIsCheap(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	r := k.served()
	if err := host.Detach(r.volume.Target); err != nil {
		t.Fatal(err)
	}
	look := func() int {
		t.Helper()
		before := r.s.ns.Reads()
		if err := r.lookAtClient(t.Context()); err != nil {
			t.Error(err)
		}
		return r.s.ns.Reads() - before
	}
	first := look()
	r.replaceAt = r.replaceAt.Add(time.Hour)
	for range 5 {
		if reads := look(); reads > 1 || first <= 1 {
			t.Errorf("the first look read the mount table %d times, another one %d times", first, reads)
		}
	}
}
