package creds

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// fixture is a provider with one running mount, whose helper answers.
type fixture struct {
	*Provider
	tokens *mounttest.Tokens
	helper *mounttest.Helper
	mount  state.Mount
}

func newFixture(t *testing.T, b Backends, kind credentials.Kind) *fixture {
	t.Helper()
	f := &fixture{tokens: &mounttest.Tokens{Kind: kind}}
	socket := filepath.Join(t.TempDir(), "s")
	f.Provider = New(b, f.tokens, client.Registry{Source: client.Set{}, Default: "mountpoint-s3"}, func(string) *helper.Peer {
		return helper.NewPeer(func(context.Context) (*net.UnixConn, error) {
			return net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		})
	})
	f.helper = &mounttest.Helper{Status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning, Session: &helper.SessionStatus{
		Salt: []byte("salt"), OrderDigest: "another", Expires: time.Now().Add(time.Hour), // of an order that no publication has any more
	}}}
	f.helper.Serve(t, socket)
	f.mount = state.Mount{Name: "m", VolumeID: "v", Client: "mountpoint-s3", Spec: mount.Spec{Bucket: "bucket", Source: credentials.SourceDriver}}
	return f
}

// own plans the driver's own credentials for the mount.
func (f *fixture) own(t *testing.T) *Grant {
	t.Helper()
	g, err := f.PlanOwn(t.Context(), f.mount)
	must(t, err)
	return g
}

// deliver delivers a grant and returns what is wrong with the session then.
func (f *fixture) deliver(t *testing.T, g *Grant) error {
	t.Helper()
	status, err := f.Deliver(t.Context(), f.mount, g)
	if err != nil {
		return err
	}
	return SessionError(f.mount, status)
}

// The helper gets what a republish supplies and makes the sessions; the driver asks no token service.
func TestRepublishMakesNoSession(t *testing.T) {
	f := newFixture(t, mounttest.S3{}, credentials.WebIdentity)
	f.mount.Spec.Source = credentials.SourceWorkload
	for i, token := range []string{"one", "one", "two"} {
		r := mount.Request{Source: credentials.SourceWorkload, Tokens: credentials.Tokens{"aud": {Value: token}}}
		g, err := f.Plan(t.Context(), r, f.mount.Spec)
		must(t, err)
		must(t, f.deliver(t, g))
		got, want := f.helper.Given(), []int{1, 1, 2}[i]
		if len(got) != want || got[want-1].Keys != nil || got[want-1].Order == nil || got[want-1].Order.Token != token {
			t.Errorf("republish %d: the helper was given %+v", i, got)
		}
	}
	if n := f.tokens.Sessions(); n != 0 {
		t.Errorf("%d sessions were made", n)
	}
}

// Static keys are delivered as they are, unless the helper reports that the client has them.
func TestStaticKeysAreDelivered(t *testing.T) {
	f := newFixture(t, mounttest.S3{}, credentials.AsIs)
	refresh := func(known *helper.Status) {
		t.Helper()
		must(t, f.Refresh(t.Context(), f.mount, known))
	}
	refresh(nil)
	if got := f.helper.Given(); len(got) != 1 || got[0].Keys == nil || got[0].Keys.AccessKeyID != "a" || got[0].Order != nil {
		t.Fatalf("it was given %+v", got)
	}
	known := *f.helper.Status
	refresh(&known) // of an older helper, which reports no digest
	session := *known.Session
	known.Session = &session
	session.KeysDigest = credentials.Order{Kind: credentials.AsIs, Keys: credentials.Keys{AccessKeyID: "a", SecretAccessKey: "former"}}.Digest(session.Salt)
	refresh(&known)
	if got := len(f.helper.Given()); got != 3 {
		t.Errorf("it was given other keys %d times, want 3 in all", got)
	}
	session.KeysDigest = credentials.Order{Kind: credentials.AsIs, Keys: *f.helper.Given()[0].Keys}.Digest(session.Salt)
	refresh(&known)
	if err := f.Apply(t.Context(), f.mount, f.own(t), &known); err != nil { // as another publication does
		t.Fatal(err)
	}
	if got := len(f.helper.Given()); got != 3 {
		t.Errorf("it was given %d times keys that it had", got-3)
	}
}

// A token that works again is tried at once, so that the publish which supplies it succeeds.
func TestExpiredSessionsRecoverWithThePublish(t *testing.T) {
	f := newFixture(t, mounttest.S3{}, credentials.WebIdentity)
	h := f.helper
	h.Status.Session.Over, h.Status.Session.Error, h.Status.Session.Kind, h.Status.Session.Failures = true, "the token has expired", "unauthenticated", 3
	h.OnGive = func(s *helper.SessionStatus) { s.Over, s.Error, s.Kind, s.Renewals = false, "", "", 1 }
	g := f.own(t)
	if err := f.deliver(t, g); err != nil {
		t.Error(err)
	}
	// If the new one is refused, too, that is the answer.
	h.Mu.Lock()
	h.Status.Session.Over, h.Status.Session.OrderDigest = true, "another"
	h.OnGive = func(s *helper.SessionStatus) { s.Over, s.Error, s.Kind, s.Failures = true, "no", "denied", 4 }
	h.Mu.Unlock()
	if err := f.deliver(t, g); !fault.Is(err, fault.Denied) {
		t.Errorf("%v", err)
	}
}

// An expired session, and one that cannot be renewed for a permanent reason, is an error; a token service that is away for a while is
// not.
func TestSessionError_IsPermanentOrExpired(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for what, tc := range map[string]struct {
		session *helper.SessionStatus
		kind    fault.Kind // Unknown: no error
		words   []string
	}{
		"none":                {nil, fault.Unknown, nil},
		"valid":               {&helper.SessionStatus{Expires: at}, fault.Unknown, nil},
		"valid, service away": {&helper.SessionStatus{Expires: at, Error: "no answer", Kind: "unavailable"}, fault.Unknown, nil},
		"valid, service busy": {&helper.SessionStatus{Expires: at, Error: "slow down", Kind: "busy"}, fault.Unknown, nil},
		"valid, renewal refused": {&helper.SessionStatus{Expires: at, Error: "no such role", Kind: "denied", FailedSince: at}, fault.Denied,
			[]string{"2026-01-02T03:04:05Z", "no such role", "team-a/app"}},
		"valid, role not found": {&helper.SessionStatus{Expires: at, Error: "no such role", Kind: "not-found", FailedSince: at}, fault.NotFound, nil},
		"expired, renewal refused": {&helper.SessionStatus{Over: true, Expires: at, Error: "token expired", Kind: "unauthenticated"}, fault.Unauthenticated,
			[]string{"2026-01-02T03:04:05Z", "token expired", "requiresRepublish"}},
		"expired, service away": {&helper.SessionStatus{Over: true, Expires: at, Error: "no answer", Kind: "unavailable"}, fault.Unavailable,
			[]string{"no answer"}},
		"expired, being renewed":       {&helper.SessionStatus{Over: true, Expires: at, OrderDigest: "x"}, fault.Unavailable, nil},
		"expired, nothing to renew it": {&helper.SessionStatus{Over: true, Expires: at}, fault.Unauthenticated, nil},
	} {
		err := SessionError(state.Mount{Name: "m", VolumeID: "v", Spec: mount.Spec{Source: credentials.SourceWorkload, Identity: "team-a/app"}},
			helper.Status{Session: tc.session})
		if (err == nil) != (tc.kind == fault.Unknown) || err != nil && fault.KindOf(err) != tc.kind {
			t.Errorf("%s: kind %s: %v", what, fault.KindOf(err), err)
		}
		for _, w := range tc.words {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: no %q in: %v", what, w, err)
			}
		}
	}
}

// A session that must reach no further than its volume is proven not to; others are not.
func TestScopesAreProvenWhereTheyAreRequired(t *testing.T) {
	for what, tc := range map[string]struct {
		scope string
		kind  credentials.Kind
		want  bool
	}{
		"required": {volume.ScopeRequired, credentials.AssumeRole, false},
		"auto":     {volume.ScopeAuto, credentials.AssumeRole, true},
		"keys":     {volume.ScopeOff, credentials.AsIs, true},
	} {
		f := newFixture(t, mounttest.S3{Wide: fault.Errorf(fault.Precondition, "it lists the neighbour")}, tc.kind)
		f.mount.Spec.Scope = tc.scope
		g := f.own(t)
		for range 2 {
			if err := f.Prove(t.Context(), g, backend.Backend{}, f.mount.Spec); (err == nil) != tc.want {
				t.Errorf("%s: %v", what, err)
			}
		}
		if n := f.tokens.Sessions(); n != map[credentials.Kind]int{credentials.AssumeRole: 1}[tc.kind] {
			t.Errorf("%s: %d sessions", what, n)
		}
	}
}

// payer records the settings of the requests that prove credentials.
type payer struct {
	mounttest.S3
	asked []backend.Requests
}

func (p *payer) CheckAccess(_ context.Context, be backend.Backend, _ backend.Access) (backend.BucketInfo, error) {
	p.asked = append(p.asked, be.Requests)
	return backend.BucketInfo{}, nil
}

func (p *payer) ProveScope(_ context.Context, be backend.Backend, _ backend.Access) error {
	p.asked = append(p.asked, be.Requests)
	return nil
}

func TestProve_SendsRequestsAsTheVolumesOptionsSay(t *testing.T) {
	p := &payer{}
	f := newFixture(t, p, credentials.AssumeRole)
	f.mount.Spec.Scope, f.mount.Spec.Options = volume.ScopeRequired, []string{"requester-pays"}
	must(t, f.Prove(t.Context(), f.own(t), backend.Backend{}, f.mount.Spec))
	if len(p.asked) != 2 || !p.asked[0].RequesterPays || !p.asked[1].RequesterPays {
		t.Errorf("asked with %+v", p.asked)
	}
}

// Expect returns what a proof will learn of a bucket only if it cannot be anything else, or if a proof of the same identity has
// learnt it.
func TestExpectedBuckets(t *testing.T) {
	const role = "arn:aws:iam::111122223333:role/r"
	sts := &backend.STS{Endpoint: "https://sts.example"}
	elsewhere := backend.Backend{Name: "b", Endpoint: "https://s3.example", STS: sts}
	for name, tc := range map[string]struct {
		be    backend.Backend
		spec  mount.Spec
		order credentials.Order
		want  string // region and owner; "": unknown
	}{
		"AWS, any region":           {backend.Backend{}, mount.Spec{ExpectedBucketOwner: "1"}, credentials.Order{}, ""},
		"AWS, a region":             {backend.Backend{Region: "r1"}, mount.Spec{}, credentials.Order{RoleARN: role}, "r1 111122223333"},
		"AWS, the volume's region":  {backend.Backend{Region: "r1"}, mount.Spec{Region: "r2"}, credentials.Order{RoleARN: role}, "r2 111122223333"},
		"AWS, keys":                 {backend.Backend{Region: "r1"}, mount.Spec{}, credentials.Order{Kind: credentials.AsIs}, ""},
		"AWS, an owner":             {backend.Backend{Region: "r1"}, mount.Spec{ExpectedBucketOwner: "1"}, credentials.Order{RoleARN: role}, "r1 1"},
		"AWS, the backend's owner":  {backend.Backend{Region: "r1", ExpectedBucketOwner: "2"}, mount.Spec{}, credentials.Order{}, "r1 2"},
		"no STS":                    {backend.Backend{Endpoint: "https://s3.example"}, mount.Spec{}, credentials.Order{}, "us-east-1 "},
		"an STS":                    {elsewhere, mount.Spec{}, credentials.Order{Kind: credentials.FederationToken}, ""},
		"a role without an account": {elsewhere, mount.Spec{}, credentials.Order{RoleARN: "arn:minio:iam:::role/r"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, mounttest.S3{}, credentials.AssumeRole)
			tc.spec.Bucket = "bucket"
			expect := func() string {
				info, ok := f.Expect(&Grant{state: planned, order: tc.order}, tc.be, tc.spec)
				if !ok {
					return ""
				}
				return info.Region + " " + info.Owner
			}
			if got := expect(); got != tc.want {
				t.Errorf("expected %q, want %q", got, tc.want)
			}
			tc.order.Kind = credentials.AssumeRole
			must(t, f.Prove(t.Context(), &Grant{state: planned, order: tc.order}, tc.be, tc.spec))
			if got := expect(); got != "there " {
				t.Errorf("after a proof: %q", got)
			}
			tc.order.RoleARN = "arn:aws:iam::444455556666:role/other"
			if got := expect(); got == "there " {
				t.Errorf("another identity expects what a proof of the first has learnt")
			}
		})
	}
}

// A session allows what the mount's client needs, which may differ from the driver's default client by now.
func TestGrantsFitTheClient(t *testing.T) {
	f := newFixture(t, mounttest.S3{}, credentials.AssumeRole)
	g := f.own(t)
	for _, client := range []string{"mountpoint-s3", "rclone", "rclone"} {
		must(t, g.Fit(t.Context(), client))
	}
	if n := len(f.tokens.Planned); n != 2 || g.client != "rclone" {
		t.Errorf("planned %d times, the last time for %s", n, g.client)
	}
	if err := g.Fit(t.Context(), "gone"); err == nil {
		t.Error("it fits an unknown client")
	}
}

// A mount that ran on static keys, and whose session must now reach no further than its volume, gets one that was proven.
func TestSessionsThatReplaceKeysAreProven(t *testing.T) {
	wide := fault.Errorf(fault.Precondition, "does not enforce session policies")
	for _, c := range []struct {
		name, scope, digest string
		wide                error
		sessions            int // that the driver makes
	}{
		{"required, and enforced", volume.ScopeRequired, "", nil, 1},
		{"required, and not enforced", volume.ScopeRequired, "", wide, 1},
		{"required, and the helper makes sessions already", volume.ScopeRequired, "another", wide, 0},
		{"auto", volume.ScopeAuto, "", wide, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, mounttest.S3{Wide: c.wide}, credentials.AssumeRole)
			f.mount.Spec.Scope = c.scope
			f.helper.Status.Session = &helper.SessionStatus{Salt: []byte("s"), OrderDigest: c.digest}
			fails := c.wide != nil && c.sessions > 0
			if err := f.deliver(t, f.own(t)); fails != (err != nil) || fails && !errors.Is(err, wide) {
				t.Errorf("%v", err)
			}
			if given := len(f.helper.Given()); f.tokens.Sessions() != c.sessions || (given == 0) != fails {
				t.Errorf("%d sessions, given %d times", f.tokens.Sessions(), given)
			}
		})
	}
}

func TestGrantsShowNoSecret(t *testing.T) {
	keys := credentials.Keys{AccessKeyID: "A", SecretAccessKey: "canary", SessionToken: "canary"}
	g := Grant{keys: keys, order: credentials.Order{Kind: credentials.WebIdentity, Keys: keys, Token: "canary"}}
	for _, format := range []string{"%v", "%+v", "%#v"} {
		for _, v := range []any{g, &g, struct{ Grant *Grant }{&g}, mount.Request{Keys: keys, Tokens: credentials.Tokens{"a": {Value: "canary"}}}} {
			if shown := fmt.Sprintf(format, v); strings.Contains(shown, "canary") {
				t.Errorf("%s of %T shows a secret", format, v)
			}
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
