package supervisor

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/linger"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/runnertest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

func newSupervisor(t *testing.T, l runner.Launcher, b creds.Backends) (*Supervisor, *parts.Parts) {
	t.Helper()
	r, p := runnertest.New(t, l, b, 0)
	return New(Options{
		Runner: r, Drainer: drain.New(r, 0), Pins: p.Pins,
		Healer: &heal.Healer{Enabled: true, Namespace: p.Namespace, Store: p.Store, Pins: p.Pins, Tracker: p.Tracker},
	}), p
}

// running is a helper with a running client and static credentials.
func running() *mounttest.Helper {
	return &mounttest.Helper{Status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
}

// A client that serves is not killed for a changed backend that cannot be reached.
func TestReplace_UnreachableBackendKillsNoClient(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{Access: errors.New("connection refused")})
	m := p.Mount("a", "1", "rclone", func(m *state.Mount) { m.Backend = "another digest" })
	h := running()
	h.Serve(t, p.Store.Socket(m.Name))
	if _, err := s.replace(t.Context(), m, &creds.Grant{}, tracker.ReasonConfig); err == nil {
		t.Error("it was replaced")
	}
	if h.WasAsked("kill") || h.WasAsked("quit") {
		t.Errorf("its helper was asked: %v", h.Asked)
	}
}

// A replaced mount gets credentials for as long as it shows somewhere: files are open in it.
func TestReconcile_RefreshesReplacedMounts(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Superseded = true })
	p.Show(m)
	h := running()
	h.Serve(t, p.Store.Socket(m.Name))
	if _, err := s.reconcileMount(t.Context(), m.Name); err != nil {
		t.Fatal(err)
	}
	if !h.WasAsked("credentials") {
		t.Errorf("its helper was asked only: %v", h.Asked)
	}
}

// The last unpublish waits for predecessors, too: files that were open when they were replaced may not be stored yet.
func TestPredecessorsAreStoppedWithTheLastPublication(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	former := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Superseded = true })
	m := p.Mount("a", "2", "mountpoint-s3", func(m *state.Mount) { m.Predecessors = []string{mount.Name(m.Key, 0), former.Name} })
	h := running()
	h.Serve(t, p.Store.Socket(former.Name))
	waited := func() bool { return h.WasAsked("status") } // after it was asked to end
	if err := s.release(mounttest.Until(t, waited), m, "/t"); !fault.Is(err, fault.Busy) {
		t.Errorf("while the predecessor drains: %v", err)
	}
	if !h.WasAsked("end") {
		t.Error("the predecessor was not asked to end")
	}
}

// A mount may be replaced while its last publication is released. Its successor has the publication then, and may have healed the
// target: it is unmounted again and stopped, too.
func TestRelease_FollowsAReplacement(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	old := p.Mount("a", "1", "mountpoint-s3", nil)
	pub := state.Publication{Target: t.TempDir(), VolumeID: "v", Mount: old.Name}
	p.Publish(pub)
	unlock, err := s.keys.Lock(t.Context(), old.Key)
	if err != nil {
		t.Fatal(err)
	}
	done, unmounted := make(chan error, 1), false
	go func() {
		done <- s.Release(t.Context(), pub, func(context.Context) error { unmounted = true; return nil })
	}()
	successor := p.Mount("a", "2", "mountpoint-s3", func(m *state.Mount) { m.Predecessors = []string{old.Name} })
	if err := p.Store.Pubs.Succeed(t.Context(), successor); err != nil {
		t.Fatal(err)
	}
	if len(done) > 0 {
		t.Error("it did not wait for the replacement")
	}
	unlock()
	if err := <-done; err != nil || !unmounted {
		t.Errorf("unmounted: %t, %v", unmounted, err)
	}
	if names, err := p.Store.Names(t.Context()); err != nil || len(names) > 0 {
		t.Errorf("left: %v, %v", names, err)
	}
	if pubs, err := p.Store.Pubs.All(t.Context()); err != nil || len(pubs) > 0 {
		t.Errorf("publications left: %v, %v", pubs, err)
	}
}

// A driver that exits while it replaces a mount leaves a successor that has no publications yet. The last release does not leave it.
func TestRelease_FinishesAReplacement(t *testing.T) {
	for _, phase := range []state.Phase{state.Running, state.Starting} {
		s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
		old := p.Mount("a", "1", "mountpoint-s3", nil)
		pub := state.Publication{Target: t.TempDir(), VolumeID: "v", Mount: old.Name}
		p.Publish(pub)
		p.Mount("a", "2", "mountpoint-s3", func(m *state.Mount) { m.Predecessors, m.Phase = []string{old.Name}, phase })
		if err := s.Release(t.Context(), pub, func(context.Context) error { return nil }); err != nil {
			t.Errorf("%v: %v", phase, err)
		}
		if names, err := p.Store.Names(t.Context()); err != nil || len(names) > 0 {
			t.Errorf("%v: left: %v, %v", phase, names, err)
		}
		if pubs, err := p.Store.Pubs.All(t.Context()); err != nil || len(pubs) > 0 {
			t.Errorf("%v: publications left: %v, %v", phase, pubs, err)
		}
	}
}

// An unpublish that has unmounted the target may wait for a reconcile that finds a successor in use nowhere and stops it: the
// predecessor goes with it, because nothing leads the unpublish to it any more.
func TestReconcile_StopsPredecessors(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	old := p.Mount("a", "1", "mountpoint-s3", nil)
	pub := state.Publication{Target: t.TempDir(), VolumeID: "v", Mount: old.Name, Created: time.Now()}
	p.Publish(pub)
	successor := p.Mount("a", "2", "mountpoint-s3", func(m *state.Mount) { m.Predecessors = []string{old.Name} })
	if _, err := s.reconcileMount(t.Context(), successor.Name); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), pub, func(context.Context) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if names, err := p.Store.Names(t.Context()); err != nil || len(names) > 0 {
		t.Errorf("left: %v, %v", names, err)
	}
}

// A target that was unmounted by hand is still the CO's: a container may run on a copy of the mount.
func TestReconcile_KeepsMountsWhoseTargetExists(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	m := p.Mount("a", "1", "mountpoint-s3", nil)
	h := running()
	h.Serve(t, p.Store.Socket(m.Name))
	p.HangAt(m, p.Store.SourceDir(m.Name))
	target := t.TempDir() + "/target"
	mustMkdir(t, target)
	p.Publish(state.Publication{Target: target, VolumeID: "v", Mount: m.Name, Created: time.Now().Add(-2 * StaleAge)})
	if _, err := s.reconcileMount(t.Context(), m.Name); err != nil {
		t.Fatal(err)
	}
	if h.WasAsked("end") {
		t.Error("it is stopped")
	}
	mustRemove(t, target)
	ctx := mounttest.Until(t, func() bool { return h.WasAsked("end") })
	if _, err := s.reconcileMount(ctx, m.Name); err == nil || !h.WasAsked("end") {
		t.Errorf("it is not stopped although the target is gone: %v", err)
	}
}

// A mount is healthy, outdated or down; an outdated one of a secret waits for the credentials of a republish.
func TestHealth(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	m := p.Mount("a", "1", "mountpoint-s3", nil)
	if health, err := s.Health(t.Context(), m); err != nil || health != mount.Down {
		t.Errorf("a mount without processes: %d, %v", health, err)
	}
	h := running()
	h.Serve(t, p.Store.Socket(m.Name))
	p.HangAt(m, p.Store.SourceDir(m.Name))
	if health, err := s.Health(t.Context(), m); err != nil || health != mount.Healthy {
		t.Errorf("a mount whose helper runs a client: %d, %v", health, err)
	}
	m.Backend = "another digest"
	if health, err := s.Health(t.Context(), m); err != nil || health != mount.Outdated {
		t.Errorf("a mount of an older configuration: %d, %v", health, err)
	}
	m.Spec.Source = credentials.SourceSecret
	if _, err := s.replace(t.Context(), m, &creds.Grant{}, tracker.ReasonConfig); !fault.Is(err, fault.Unavailable) {
		t.Errorf("replaced without credentials: %v", err)
	}
}

// What a driver leaves that is killed between the unmount of the last target and the record of the mount lingers after the next pass, and
// stays until its time is over.
func TestReconcile_LetsAMountLinger(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	s.lingerer.Limits = linger.Limits{Mounts: 2, Memory: 1 << 30}
	m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Spec.ReadOnly, m.LingerFor = true, time.Hour })
	p.MountAt(m, p.Store.SourceDir(m.Name))
	h := running()
	h.Status.Session = &helper.SessionStatus{}
	h.Serve(t, p.Store.Socket(m.Name))
	for range 2 {
		if _, err := s.reconcileMount(t.Context(), m.Name); err != nil {
			t.Fatal(err)
		}
		if m = p.Record(m.Name); !m.Lingers() || h.WasAsked("end") {
			t.Fatalf("it does not linger: %+v", m)
		}
	}
	m.Linger.Until = time.Now()
	if err := p.Store.Write(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	ctx := mounttest.Until(t, func() bool { return h.WasAsked("end") })
	_, _ = s.reconcileMount(ctx, m.Name)
	if now := p.Record(m.Name); !h.WasAsked("end") || now.Phase != state.Ending || now.Linger == nil {
		t.Errorf("its time is over: %+v", now)
	}
}

func mustMkdir(t *testing.T, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
}

func mustRemove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// A mount that shows nowhere is removed, whatever is left of it.
func TestReconcile_RemovesWhatIsLeftOfMounts(t *testing.T) {
	for what, tc := range map[string]struct {
		change  func(*state.Mount)
		record  string // instead of the mount's record; "": it stays
		refused bool   // the exit of its client is unknown, so its cache is kept
	}{
		"starting":                {change: func(m *state.Mount) { m.Phase = state.Starting }},
		"ending":                  {change: func(m *state.Mount) { m.Phase = state.Ending }},
		"superseded":              {change: func(m *state.Mount) { m.Superseded = true }},
		"without publications":    {change: func(*state.Mount) {}},
		"with a damaged record":   {change: func(*state.Mount) {}, record: "{", refused: true},
		"with another's record":   {change: func(*state.Mount) {}, record: `{"name":"another"}`, refused: true},
		"of a removed definition": {change: func(m *state.Mount) { m.Client = "removed" }, refused: true},
	} {
		t.Run(what, func(t *testing.T) {
			s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
			m := p.Mount("a", "1", "mountpoint-s3", tc.change)
			if tc.record != "" {
				if err := os.WriteFile(p.Store.MountDir(m.Name)+"/mount.json", []byte(tc.record), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if _, _, err := s.Reconcile(t.Context(), m.Name); tc.refused != (err != nil) {
				t.Errorf("%v", err)
			}
			if p.Store.Exists(t.Context(), m.Name) != tc.refused {
				t.Errorf("the mount exists: %t", !tc.refused)
			}
		})
	}
}

// A publication gets no mount that is being stopped or started, or that is of another spec.
func TestEnsure_UsesNoMountThatIsNotItsOwn(t *testing.T) {
	spec := mount.NewSpec(mounttest.Request(), nil)
	for what, tc := range map[string]struct {
		change func(*state.Mount, *want.Mount)
		kind   fault.Kind
	}{
		"rotated, gone":  {func(m *state.Mount, w *want.Mount) { w.At = mount.Name(m.Key, 99) }, fault.Busy},
		"rotated, ends":  {func(m *state.Mount, w *want.Mount) { w.At, m.Phase = m.Name, state.Ending }, fault.Busy},
		"another's spec": {func(m *state.Mount, _ *want.Mount) { m.Spec.Bucket = "another" }, fault.Unknown},
		"half started":   {func(m *state.Mount, _ *want.Mount) { m.Phase = state.Starting }, fault.Unknown},
		"rotated away":   {func(m *state.Mount, _ *want.Mount) { m.Rotating = true }, fault.Busy},
	} {
		t.Run(what, func(t *testing.T) {
			s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
			w := want.Mount{Publication: state.Publication{VolumeID: "v", Target: "/t"}, Spec: spec, Grant: &creds.Grant{}}
			m := state.Mount{Name: mount.Name(spec.Key(), 1), Key: spec.Key(), Phase: state.Running, Client: "mountpoint-s3", UID: parts.UID, Spec: spec}
			tc.change(&m, &w)
			if err := p.Store.Make(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			if _, err := s.Ensure(ctx, w); err == nil || fault.KindOf(err) != tc.kind {
				t.Errorf("kind %s, want %s: %v", fault.KindOf(err), tc.kind, err)
			}
			if unlock, ok := s.keys.TryLock(w.Key()); !ok {
				t.Error("its key stays locked")
			} else {
				unlock()
			}
		})
	}
}

// The mounts that a publication was moved away from end with it, or with the last publication that they still have.
func TestRelease_EndsTheMountsThatItLeft(t *testing.T) {
	for _, target := range []string{"/moved", "/stays"} {
		s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
		former, m := p.Mount("a", "1", "mountpoint-s3", nil), p.Mount("b", "1", "mountpoint-s3", nil)
		pubs := map[string]state.Publication{"/moved": {Target: "/moved", VolumeID: "v", Mount: m.Name, MovedFrom: []string{former.Name}}}
		if p.Publish(pubs["/moved"]); target == "/stays" {
			pubs[target] = state.Publication{Target: target, VolumeID: "v", Mount: former.Name}
			p.Publish(pubs[target])
		}
		if err := s.Release(t.Context(), pubs[target], func(context.Context) error { return nil }); err != nil {
			t.Errorf("%s: %v", target, err)
		}
		if p.Store.Exists(t.Context(), former.Name) || p.Store.Exists(t.Context(), m.Name) != (target == "/stays") {
			t.Errorf("%s: the former mount is left, or the wrong one ended", target)
		}
		if err := s.cleanUpPrevious(t.Context(), pubs["/moved"], &creds.Grant{}); err != nil {
			t.Errorf("%s: %v", target, err)
		}
	}
}
