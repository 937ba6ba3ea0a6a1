package podclient

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

type connections struct{ err error }

func (c connections) Abort(context.Context, uint32) error { return c.err }

func testAttendant(t *testing.T, c Connections) *attendant {
	t.Helper()
	ns := host.Own()
	s := &Server{Options: Options{Namespace: ns, Connections: c}, records: records{ns, t.TempDir()}}
	return newAttendant(s, podvolume.Volume{Target: filepath.Join(t.TempDir(), "pods/0b9c7f1e/volumes/kubernetes.io~csi/data/mount"), EmptyDir: "e", Socket: "s"})
}

// A client can make calls of the driver wait until its account is exhausted. The driver must still be able to end its connection.
func TestAClientCannotExhaustTheAttendant(t *testing.T) {
	a := testAttendant(t, connections{})
	ns, release := a.s.Namespace, make(chan struct{})
	defer close(release)
	ctx, cancel := context.WithCancel(host.For(t.Context(), account(a.volume)))
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
	a.client, a.aborted = 5, true // unmounted by now
	a.step(t.Context())
	if a.client != 0 || a.aborted {
		t.Errorf("the attendant did not look: client %d, aborted %t", a.client, a.aborted)
	}
}

// An abort that fails is repeated with the usual pause.
func TestFailedAbort(t *testing.T) {
	failure := errors.New("no control file system")
	a := testAttendant(t, connections{failure})
	if err := a.abort(t.Context(), own{n: 1}); !errors.Is(err, failure) || a.aborted {
		t.Errorf("%v, aborted: %t", err, a.aborted)
	}
	a = testAttendant(t, connections{})
	if err := a.abort(t.Context(), own{n: 1}); err != nil || !a.aborted {
		t.Errorf("%v, aborted: %t", err, a.aborted)
	}
}

func TestPace(t *testing.T) {
	var p pace
	now := time.Now()
	admitted := 0
	for ; p.wait(now) <= 0; admitted++ {
		p.admit(now)
	}
	if admitted != meetBurst || p.wait(now) != meetEvery || p.wait(now.Add(meetEvery)) > 0 {
		t.Errorf("%d at once, and then after %s", admitted, p.wait(now))
	}
	for now = now.Add(time.Hour); p.wait(now) <= 0; admitted++ {
		p.admit(now)
	}
	if admitted != 2*meetBurst {
		t.Errorf("after a pause: %d", admitted-meetBurst)
	}
}
