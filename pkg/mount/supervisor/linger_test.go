package supervisor

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

func TestWhichLingeringMountsExceedTheLimits(t *testing.T) {
	all := []tracker.Linger{{Name: "old", Memory: 30}, {Name: "middle", Memory: 10}, {Name: "new", Memory: 20}}
	for _, tc := range []struct {
		limits LingerLimits
		want   []eviction
	}{
		{LingerLimits{3, 60}, nil},
		{LingerLimits{2, 60}, []eviction{{"old", tracker.EndedMounts}}},
		{LingerLimits{1, 60}, []eviction{{"old", tracker.EndedMounts}, {"middle", tracker.EndedMounts}}},
		{LingerLimits{3, 59}, []eviction{{"old", tracker.EndedMemory}}},
		{LingerLimits{3, 30}, []eviction{{"old", tracker.EndedMemory}}},
		{LingerLimits{3, 29}, []eviction{{"old", tracker.EndedMemory}, {"middle", tracker.EndedMemory}}},
		{LingerLimits{2, 29}, []eviction{{"old", tracker.EndedMounts}, {"middle", tracker.EndedMemory}}},
		{LingerLimits{3, 19}, []eviction{{"old", tracker.EndedMemory}, {"middle", tracker.EndedMemory}, {"new", tracker.EndedMemory}}},
		{LingerLimits{0, 60}, []eviction{{"old", tracker.EndedMounts}, {"middle", tracker.EndedMounts}, {"new", tracker.EndedMounts}}},
	} {
		if got := tc.limits.exceeding(all); !slices.Equal(got, tc.want) {
			t.Errorf("%+v: %v, want %v", tc.limits, got, tc.want)
		}
	}
}

func TestWhichMountsALingeringOneGivesWayTo(t *testing.T) {
	s, _ := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	base := mount.Spec{Backend: "default", Bucket: "b", Prefix: "p/", Source: credentials.SourceWorkload, Identity: "team/app"}
	changed := func(change func(*mount.Spec)) mount.Spec {
		spec := base
		change(&spec)
		return spec
	}
	reading := changed(func(s *mount.Spec) { s.ReadOnly = true })
	elsewhere := changed(func(s *mount.Spec) { s.Prefix = "q/" })
	for what, tc := range map[string]struct {
		lingers mount.Spec
		starts  mount.Spec
		volume  string
		want    string
	}{
		"an overlapping prefix":            {base, changed(func(s *mount.Spec) { s.Prefix = "p/q/" }), "other", tracker.EndedOverlap},
		"one that only reads":              {base, reading, "other", tracker.EndedOverlap},
		"another prefix":                   {base, elsewhere, "other", ""},
		"a writer where it only reads":     {reading, base, "other", ""},
		"the volume with an option":        {reading, changed(func(s *mount.Spec) { s.ReadOnly, s.Options = true, []string{"x"} }), "v", tracker.EndedVolume},
		"the volume with another identity": {reading, changed(func(s *mount.Spec) { s.ReadOnly, s.Identity = true, "team/other" }), "v", ""},
		"the volume at another place":      {base, elsewhere, "v", tracker.EndedVolume},
		"the volume with another secret": {
			changed(func(s *mount.Spec) { s.ReadOnly, s.Source, s.Identity = true, credentials.SourceSecret, "old" }),
			changed(func(s *mount.Spec) { s.ReadOnly, s.Source, s.Identity = true, credentials.SourceSecret, "new" }), "v", tracker.EndedVolume,
		},
	} {
		w := want.Mount{Spec: tc.starts, Publication: state.Publication{VolumeID: tc.volume}}
		if got := (drainOrder{&s.Options}).spoils(w, state.Mount{VolumeID: "v", Spec: tc.lingers}); got != tc.want {
			t.Errorf("%s: %q, want %q", what, got, tc.want)
		}
	}
}

// lingerer is a supervisor with a read-only mount that may linger, and whose helper answers.
func lingerer(t *testing.T, change func(*state.Mount)) (*Supervisor, *parts.Parts, state.Mount, *mounttest.Helper) {
	t.Helper()
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	s.Linger = LingerLimits{Mounts: 2, Memory: 1 << 30}
	m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) {
		m.Spec.ReadOnly, m.LingerFor = true, time.Hour
		if change != nil {
			change(m)
		}
	})
	p.MountAt(m, p.Store.SourceDir(m.Name))
	h := running()
	h.Status.Session = &helper.SessionStatus{}
	h.Serve(t, p.Store.Socket(m.Name))
	return s, p, m, h
}

func keys() credentials.Keys { return credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"} }

// secret changes a mount to one of a secret.
func secret(m *state.Mount) {
	m.Spec.Source, m.Spec.Identity = credentials.SourceSecret, "x"
}

// wantOf asks for a mount with its own spec. plan is the result of Plan for the request.
func wantOf(t *testing.T, p *parts.Parts, m state.Mount, target string) want.Mount {
	t.Helper()
	r := mounttest.Request()
	r.Keys = keys()
	grant, err := p.Creds.Plan(t.Context(), r, m.Spec)
	if err != nil {
		t.Fatal(err)
	}
	return want.Mount{Publication: state.Publication{Target: target, VolumeID: m.VolumeID}, Spec: m.Spec, Grant: grant, Linger: time.Minute}
}

func TestWhichMountsLinger(t *testing.T) {
	for what, tc := range map[string]struct {
		change func(*state.Mount)
		limits LingerLimits
		want   bool
	}{
		"one that only reads":           {nil, LingerLimits{1, 1 << 30}, true},
		"one of a secret":               {secret, LingerLimits{1, 1 << 30}, true},
		"not asked for":                 {func(m *state.Mount) { m.LingerFor = 0 }, LingerLimits{1, 1 << 30}, false},
		"off by number":                 {nil, LingerLimits{0, 1 << 30}, false},
		"off by memory":                 {nil, LingerLimits{1, 0}, false},
		"rotated":                       {func(m *state.Mount) { secret(m); m.Rotated = "y" }, LingerLimits{1, 1 << 30}, false},
		"of a former configuration":     {func(m *state.Mount) { m.Backend = "another digest" }, LingerLimits{1, 1 << 30}, false},
		"its client reports no uploads": {func(m *state.Mount) { m.Spec.ReadOnly = false }, LingerLimits{1, 1 << 30}, false},
	} {
		t.Run(what, func(t *testing.T) {
			s, p, m, h := lingerer(t, tc.change)
			s.Linger = tc.limits
			err := s.linger(t.Context(), m)
			now := p.Record(m.Name)
			if now.Lingers() != tc.want || (err == nil) != tc.want {
				t.Fatalf("lingers: %t, %v", now.Lingers(), err)
			}
			if dropped := h.WasAsked("forget"); dropped != (tc.want && m.Spec.Source == credentials.SourceSecret) {
				t.Errorf("its credentials are dropped: %t", dropped)
			}
			if h.WasAsked("end") {
				t.Error("it is ended")
			}
			if !tc.want {
				return
			}
			if now.Linger.Until.Sub(now.Linger.Since) != time.Hour || len(s.Tracker.Lingering()) != 1 {
				t.Errorf("%+v, %v", now.Linger, s.Tracker.Lingering())
			}
		})
	}
}

// What a driver leaves that is killed between the unmount of the last target and the record of the mount lingers after the next pass, and
// stays until its time is over.
func TestReconcileLetsAMountLinger(t *testing.T) {
	s, p, m, h := lingerer(t, nil)
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

// A lingering mount ends for a change of what it was started for, and is not healed.
func TestWhatEndsALingeringMount(t *testing.T) {
	for what, tc := range map[string]struct {
		change func(s *Supervisor, m *state.Mount, h *mounttest.Helper)
		want   string
	}{
		"nothing":                 {func(*Supervisor, *state.Mount, *mounttest.Helper) {}, ""},
		"its time":                {func(_ *Supervisor, m *state.Mount, _ *mounttest.Helper) { m.Linger.Until = time.Now() }, tracker.EndedTime},
		"a change of the rules":   {func(_ *Supervisor, m *state.Mount, _ *mounttest.Helper) { m.Linger.Backend = "other" }, tracker.EndedBackend},
		"a change of the backend": {func(_ *Supervisor, m *state.Mount, _ *mounttest.Helper) { m.Backend = "other" }, tracker.EndedBackend},
		"the end of its client": {func(_ *Supervisor, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.State = helper.StateExited
		}, tracker.EndedClient},
		"the end of its session": {func(_ *Supervisor, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.Session = &helper.SessionStatus{Over: true, OrderDigest: "x"}
		}, tracker.EndedSession},
		"a session that is refused": {func(_ *Supervisor, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.Session = &helper.SessionStatus{Error: "no", Kind: fault.Denied.String(), OrderDigest: "x"}
		}, tracker.EndedSession},
		"a session that is late": {func(_ *Supervisor, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.Session = &helper.SessionStatus{Error: "no answer", Kind: fault.Unavailable.String(), OrderDigest: "x"}
		}, ""},
		"the node's limits": {func(s *Supervisor, _ *state.Mount, _ *mounttest.Helper) { s.Linger.Mounts = 0 }, tracker.EndedMounts},
	} {
		t.Run(what, func(t *testing.T) {
			s, p, m, h := lingerer(t, func(m *state.Mount) { secret(m) })
			lingers(p, &m)
			tc.change(s, &m, h)
			if reason, err := s.due(t.Context(), m); reason != tc.want || err != nil {
				t.Errorf("%q, %v, want %q", reason, err, tc.want)
			}
		})
	}
}

// A publication of a lingering mount is bound only with credentials that work, after the mount counts as used.
func TestALingeringMountIsJoinedWithCredentialsThatWork(t *testing.T) {
	s, p, m, h := lingerer(t, secret)
	m.Key = m.Spec.Key()
	lingers(p, &m)
	if err := p.Store.Write(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	s.Creds = creds.New(mounttest.S3{Access: refused}, p.Tokens, p.Clients, p.Peer)
	if joined, err := s.joinLingering(t.Context(), &m, wantOf(t, p, m, "/t")); joined || !errors.Is(err, refused) {
		t.Errorf("with keys that are refused: %t, %v", joined, err)
	}
	if now := p.Record(m.Name); !now.Lingers() || len(h.Given()) > 0 || h.WasAsked("end") {
		t.Errorf("after that: %+v, given %d times", now.Linger, len(h.Given()))
	}
	s.Creds = p.Creds
	if joined, err := s.joinLingering(t.Context(), &m, wantOf(t, p, m, "/t")); !joined || err != nil {
		t.Fatalf("joined: %t, %v", joined, err)
	}
	now := p.Record(m.Name)
	if now.Lingers() || now.LingerFor != time.Minute || len(h.Given()) != 1 || *h.Given()[0].Keys != keys() {
		t.Errorf("after that: %+v, given %+v", now, h.Given())
	}
}
