package proofs

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity/identitytest"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWhatScopeOfVolumeAndBackendRequire(t *testing.T) {
	for _, c := range []struct {
		settings, scope string
		want            bool
	}{
		{"", "", false}, {"", "off", false}, {"", "required", true}, {"scope: required", "", true},
		{"scope: required", "auto", false}, {"scope: auto", "off", false}, {"scope: 'off'", "required", true},
	} {
		_, be := identitytest.Lab(t, c.settings)
		if got := Required(be, volume.Parameters{Node: volume.Attributes{Scope: c.scope}}); got != c.want {
			t.Errorf("backend %q, volume %q: required is %t", c.settings, c.scope, got)
		}
	}
}

func TestAnImpossibleScopeIsRefused(t *testing.T) {
	const own = "endpoint: 'http://127.0.0.1:1', "
	for name, c := range map[string]struct {
		settings, bucket, prefix, source, says string
	}{
		"AWS":                              {"", "data", "v/", "", ""},
		"AWS, a whole bucket":              {"", "data", "", "driver", ""},
		"AWS, tokens":                      {"", "data", "v/", "workload", ""},
		"no token service":                 {own + "region: x", "data", "v/", "", "sts"},
		"no token service, tokens":         {own + "region: x", "data", "v/", "workload", "sts"},
		"its own":                          {own + "sts: {}", "data", "v/", "secret", ""},
		"its own, for tokens only":         {own + "sts: {kinds: [webIdentity]}", "data", "v/", "secret", "sts.kinds"},
		"its own, not for tokens":          {own + "sts: {kinds: [assumeRole]}", "data", "v/", "workload", "sts.kinds"},
		"a prefix of a directory bucket":   {"", "data--use1-az4--x-s3", "v/", "", "parameters.bucketName"},
		"an access point by its alias":     {"", "data-abcdefghijklmnopqrstuvwxyz0123456-s3alias", "v/", "", "alias"},
		"a wildcard that AWS can escape":   {"", "data", "v*/", "", ""},
		"a wildcard that others cannot":    {own + "sts: {}", "data", "v*/", "", "parameters.prefix"},
		"a prefix that is no plain text":   {"", "data", "v\x01/", "", "parameters.prefix"},
		"a prefix that leaves its place":   {"", "data", "v/../", "", "parameters.prefix"},
		"a prefix where the records are":   {"", "data", ".s3-csi/volumes/", "", "parameters.prefix"},
		"a prefix that no policy can hold": {"", "data", strings.Repeat("v", 900) + "/", "", "parameters.prefix"},
	} {
		t.Run(name, func(t *testing.T) {
			_, be := identitytest.Lab(t, c.settings)
			err := checkExpressible(be, Subject{Bucket: c.bucket, Prefix: c.prefix, Parameters: volume.Parameters{Node: volume.Attributes{Credentials: c.source}}})
			if (err == nil) != (c.says == "") || err != nil && (!fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

// Nothing is asked of any service: the Prover has no clients.
func TestAnImpossibleScopeIsRefusedFirst(t *testing.T) {
	_, be := identitytest.Lab(t, "endpoint: 'http://127.0.0.1:1', region: x")
	p := New(nil, nil, nil, time.Now)
	for _, source := range []string{"", credentials.SourceWorkload} {
		params := volume.Parameters{Node: volume.Attributes{Scope: volume.ScopeRequired, Credentials: source}}
		prefix := p.Prefix(t.Context(), buckets.Bucket{Backend: be}, Subject{Prefix: params.VolumePrefix("v", 1), Parameters: params})
		_, whole := p.Bucket(t.Context(), be, Subject{Bucket: "data", Parameters: params})
		if !fault.Is(prefix, fault.Precondition) || !fault.Is(whole, fault.Precondition) {
			t.Errorf("credentials %q: %v; %v", source, prefix, whole)
		}
	}
}

// A proof that failed is not repeated for a moment, and one that a Timeout ended is.
func TestFailedProofsAreKeptForAMoment(t *testing.T) {
	config, be := identitytest.Lab(t, "scope: required")
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	clock := func() time.Time { return now }
	sessions := &identitytest.Sessions{Now: clock}
	identities, err := identity.New(config, sessions, clock)
	if err != nil {
		t.Fatal(err)
	}
	p := New(identities, nil, nil, clock)
	prove := func(ctx context.Context) error {
		_, err := p.Bucket(ctx, be, Subject{Who: identity.Identity{Keys: credentials.Keys{AccessKeyID: "A", SecretAccessKey: "s"}}, Bucket: "bucket"})
		return err
	}
	for _, step := range []struct {
		refuse fault.Kind // Unknown: no refusal
		want   fault.Kind
		after  time.Duration
	}{
		{fault.Timeout, fault.Timeout, 0},
		{fault.Denied, fault.Denied, 0},
		{fault.Busy, fault.Denied, 9 * time.Second},
		{fault.Busy, fault.Busy, time.Second},
		{fault.Unknown, fault.Unknown, 10 * time.Second},
	} {
		now = now.Add(step.after)
		if sessions.Refuse = nil; step.refuse != fault.Unknown {
			sessions.Refuse = fault.Errorf(step.refuse, "refused")
		}
		if err := prove(t.Context()); fault.KindOf(err) != step.want || (err == nil) != (step.want == fault.Unknown) {
			t.Errorf("%v: %v", step, err)
		}
	}
}
