package provision

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// fakeSessions plans as the real one does, for keys of users, and makes sessions of an hour.
type fakeSessions struct {
	planned []session.Request
	made    []credentials.Order
	refuse  error
}

func (f *fakeSessions) Plan(ctx context.Context, r session.Request) (credentials.Order, error) {
	f.planned = append(f.planned, r)
	return session.NewPlanner(ownKeys{}).Plan(ctx, r)
}

func (f *fakeSessions) Make(_ context.Context, o credentials.Order) (credentials.Keys, error) {
	if f.refuse != nil {
		return credentials.Keys{}, f.refuse
	}
	f.made = append(f.made, o)
	return credentials.Keys{AccessKeyID: fmt.Sprint("SESSION", len(f.made)), SecretAccessKey: "s", SessionToken: "t", Expires: testTime.Add(time.Hour)}, nil
}

// ownKeys are what the driver's process itself has.
type ownKeys struct{}

func (ownKeys) DriverKeys(context.Context) (credentials.Keys, error) {
	return credentials.Keys{AccessKeyID: "DRIVER", SecretAccessKey: "s"}, nil
}

func (ownKeys) STSService(context.Context, backend.Backend) (credentials.STSService, error) {
	return credentials.STSService{Region: "us-east-1"}, nil
}

func sessionsProvisioner(t *testing.T, settings string) (*Provisioner, *fakeSessions, backend.Backend) {
	t.Helper()
	config := parse(t, "backends:\n  lab: {"+settings+"}\n")
	clients, err := backend.NewClients(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(clients.Close)
	buckets, err := backend.NewBuckets(clients, nil)
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeSessions{}
	p, err := New(Options{Config: config, Clients: clients, Buckets: buckets, Sessions: f, DriverName: "d", Now: func() time.Time { return testTime }})
	if err != nil {
		t.Fatal(err)
	}
	be, err := config.Backend("lab")
	if err != nil {
		t.Fatal(err)
	}
	return p, f, be
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
			p, f, _ := sessionsProvisioner(t, c.settings)
			be, who, err := p.identify("lab", c.keys, c.role)
			if err != nil {
				t.Fatal(err)
			}
			var keys credentials.Keys
			for range 3 {
				if keys, err = p.keysOf(t.Context(), be, who); err != nil {
					t.Fatal(err)
				}
			}
			if c.want == "" {
				if keys != c.keys || len(f.made) > 0 {
					t.Errorf("%v, %v", keys, f.made)
				}
				return
			}
			if len(f.made) != 1 || keys.AccessKeyID != "SESSION1" {
				t.Fatalf("%d sessions are made, and the keys are %v", len(f.made), keys)
			}
			if o := f.made[0]; o.Kind != credentials.AssumeRole || o.RoleARN != c.want || o.Keys.AccessKeyID != c.signed || o.Policy != "" {
				t.Errorf("%v of %v with policy %q", o, o.Keys, o.Policy)
			}
		})
	}
}

func TestARoleThatCannotBeTakenOnSaysWhichAndKeepsItsKind(t *testing.T) {
	p, f, be := sessionsProvisioner(t, "controllerRoleARN: '"+controllerRole+"'")
	for _, kind := range []fault.Kind{fault.Denied, fault.Unauthenticated, fault.Busy, fault.Unavailable} {
		f.refuse = fault.Errorf(kind, "no")
		if _, err := p.keysOf(t.Context(), be, identity{role: controllerRole}); !fault.Is(err, kind) || !strings.Contains(err.Error(), controllerRole) {
			t.Errorf("%v", err)
		}
	}
	p, _, be = sessionsProvisioner(t, "endpoint: 'http://127.0.0.1:1'")
	if _, err := p.keysOf(t.Context(), be, identity{role: controllerRole}); !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "sts") {
		t.Errorf("without a token service: %v", err)
	}
}

func TestARolesSessionIsMadeAnewWhereTheServiceDoesNotKnowItAnyMore(t *testing.T) {
	p, f, be := sessionsProvisioner(t, "controllerRoleARN: '"+controllerRole+"'")
	who := identity{role: controllerRole}
	keys, err := p.keysOf(t.Context(), be, who)
	if err != nil {
		t.Fatal(err)
	}
	p.distrust(be, who, keys, fault.Errorf(fault.Denied, "that is about rights"))
	p.distrust(be, who, keys, nil)
	if again, _ := p.keysOf(t.Context(), be, who); again != keys {
		t.Error("a good session was dropped")
	}
	p.distrust(be, who, keys, fault.Errorf(fault.Unauthenticated, "ExpiredToken"))
	if again, err := p.keysOf(t.Context(), be, who); err != nil || again == keys || len(f.made) != 2 {
		t.Errorf("%v, %v", again, err)
	}
	if _, err := p.keysOf(t.Context(), be, identity{keys: tenant, role: controllerRole}); err != nil || len(f.made) != 3 {
		t.Errorf("another identity: %d sessions, %v", len(f.made), err)
	}
}

func TestADeletionHasASessionWhereConfigurationAndIdentityAllow(t *testing.T) {
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
			p, f, be := sessionsProvisioner(t, c.settings)
			_, who, err := p.identify("lab", credentials.Keys{}, "")
			if err != nil {
				t.Fatal(err)
			}
			keys, err := p.deletionKeys(t.Context(), be, &run{who: who}, c.id)
			if err != nil {
				t.Fatal(err)
			}
			if c.want == "" {
				if keys != nil || len(f.made) > 0 {
					t.Errorf("a session is made: %v", f.made)
				}
				return
			}
			if len(f.made) != 1 {
				t.Fatalf("%d sessions", len(f.made))
			}
			o := f.made[0]
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

func TestADeletionsSessionsAreMadeOfTheLatestRequestsKeys(t *testing.T) {
	p, f, be := sessionsProvisioner(t, "controllerCredentials: secret")
	now := testTime
	p.now = func() time.Time { return now }
	r := &run{who: identity{keys: tenant}}
	keys, err := p.deletionKeys(t.Context(), be, r, volume.ID{Backend: "lab", Bucket: "data", Prefix: "v/"})
	if err != nil {
		t.Fatal(err)
	}
	r.who = identity{keys: credentials.Keys{AccessKeyID: "ROTATED", SecretAccessKey: "s"}, role: tenantRole}
	now = testTime.Add(59 * time.Minute)
	if _, err := keys(t.Context()); err != nil || len(f.made) != 2 || f.made[1].Keys.AccessKeyID != "ROTATED" || f.made[1].RoleARN != tenantRole {
		t.Errorf("%v, %v", f.made, err)
	}
	f.refuse = fault.Errorf(fault.Busy, "slow down")
	now = testTime.Add(3 * time.Hour)
	if _, err := keys(t.Context()); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "lab:data/v/") {
		t.Errorf("%v", err)
	}
}
