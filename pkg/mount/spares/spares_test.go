package spares

import (
	"context"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/uids"
)

// prepared is a Preparer for mounts that need no addresses.
type prepared struct{ no bool }

func (p prepared) Prepares(needs []netip.Addr) bool            { return !p.no && len(needs) == 0 }
func (prepared) Limit(context.Context, launcher.Unit) error    { return nil }
func (prepared) Describe(context.Context, launcher.Unit) error { return nil }

func newPool(t *testing.T, prep Preparer) *Pool {
	t.Helper()
	p, l := parts.New(t, mounttest.S3{}), &mounttest.UIDs{Live: map[uint32]bool{}}
	u := &uids.Allocator{Namespace: p.Namespace, Launcher: l, Store: p.Store, Range: launcher.UIDRange{First: parts.UID, Last: parts.UID + 1}}
	return New(Options{Namespace: p.Namespace, Launcher: l, Preparer: prep, UIDs: u, Store: p.Store, Tracker: p.Tracker})
}

// A spare is given to one mount, and to none that it does not suit.
func TestSpares_AreTakenOnce(t *testing.T) {
	s := newPool(t, prepared{})
	s.ready = []state.Spare{{Name: "spare-1", UID: 1}, {Name: "spare-2", UID: 2}}
	other, end := s.Begin([]netip.Addr{netip.MustParseAddr("169.254.170.23")})
	defer end()
	if other != nil {
		t.Errorf("a mount with special needs got %v", other)
	}
	seen := map[uint32]bool{}
	for range 2 {
		spare, end := s.Begin(nil)
		defer end()
		if spare == nil || seen[spare.UID] {
			t.Fatalf("a mount got %v after %v", spare, seen)
		}
		seen[spare.UID] = true
	}
	if spare, end := s.Begin(nil); spare != nil {
		t.Errorf("a third mount got %v", spare)
	} else {
		end()
	}
}

// Without a launcher that prepares helpers, nothing is kept.
func TestSpares_NeedALauncherForThem(t *testing.T) {
	s := newPool(t, nil)
	spare, end := s.Begin(nil)
	end()
	if spare != nil || s.starting != 0 {
		t.Errorf("%v, %d", spare, s.starting)
	}
	if missing, _ := newPool(t, prepared{no: true}).adjust(); missing {
		t.Error("a spare is missing where none can be used")
	}
}

// More spares are kept after mounts found none, up to a limit, and fewer again when that is over.
func TestSpares_FollowTheDemand(t *testing.T) {
	s := newPool(t, prepared{})
	if missing, _ := s.adjust(); !missing {
		t.Error("the first spare is not missing")
	}
	var ends []func()
	for range 5 {
		_, end := s.Begin(nil)
		ends = append(ends, end)
	}
	if s.startsWait() <= 0 {
		t.Error("spares are started beside mounts")
	}
	s.busySince = time.Now().Add(-sparePatience)
	if s.startsWait() > 0 {
		t.Error("spares wait for mounts forever")
	}
	for _, end := range ends {
		end()
	}
	if s.startsWait() != 0 || s.target != maxSpares {
		t.Errorf("busy for %s, target %d", s.startsWait(), s.target)
	}
	for i := range uint32(maxSpares) {
		s.ready = append(s.ready, state.Spare{UID: i})
	}
	if missing, discarded := s.adjust(); missing || discarded {
		t.Errorf("%d spares are not enough, or too many", len(s.ready))
	}
	for want := maxSpares / 2; want >= minSpares; want /= 2 {
		s.decays = time.Now().Add(-time.Second)
		for discarded := true; discarded; {
			_, discarded = s.adjust()
		}
		if s.target != want || len(s.ready) != want {
			t.Fatalf("%d spares are left, target %d, want %d", len(s.ready), s.target, want)
		}
	}
	s.decays = time.Now().Add(-time.Second)
	if missing, discarded := s.adjust(); missing || discarded || s.target != minSpares {
		t.Errorf("the last spare is too many: %d", s.target)
	}
}

// A spare without an answer is not given to a mount.
func TestSpares_UnresponsiveOnesAreDiscarded(t *testing.T) {
	s := newPool(t, prepared{})
	spare := state.Spare{Name: "spare-1", UID: 5000}
	s.ready = []state.Spare{spare}
	s.checkReady(t.Context())
	if len(s.ready) != 0 || len(s.discarded) != 1 {
		t.Fatalf("ready %v, discarded %v", s.ready, s.discarded)
	}
	if done, err := s.endDiscarded(t.Context()); !done || err != nil || len(s.discarded) != 0 {
		t.Errorf("%v, %v, %v", done, err, s.discarded)
	}
	if l, ok := s.parts.Launcher.(*mounttest.UIDs); !ok || len(l.Killed) != 1 || l.Killed[0] != spare.UID {
		t.Errorf("killed: %v", l.Killed)
	}
}

// A spare that was told to exit may do so before it is killed: a unit that is killed is a failed one. One that this driver started and
// that has exited is not killed, because it has started no process.
func TestSpares_ExitBeforeTheyAreKilled(t *testing.T) {
	t.Run("of the former driver", func(t *testing.T) {
		exitsBeforeItIsKilled(t, 1, func(ctx context.Context, p *Pool, spare state.Spare) error { return p.endSpare(ctx, spare) })
	})
	t.Run("discarded", func(t *testing.T) {
		exitsBeforeItIsKilled(t, 0, func(ctx context.Context, p *Pool, spare state.Spare) error {
			p.discarded = []state.Spare{spare}
			_, err := p.endDiscarded(ctx)
			return err
		})
	})
}

func exitsBeforeItIsKilled(t *testing.T, kills int, end func(context.Context, *Pool, state.Spare) error) {
	t.Helper()
	s := newPool(t, prepared{})
	spare, err := s.parts.UIDs.AllocateSpare(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	process, exit := mounttest.Process(t, spare.UID)
	var exits atomic.Bool
	exited := make(chan error, 1)
	l := &mounttest.UIDs{OnKill: func(uid uint32) {
		if uid != spare.UID || !exits.Load() {
			t.Errorf("uid %d is killed before the spare, of uid %d, exits", uid, spare.UID)
		}
	}}
	s.parts.Launcher = l
	h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, State: helper.StateIdle, PID: process.Process.Pid}}
	h.Serve(t, s.parts.Store.SpareSocket(spare.Name))
	go func() {
		<-mounttest.Until(t, func() bool { return h.WasAsked("quit") }).Done()
		time.Sleep(50 * time.Millisecond)
		exits.Store(true)
		exit()
		exited <- process.Wait()
	}()
	if err := end(t.Context(), s, spare); err != nil {
		t.Error(err)
	}
	if err := <-exited; err != nil {
		t.Error(err)
	}
	if len(l.Killed) != kills {
		t.Errorf("killed: %v", l.Killed)
	}
	if left, err := s.parts.Store.Spares(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// starting is a launcher whose helper answers once ready is closed.
type starting struct {
	mounttest.UIDs
	begin func(u launcher.Unit)
	ready chan struct{}
}

func (l *starting) Start(ctx context.Context, u launcher.Unit) error {
	l.begin(u)
	<-l.ready
	return ctx.Err()
}

// A driver that ends while a spare starts ends that spare too.
func TestSpares_StartingOnesEndWithTheDriver(t *testing.T) {
	s := newPool(t, prepared{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, State: helper.StateIdle}}
	l := &starting{ready: make(chan struct{})}
	l.begin = func(u launcher.Unit) {
		if err := os.Remove(s.parts.Store.SpareSocket(u.Name)); err != nil { // the driver's end of it is not served
			t.Error(err)
		}
		h.Serve(t, s.parts.Store.SpareSocket(u.Name))
		cancel()
		close(l.ready)
	}
	s.parts.Launcher = l
	s.Run(ctx)
	if !h.WasAsked("quit") || len(l.Killed) != 1 {
		t.Errorf("asked to quit: %t, killed: %v", h.WasAsked("quit"), l.Killed)
	}
	if left, err := s.parts.Store.Spares(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
