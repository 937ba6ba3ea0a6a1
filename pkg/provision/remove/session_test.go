package remove

import (
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity/identitytest"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

var testTime = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

func newTest(t *testing.T, settings string, now func() time.Time) (*Remover, *identitytest.Sessions, backend.Backend) {
	t.Helper()
	config, be := identitytest.Lab(t, settings)
	sessions := &identitytest.Sessions{Now: now}
	identities, err := identity.New(config, sessions, now)
	if err != nil {
		t.Fatal(err)
	}
	return New(Remover{Identities: identities}, 1), sessions, be
}

const (
	tenantRole     = "arn:aws:iam::111122223333:role/tenant"
	controllerRole = "arn:aws:iam::111122223333:role/controller"
)

var tenant = credentials.Keys{AccessKeyID: "TENANT", SecretAccessKey: "s"}

func TestDeletion_HasASessionWhereConfigurationAndIdentityAllow(t *testing.T) {
	const own = "endpoint: 'http://127.0.0.1:1'"
	one := volume.ID{Backend: "lab", Bucket: "data", Prefix: "a/v/"}
	for name, c := range map[string]struct {
		settings string
		id       volume.ID
		want     credentials.Kind // "": none is made
		role     string
	}{
		"AWS":                              {"", one, credentials.FederationToken, ""},
		"AWS, a role":                      {"controllerRoleARN: '" + controllerRole + "'", one, credentials.AssumeRole, controllerRole},
		"a service without tokens":         {own, one, "", ""},
		"a service that needs roles":       {own + ", sts: {}", one, "", ""},
		"even where mounts must have one":  {own + ", sts: {}, scope: required", one, "", ""},
		"a service that needs none":        {own + ", sts: {roleOptional: true}", one, credentials.AssumeRole, ""},
		"scope is off":                     {"scope: 'off'", one, "", ""},
		"a place that no policy describes": {"", volume.ID{Backend: "lab", Bucket: "data--use1-az4--x-s3", Prefix: "v/"}, "", ""},
		"a whole bucket":                   {"", volume.ID{Backend: "lab", Bucket: "data"}, credentials.FederationToken, ""},
		"rules are about mounts":           {"allow: [{sources: [workload]}]", one, credentials.FederationToken, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, f, be := newTest(t, c.settings, func() time.Time { return testTime })
			_, who, err := r.Identities.Find("lab", credentials.Keys{}, "")
			if err != nil {
				t.Fatal(err)
			}
			keys, err := r.deletionKeys(t.Context(), be, func() identity.Identity { return who }, volumeTarget(c.id))
			if err != nil {
				t.Fatal(err)
			}
			if c.want == "" {
				if keys != nil || len(f.Made) > 0 {
					t.Errorf("a session is made: %v", f.Made)
				}
				return
			}
			if len(f.Made) != 1 {
				t.Fatalf("%d sessions", len(f.Made))
			}
			o := f.Made[0]
			if o.Kind != c.want || o.RoleARN != c.role || o.Keys.AccessKeyID != "DRIVER" {
				t.Errorf("%v of %v", o, o.Keys)
			}
			for _, part := range []string{c.id.Bucket + "/" + c.id.Prefix + "*", "s3:DeleteObject*", `"Deny"`} {
				if !strings.Contains(o.Policy, part) {
					t.Errorf("the policy does not say %s: %s", part, o.Policy)
				}
			}
			if record := ".s3-csi/volumes/v"; strings.Contains(o.Policy, record) != (c.id.Prefix != "") || strings.Contains(o.Policy, record+"*") {
				t.Errorf("the record in the policy: %s", o.Policy)
			}
			if got, err := keys(t.Context()); err != nil || got.AccessKeyID != "SESSION1" {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
}

func TestDeletion_MakesSessionsWithTheKeysOfTheLatestRequest(t *testing.T) {
	now := testTime
	r, f, be := newTest(t, "controllerCredentials: secret", func() time.Time { return now })
	latest := identity.Identity{Keys: tenant}
	keys, err := r.deletionKeys(t.Context(), be, func() identity.Identity { return latest }, volumeTarget(volume.ID{Backend: "lab", Bucket: "data", Prefix: "v/"}))
	if err != nil {
		t.Fatal(err)
	}
	latest = identity.Identity{Keys: credentials.Keys{AccessKeyID: "ROTATED", SecretAccessKey: "s"}, Role: tenantRole}
	now = testTime.Add(59 * time.Minute)
	if _, err := keys(t.Context()); err != nil || len(f.Made) != 2 || f.Made[1].Keys.AccessKeyID != "ROTATED" || f.Made[1].RoleARN != tenantRole {
		t.Errorf("%v, %v", f.Made, err)
	}
	f.Refuse = fault.Errorf(fault.Busy, "slow down")
	now = testTime.Add(3 * time.Hour)
	if _, err := keys(t.Context()); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "lab:data/v/") {
		t.Errorf("%v", err)
	}
}
