package mount

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// renewing is a helper that makes sessions, from an order that nobody has any more.
func renewing() *helperOf {
	return &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning, Session: &helper.SessionStatus{
		Salt: []byte("salt"), OrderDigest: "another", Expires: time.Now().Add(time.Hour),
	}}}
}

func (f *tokens) wants(kind credentials.Kind) *tokens {
	f.kind = kind
	return f
}

// What a publication brings is handed to the helper, which makes the sessions; the driver asks nobody.
func TestARepublishAsksForNoSession(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	service := (&tokens{}).wants(credentials.WebIdentity)
	m.Sessions = service
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	rec.Spec.Source = credentials.SourceWorkload
	h := renewing()
	h.serve(t, m, rec.Name)
	for i, token := range []string{"one", "one", "two"} {
		r := Request{Source: credentials.SourceWorkload, Tokens: credentials.Tokens{"aud": {Value: token}}}
		s, err := m.plan(t.Context(), r, rec.Spec)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.handOver(t.Context(), rec, s); err != nil {
			t.Fatal(err)
		}
		got, want := h.got(), []int{1, 1, 2}[i]
		if len(got) != want || got[want-1].Keys != nil || got[want-1].Order == nil || got[want-1].Order.Token != token {
			t.Errorf("publication %d: the helper was given %+v", i, got)
		}
	}
	if n := service.sessions(); n != 0 {
		t.Errorf("%d sessions were asked for", n)
	}
}

// A helper of an older driver cannot make sessions: it is given one with each publication.
func TestAnOlderHelperIsGivenSessions(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	service := (&tokens{}).wants(credentials.AssumeRole)
	m.Sessions = service
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
	h.serve(t, m, rec.Name)
	if err := m.refresh(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	if got := h.got(); len(got) != 1 || got[0].Keys == nil || got[0].Keys.AccessKeyID != "ASIA1" || got[0].Order != nil {
		t.Errorf("it was given %+v", got)
	}
	// But not one for each look at it.
	if err := m.refresh(t.Context(), rec); err != nil || service.sessions() != 1 {
		t.Errorf("%d sessions, %v", service.sessions(), err)
	}
	now := time.Now()
	for what, tc := range map[string]struct {
		digest string
		after  time.Duration
		want   bool
	}{"young": {"a", time.Minute, false}, "half over": {"a", 30 * time.Minute, true}, "another order": {"b", time.Minute, true}} {
		m.handed.note("m", "a", now, now.Add(time.Hour))
		if got := m.handed.due("m", tc.digest, now.Add(tc.after)); got != tc.want {
			t.Errorf("%s: due: %t", what, got)
		}
	}
}

// Keys that nothing is made from are handed over as they are.
func TestKeysAreHandedOverAsTheyAre(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	h := renewing()
	h.serve(t, m, rec.Name)
	if err := m.refresh(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	if got := h.got(); len(got) != 1 || got[0].Keys == nil || got[0].Keys.AccessKeyID != "a" || got[0].Order != nil {
		t.Errorf("it was given %+v", got)
	}
}

// A token that works again is tried at once, and the publication that brings it succeeds.
func TestASessionThatIsOverRecoversWithThePublication(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	m.Sessions = (&tokens{}).wants(credentials.WebIdentity)
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	h := renewing()
	h.status.Session.Over, h.status.Session.Error, h.status.Session.Kind, h.status.Session.Failures = true, "the token has expired", "unauthenticated", 3
	h.onGive = func(s *helper.SessionStatus) { s.Over, s.Error, s.Kind, s.Renewals = false, "", "", 1 }
	h.serve(t, m, rec.Name)
	s, err := m.planAlone(t.Context(), rec)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.handOver(t.Context(), rec, s); err != nil {
		t.Error(err)
	}
	// And where the new one is refused too, that is the answer.
	h.mu.Lock()
	h.status.Session.Over, h.status.Session.OrderDigest = true, "another"
	h.onGive = func(s *helper.SessionStatus) { s.Over, s.Error, s.Kind, s.Failures = true, "no", "denied", 4 }
	h.mu.Unlock()
	if err := m.handOver(t.Context(), rec, s); !fault.Is(err, fault.Denied) {
		t.Errorf("%v", err)
	}
}

// Whoever publishes a volume hears that its session is over, or will not be renewed; not that a token service is away for a while.
func TestWhatIsSaidOfASession(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for what, tc := range map[string]struct {
		session *helper.SessionStatus
		kind    fault.Kind // Unknown: nothing is said
		words   []string
	}{
		"of an older helper":          {nil, fault.Unknown, nil},
		"valid":                       {&helper.SessionStatus{Expires: at}, fault.Unknown, nil},
		"valid, the service away":     {&helper.SessionStatus{Expires: at, Error: "no answer", Kind: "unavailable"}, fault.Unknown, nil},
		"valid, the service too busy": {&helper.SessionStatus{Expires: at, Error: "slow down", Kind: "busy"}, fault.Unknown, nil},
		"valid, refused another":      {&helper.SessionStatus{Expires: at, Error: "no such role", Kind: "denied", FailedSince: at}, fault.Denied, []string{"ends at 2026-01-02T03:04:05Z", "no such role", "team-a/app"}},
		"over, refused another":       {&helper.SessionStatus{Over: true, Expires: at, Error: "token expired", Kind: "unauthenticated"}, fault.Unauthenticated, []string{"over since 2026-01-02T03:04:05Z", "token expired", "requiresRepublish"}},
		"over, the service away":      {&helper.SessionStatus{Over: true, Expires: at, Error: "no answer", Kind: "unavailable"}, fault.Unavailable, []string{"no answer"}},
		"over, another being made":    {&helper.SessionStatus{Over: true, Expires: at, OrderDigest: "x"}, fault.Unavailable, []string{"is being made"}},
		"over, and nothing to make":   {&helper.SessionStatus{Over: true, Expires: at}, fault.Unauthenticated, []string{"over since"}},
	} {
		err := sessionTrouble(record{Name: "m", VolumeID: "v", Spec: Spec{Source: credentials.SourceWorkload, Identity: "team-a/app"}}, helper.Status{Session: tc.session})
		if (err == nil) != (tc.kind == fault.Unknown) || err != nil && fault.KindOf(err) != tc.kind {
			t.Errorf("%s: kind %d: %v", what, fault.KindOf(err), err)
		}
		for _, w := range tc.words {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q is not said: %v", what, w, err)
			}
		}
	}
}

// What is impossible as things are configured is found out before anything is made for it.
func TestNothingIsMadeForASessionThatCannotBe(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	m.Sessions = &tokens{nothing: fault.Errorf(fault.Precondition, "no way")}
	target := filepath.Join(t.TempDir(), "target")
	err := m.publish(t.Context(), Request{VolumeID: "v", Target: target, Source: credentials.SourceDriver}, Spec{Bucket: "b", Source: credentials.SourceDriver})
	if !fault.Is(err, fault.Precondition) {
		t.Errorf("kind %d: %v", fault.KindOf(err), err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target was made: %v", err)
	}
	if names, err := m.store.names(); err != nil || len(names) > 0 {
		t.Errorf("made: %v, %v", names, err)
	}
}

// A session that has to reach no further than its volume is shown to do so; one that does not have to is not asked.
func TestScopesAreProvenWhereTheyAreRequired(t *testing.T) {
	wide := fault.Errorf(fault.Precondition, "it lists the neighbour")
	for what, tc := range map[string]struct {
		scope string
		kind  credentials.Kind
		want  bool
	}{
		"required": {volume.ScopeRequired, credentials.AssumeRole, false},
		"auto":     {volume.ScopeAuto, credentials.AssumeRole, true},
		"keys":     {volume.ScopeOff, credentials.AsIs, true},
	} {
		m := newTestManager(t, &uids{}, s3{wide: wide})
		service := (&tokens{}).wants(tc.kind)
		m.Sessions = service
		spec := Spec{Bucket: "b", Source: credentials.SourceDriver, Scope: tc.scope}
		s, err := m.planFor(t.Context(), spec, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // once is enough
			if err := m.prove(t.Context(), s, backend.Backend{}, spec); (err == nil) != tc.want {
				t.Errorf("%s: %v", what, err)
			}
		}
		if n := service.sessions(); n != map[credentials.Kind]int{credentials.AssumeRole: 1}[tc.kind] {
			t.Errorf("%s: %d sessions", what, n)
		}
	}
}

// A session is made while other things are, once, and what is wrong with it is told to whoever wants it.
func TestASessionIsMadeAhead(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	service := (&tokens{}).wants(credentials.AssumeRole)
	m.Sessions = service
	for _, refusal := range []error{nil, fault.Errorf(fault.Denied, "no")} {
		service.refuse, service.made = refusal, nil
		s, err := m.planFor(t.Context(), Spec{Bucket: "bucket", Source: credentials.SourceDriver}, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		end := m.begin(t.Context(), s)
		keys, err := m.take(t.Context(), s)
		if !errors.Is(err, refusal) || keys.IsZero() != (refusal != nil) {
			t.Errorf("%v, %v", keys, err)
		}
		end()
		if again, err := m.take(t.Context(), s); refusal == nil && (err != nil || again != keys || service.sessions() != 1) {
			t.Errorf("once more: %v, %v, %d sessions", again, err, service.sessions())
		}
	}
}

// A session may do what the mount's client needs, which may be another client than the driver's default is by now.
func TestSessionsFitTheClientThatRuns(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	service := (&tokens{}).wants(credentials.AssumeRole)
	m.Sessions = service
	s, err := m.planFor(t.Context(), Spec{Bucket: "bucket", Source: credentials.SourceDriver}, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, client := range []string{"mountpoint-s3", "rclone", "rclone"} {
		if err := s.fit(t.Context(), record{Client: client}); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(service.planned); n != 2 || s.client != "rclone" {
		t.Errorf("planned %d times, in the end for %s", n, s.client)
	}
	if err := s.fit(t.Context(), record{Client: "gone"}); err == nil {
		t.Error("it fits a client that does not exist")
	}
}

func TestMetricsOfSessions(t *testing.T) {
	m := newMetrics(func() int { return 0 })
	s := m.sessions
	now := time.Now()
	s.now = func() time.Time { return now }
	registry := prometheus.NewRegistry()
	registry.MustRegister(s, s.renewals, s.failures)
	shows := func(renewals, failures float64, state string) {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, metric := range f.GetMetric() {
				name := f.GetName()
				for _, label := range metric.GetLabel() {
					name += " " + label.GetValue()
				}
				got[name] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
			}
		}
		want := map[string]float64{"s3csi_mount_session_renewals_total rclone": renewals, "s3csi_mount_session_failures_total rclone": failures}
		if state != "" {
			want[sessionsMetric+" rclone "+state] = 1
		}
		if !maps.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	say := func(status helper.SessionStatus, trouble bool) {
		t.Helper()
		if s.same("a", status) {
			t.Errorf("%+v is nothing new", status)
		}
		if _, changed := s.seen("a", "rclone", &status); changed != trouble {
			t.Errorf("%+v: said: %t", status, changed)
		}
	}
	valid := helper.SessionStatus{Expires: now.Add(time.Hour), OrderDigest: "x", Renewals: 5}
	say(valid, false)
	shows(0, 0, sessionValid) // what was before is not counted
	failing := valid
	failing.Error, failing.Kind, failing.Failures = "no", "denied", 1
	say(failing, true)
	failing.Failures, failing.Renewals = 3, 6
	say(failing, false) // the same trouble is said once
	shows(1, 3, sessionFailing)
	now = now.Add(time.Hour)
	shows(1, 3, sessionExpired)
	failing.Over = true
	say(failing, true)
	fresh := helper.SessionStatus{Renewals: 1} // another helper
	say(fresh, true)
	shows(2, 3, sessionStatic)
	s.forget("a")
	shows(2, 3, "") // a mount that is gone has no session
}

// A mount that ran on keys as they are, and is to have a session that reaches no further than its volume, gets one that was tried.
func TestASessionIsProvenBeforeItTakesThePlaceOfKeys(t *testing.T) {
	wide := fault.Errorf(fault.Precondition, "does not enforce session policies")
	for _, c := range []struct {
		name, scope, digest string
		wide                error
		sessions            int // that the driver asks for
	}{
		{"required, and the service keeps to it", volume.ScopeRequired, "", nil, 1},
		{"required, and it does not", volume.ScopeRequired, "", wide, 1},
		{"required, and the helper makes sessions already", volume.ScopeRequired, "an older one", wide, 0},
		{"auto", volume.ScopeAuto, "", wide, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newTestManager(t, &uids{}, s3{wide: c.wide})
			service := (&tokens{}).wants(credentials.AssumeRole)
			m.Sessions = service
			rec := mountOf(t, m, "a", "1", "mountpoint-s3")
			rec.Spec.Scope = c.scope
			h := &helperOf{status: &helper.Status{State: helper.StateRunning, Revision: 1, Session: &helper.SessionStatus{Salt: []byte("s"), OrderDigest: c.digest}}}
			h.serve(t, m, rec.Name)
			s, err := m.planFor(t.Context(), rec.Spec, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			fails := c.wide != nil && c.sessions > 0
			if err := m.handOver(t.Context(), rec, s); fails != (err != nil) || fails && !errors.Is(err, wide) {
				t.Errorf("%v", err)
			}
			if given := len(h.got()); service.sessions() != c.sessions || (given == 0) != fails {
				t.Errorf("%d sessions, given %d times", service.sessions(), given)
			}
		})
	}
}

func TestWhatAMountIsSuppliedWithIsNotPrinted(t *testing.T) {
	keys := credentials.Keys{AccessKeyID: "A", SecretAccessKey: "canary", SessionToken: "canary"}
	s := supply{keys: keys, order: credentials.Order{Kind: credentials.WebIdentity, Keys: keys, Token: "canary"}}
	for _, format := range []string{"%v", "%+v", "%#v"} {
		for _, v := range []any{s, &s, birth{supply: &s}, successor{supply: &s}, Request{Keys: keys, Tokens: credentials.Tokens{"a": {Value: "canary"}}}} {
			if shown := fmt.Sprintf(format, v); strings.Contains(shown, "canary") {
				t.Errorf("%s of %T shows a secret", format, v)
			}
		}
	}
}
