package linger

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/runnertest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

func TestWhichLingeringMountsExceedTheLimits(t *testing.T) {
	all := []tracker.Linger{{Name: "old", Memory: 30}, {Name: "middle", Memory: 10}, {Name: "new", Memory: 20}}
	for _, tc := range []struct {
		limits Limits
		want   []eviction
	}{
		{Limits{3, 60}, nil},
		{Limits{2, 60}, []eviction{{"old", tracker.EndedMounts}}},
		{Limits{1, 60}, []eviction{{"old", tracker.EndedMounts}, {"middle", tracker.EndedMounts}}},
		{Limits{3, 59}, []eviction{{"old", tracker.EndedMemory}}},
		{Limits{3, 30}, []eviction{{"old", tracker.EndedMemory}}},
		{Limits{3, 29}, []eviction{{"old", tracker.EndedMemory}, {"middle", tracker.EndedMemory}}},
		{Limits{2, 29}, []eviction{{"old", tracker.EndedMounts}, {"middle", tracker.EndedMemory}}},
		{Limits{3, 19}, []eviction{{"old", tracker.EndedMemory}, {"middle", tracker.EndedMemory}, {"new", tracker.EndedMemory}}},
		{Limits{0, 60}, []eviction{{"old", tracker.EndedMounts}, {"middle", tracker.EndedMounts}, {"new", tracker.EndedMounts}}},
	} {
		if got := tc.limits.exceeding(all); !slices.Equal(got, tc.want) {
			t.Errorf("%+v: %v, want %v", tc.limits, got, tc.want)
		}
	}
}

// newLingerer returns a Lingerer, and a read-only mount that may linger and whose helper answers.
func newLingerer(t *testing.T, change func(*state.Mount)) (*Lingerer, *parts.Parts, state.Mount, *mounttest.Helper) {
	t.Helper()
	r, p := runnertest.New(t, &mounttest.UIDs{}, mounttest.S3{}, 0)
	l := &Lingerer{
		Runner: r, Drainer: drain.New(r, 0), Pins: p.Pins, Backend: p.Backends.Backend, Store: p.Store, Creds: p.Creds, Tracker: p.Tracker, Peer: p.Peer,
		Limits: Limits{Mounts: 2, Memory: 1 << 30}, TryLock: new(conc.Locks).TryLock,
	}
	m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) {
		m.Spec.ReadOnly, m.LingerFor = true, time.Hour
		if change != nil {
			change(m)
		}
	})
	p.MountAt(m, p.Store.SourceDir(m.Name))
	h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning, Session: &helper.SessionStatus{}}}
	h.Serve(t, p.Store.Socket(m.Name))
	return l, p, m, h
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
		limits Limits
		want   bool
	}{
		"one that only reads":           {nil, Limits{1, 1 << 30}, true},
		"one of a secret":               {secret, Limits{1, 1 << 30}, true},
		"not asked for":                 {func(m *state.Mount) { m.LingerFor = 0 }, Limits{1, 1 << 30}, false},
		"off by number":                 {nil, Limits{0, 1 << 30}, false},
		"off by memory":                 {nil, Limits{1, 0}, false},
		"rotated":                       {func(m *state.Mount) { secret(m); m.Rotated = "y" }, Limits{1, 1 << 30}, false},
		"of a former configuration":     {func(m *state.Mount) { m.Backend = "another digest" }, Limits{1, 1 << 30}, false},
		"its client reports no uploads": {func(m *state.Mount) { m.Spec.ReadOnly = false }, Limits{1, 1 << 30}, false},
	} {
		t.Run(what, func(t *testing.T) {
			l, p, m, h := newLingerer(t, tc.change)
			l.Limits = tc.limits
			err := l.beginLingering(t.Context(), m)
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
			if now.Linger.Until.Sub(now.Linger.Since) != time.Hour || len(l.Tracker.Lingering()) != 1 {
				t.Errorf("%+v, %v", now.Linger, l.Tracker.Lingering())
			}
		})
	}
}

// A lingering mount ends for a change of what it was started for, and is not healed.
func TestWhatEndsALingeringMount(t *testing.T) {
	for what, tc := range map[string]struct {
		change func(l *Lingerer, m *state.Mount, h *mounttest.Helper)
		want   string
	}{
		"nothing":                 {func(*Lingerer, *state.Mount, *mounttest.Helper) {}, ""},
		"its time":                {func(_ *Lingerer, m *state.Mount, _ *mounttest.Helper) { m.Linger.Until = time.Now() }, tracker.EndedTime},
		"a change of the rules":   {func(_ *Lingerer, m *state.Mount, _ *mounttest.Helper) { m.Linger.Backend = "other" }, tracker.EndedBackend},
		"a change of the backend": {func(_ *Lingerer, m *state.Mount, _ *mounttest.Helper) { m.Backend = "other" }, tracker.EndedBackend},
		"the end of its client": {func(_ *Lingerer, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.State = helper.StateExited
		}, tracker.EndedClient},
		"the end of its session": {func(_ *Lingerer, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.Session = &helper.SessionStatus{Over: true, OrderDigest: "x"}
		}, tracker.EndedSession},
		"a session that is refused": {func(_ *Lingerer, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.Session = &helper.SessionStatus{Error: "no", Kind: fault.Denied.String(), OrderDigest: "x"}
		}, tracker.EndedSession},
		"a session that is late": {func(_ *Lingerer, _ *state.Mount, h *mounttest.Helper) {
			h.Mu.Lock()
			defer h.Mu.Unlock()
			h.Status.Session = &helper.SessionStatus{Error: "no answer", Kind: fault.Unavailable.String(), OrderDigest: "x"}
		}, ""},
		"the node's limits": {func(l *Lingerer, _ *state.Mount, _ *mounttest.Helper) { l.Limits.Mounts = 0 }, tracker.EndedMounts},
	} {
		t.Run(what, func(t *testing.T) {
			l, p, m, h := newLingerer(t, func(m *state.Mount) { secret(m) })
			lingers(p, &m)
			tc.change(l, &m, h)
			if reason, err := l.Due(t.Context(), m); reason != tc.want || err != nil {
				t.Errorf("%q, %v, want %q", reason, err, tc.want)
			}
		})
	}
}

// A publication of a lingering mount is bound only with credentials that work, after the mount counts as used.
func TestALingeringMountIsJoinedWithCredentialsThatWork(t *testing.T) {
	l, p, m, h := newLingerer(t, secret)
	m.Key = m.Spec.Key()
	lingers(p, &m)
	if err := p.Store.Write(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	l.Creds = creds.New(mounttest.S3{Access: refused}, p.Tokens, p.Clients, p.Peer)
	if joined, err := l.Join(t.Context(), &m, wantOf(t, p, m, "/t")); joined || !errors.Is(err, refused) {
		t.Errorf("with keys that are refused: %t, %v", joined, err)
	}
	if now := p.Record(m.Name); !now.Lingers() || len(h.Given()) > 0 || h.WasAsked("end") {
		t.Errorf("after that: %+v, given %d times", now.Linger, len(h.Given()))
	}
	l.Creds = p.Creds
	if joined, err := l.Join(t.Context(), &m, wantOf(t, p, m, "/t")); !joined || err != nil {
		t.Fatalf("joined: %t, %v", joined, err)
	}
	now := p.Record(m.Name)
	if now.Lingers() || now.LingerFor != time.Minute || len(h.Given()) != 1 || *h.Given()[0].Keys != keys() {
		t.Errorf("after that: %+v, given %+v", now, h.Given())
	}
}

// lingers is a change to a mount that lingers for a minute.
func lingers(p *parts.Parts, m *state.Mount) {
	m.LingerFor = time.Minute
	m.Linger = &state.Linger{Since: time.Now(), Until: time.Now().Add(time.Minute), Backend: p.Backend().Revision()}
}
