package monitor

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

// fakeMounts are mounts of which one never finishes to drain.
type fakeMounts struct {
	blocked string // its key

	mu         sync.Mutex
	reconciled []string
	end        func(name string) // of a mount that is reconciled alone; may be nil
}

func (f *fakeMounts) Reconcile(_ context.Context, name string) (time.Duration, bool, error) {
	if f.end != nil {
		f.end(name)
	}
	return 0, true, nil
}

func (f *fakeMounts) BeginPass(context.Context) (func(context.Context, string, []string, func(string, error)), error) {
	return f.tryReconcile, nil
}

func (f *fakeMounts) tryReconcile(ctx context.Context, key string, names []string, failed func(string, error)) {
	if key == f.blocked {
		<-ctx.Done()
		failed(names[0], errors.New("draining"))
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reconciled = append(f.reconciled, names...)
}

// A mount that never finishes to drain delays neither the others, whose credentials would expire, nor the garbage collection.
func TestReconcile_DrainingMountDelaysNothing(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	mounts, orphans := &fakeMounts{blocked: parts.Key("a")}, 0
	m := &Monitor{
		Namespace: p.Namespace, Store: p.Store, Pins: p.Pins, Tracker: p.Tracker, Clients: p.Clients, Peer: p.Peer, Mounts: mounts,
		KillOrphans: func(context.Context) error { orphans++; return nil }, StaleAge: time.Hour, bound: 100 * time.Millisecond,
	}
	p.Mount("a", "1", "rclone", nil)
	other := p.Mount("b", "2", "rclone", nil)
	if err := m.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(mounts.reconciled, []string{other.Name}) || orphans != 1 {
		t.Errorf("reconciled: %v; orphans killed %d times", mounts.reconciled, orphans)
	}
}

// A lingering mount is reconciled when its time is over, also if it began to linger after others, and not before.
func TestLingeringMounts_AreReconciledInTime(t *testing.T) {
	track, ended := tracker.New(nil), make(chan string, 3)
	m := &Monitor{Tracker: track, Mounts: &fakeMounts{end: func(name string) {
		track.Forget(name)
		ended <- name
	}}}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { m.watchLingers(ctx) })
	linger := func(name string, d time.Duration) {
		track.Mount(name).Linger("rclone", tracker.Linger{Name: name, Since: time.Now(), Until: time.Now().Add(d)})
	}
	linger("long", time.Hour)
	began := time.Now()
	linger("short", 300*time.Millisecond)
	linger("over", 0)
	for range 2 {
		name := <-ended
		if name != "over" && name != "short" {
			t.Errorf("%s is reconciled", name)
		}
		if name == "short" && time.Since(began) < 300*time.Millisecond {
			t.Errorf("it is reconciled after %s", time.Since(began))
		}
	}
	cancel()
	wg.Wait()
	if left := track.Lingering(); len(left) != 1 || left[0].Name != "long" {
		t.Errorf("left: %v", left)
	}
}

// Publications are removed only if their target and their mount are gone. The target is not opened: an unresponsive client would block
// one call after the other.
func TestRemoveStale_NeedsNoTargetAndNoMount(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	m := p.Mount("a", "1", "mountpoint-s3", nil)
	shown := t.TempDir()
	p.HangAt(m, shown)
	gone := mount.Name(m.Key, 99)
	old := time.Now().Add(-2 * time.Hour)
	for _, tc := range []struct {
		target, mount string
		created       time.Time
		kept          bool
	}{
		{shown, m.Name, old, true},
		{shown, gone, old, true},
		{"/gone", m.Name, old, true},
		{"/gone", gone, time.Now(), true},
		{"/gone", gone, old, false},
	} {
		p.Publish(state.Publication{Target: tc.target, VolumeID: "v", Mount: tc.mount, Created: tc.created})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err := p.Store.Pubs.RemoveStale(ctx, time.Hour)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if _, kept, _ := p.Store.Pubs.Get(t.Context(), tc.target); kept != tc.kept {
			t.Errorf("%+v: kept: %t", tc, kept)
		}
	}
}

func TestSuccessorsAreReconciledFirst(t *testing.T) {
	a, b := strings.Repeat("a", 24), strings.Repeat("b", 24)
	got := byKey([]string{a + "-9", b + "-7", a + "-10", a + "-8"})
	if want := map[string][]string{a: {a + "-10", a + "-9", a + "-8"}, b: {b + "-7"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
