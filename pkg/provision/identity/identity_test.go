package identity

import (
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity/identitytest"
)

// newTest returns identities for a config whose backend lab has these settings.
func newTest(t *testing.T, settings string) (*Identities, *identitytest.Sessions, backend.Backend) {
	t.Helper()
	config, be := identitytest.Lab(t, settings)
	now := func() time.Time { return testTime }
	f := &identitytest.Sessions{Now: now}
	i, err := New(config, f, now)
	if err != nil {
		t.Fatal(err)
	}
	return i, f, be
}

const (
	tenantRole     = "arn:aws:iam::111122223333:role/tenant"
	controllerRole = "arn:aws:iam::111122223333:role/controller"
)

var tenant = credentials.Keys{AccessKeyID: "TENANT", SecretAccessKey: "s"}

func TestTheControllerWorksInTheRoleOfTheSecretOrElseOfTheBackend(t *testing.T) {
	for name, c := range map[string]struct {
		settings string
		keys     credentials.Keys
		role     string
		want     string // "": no session is made
		signed   string
	}{
		"its own keys":       {"", credentials.Keys{}, "", "", ""},
		"the backend's role": {"controllerRoleARN: '" + controllerRole + "'", credentials.Keys{}, "", controllerRole, "DRIVER"},
		"a secret":           {"controllerCredentials: secret", tenant, "", "", "TENANT"},
		"the secret's role":  {"controllerCredentials: secret", tenant, tenantRole, tenantRole, "TENANT"},
		"the secret's first": {"controllerCredentials: secret, controllerRoleARN: '" + controllerRole + "'", tenant, tenantRole, tenantRole, "TENANT"},
		"both":               {"controllerCredentials: secret, controllerRoleARN: '" + controllerRole + "'", tenant, "", controllerRole, "TENANT"},
		"whatever mounts are allowed": {"scope: required, allow: [{sources: [workload], buckets: [x]}], controllerRoleARN: '" + controllerRole + "'",
			credentials.Keys{}, "", controllerRole, "DRIVER"},
		"whatever mounts get": {"scope: 'off', controllerRoleARN: '" + controllerRole + "'", credentials.Keys{}, "", controllerRole, "DRIVER"},
	} {
		t.Run(name, func(t *testing.T) {
			i, f, _ := newTest(t, c.settings)
			be, who, err := i.Find("lab", c.keys, c.role)
			if err != nil {
				t.Fatal(err)
			}
			var keys credentials.Keys
			for range 3 {
				if keys, err = i.Keys(t.Context(), be, who); err != nil {
					t.Fatal(err)
				}
			}
			if c.want == "" {
				if keys != c.keys || len(f.Made) > 0 {
					t.Errorf("%v, %v", keys, f.Made)
				}
				return
			}
			if len(f.Made) != 1 || keys.AccessKeyID != "SESSION1" {
				t.Fatalf("%d sessions are made, and the keys are %v", len(f.Made), keys)
			}
			if o := f.Made[0]; o.Kind != credentials.AssumeRole || o.RoleARN != c.want || o.Keys.AccessKeyID != c.signed || o.Policy != "" {
				t.Errorf("%v of %v with policy %q", o, o.Keys, o.Policy)
			}
		})
	}
}

func TestKeysOfTheRequestAreUsedAsTheOperatorSays(t *testing.T) {
	for settings, keys := range map[string]credentials.Keys{"controllerCredentials: secret": {}, "": tenant} {
		i, _, _ := newTest(t, settings)
		if _, _, err := i.Find("lab", keys, ""); !fault.Is(err, fault.Precondition) {
			t.Errorf("%q: %v", settings, err)
		}
	}
}

func TestARoleThatCannotBeAssumedIsNamedAndKeepsTheKind(t *testing.T) {
	i, f, be := newTest(t, "controllerRoleARN: '"+controllerRole+"'")
	for _, kind := range []fault.Kind{fault.Denied, fault.Unauthenticated, fault.Busy, fault.Unavailable} {
		f.Refuse = fault.Errorf(kind, "no")
		if _, err := i.Keys(t.Context(), be, Identity{Role: controllerRole}); !fault.Is(err, kind) || !strings.Contains(err.Error(), controllerRole) {
			t.Errorf("%v", err)
		}
	}
	i, _, be = newTest(t, "endpoint: 'http://127.0.0.1:1'")
	if _, err := i.Keys(t.Context(), be, Identity{Role: controllerRole}); !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "sts") {
		t.Errorf("without a token service: %v", err)
	}
}

func TestARolesSessionIsReplacedWhenTheServiceRefusesIt(t *testing.T) {
	i, f, be := newTest(t, "controllerRoleARN: '"+controllerRole+"'")
	who := Identity{Role: controllerRole}
	keys, err := i.Keys(t.Context(), be, who)
	if err != nil {
		t.Fatal(err)
	}
	i.Invalidate(be, who, keys, fault.Errorf(fault.Denied, "that is about rights"))
	i.Invalidate(be, who, keys, nil)
	if again, _ := i.Keys(t.Context(), be, who); again != keys {
		t.Error("a good session was dropped")
	}
	i.Invalidate(be, who, keys, fault.Errorf(fault.Unauthenticated, "ExpiredToken"))
	if again, err := i.Keys(t.Context(), be, who); err != nil || again == keys || len(f.Made) != 2 {
		t.Errorf("%v, %v", again, err)
	}
	if _, err := i.Keys(t.Context(), be, Identity{Keys: tenant, Role: controllerRole}); err != nil || len(f.Made) != 3 {
		t.Errorf("another identity: %d sessions, %v", len(f.Made), err)
	}
}
