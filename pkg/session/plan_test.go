package session

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// asMode makes the test binary the internal mode.
const asMode = "S3CSI_TEST_AS_SESSION"

func TestMain(m *testing.M) {
	if os.Getenv(asMode) != "" {
		runMode()
	}
	goleak.VerifyTestMain(m)
}

const (
	roleA     = "arn:aws:iam::111122223333:role/a"
	roleB     = "arn:aws:iam::111122223333:role/b"
	minioRole = "arn:minio:iam:::role/idp-x"
)

var (
	static  = credentials.Keys{AccessKeyID: "AKIASTATIC", SecretAccessKey: "canary-static-secret"}
	session = credentials.Keys{AccessKeyID: "ASIASESSION", SecretAccessKey: "canary-session-secret", SessionToken: "canary-session-token"}
)

// fakeChain is the driver's own credentials.
type fakeChain struct {
	keys  credentials.Keys
	err   error
	asked *int
}

func (c fakeChain) DriverKeys(context.Context) (credentials.Keys, error) {
	if c.asked != nil {
		*c.asked++
	}
	return c.keys, c.err
}

func (fakeChain) STSService(_ context.Context, b backend.Backend) (credentials.STSService, error) {
	return credentials.STSService{Endpoint: "sts-of-" + b.Name, Region: b.StartRegion()}, nil
}

// backends returns the backend with the settings, in YAML.
func backends(t *testing.T, settings string) backend.Backend {
	t.Helper()
	cfg, err := backend.ParseConfig([]byte("backends: {x: "+settings+"}"), "", "")
	must(t, err)
	b, err := cfg.Backend("x")
	must(t, err)
	return b
}

func planner(keys credentials.Keys, env map[string]string, files map[string]string) *Planner {
	return &Planner{
		chain: fakeChain{keys: keys},
		env:   func(name string) string { return env[name] },
		readToken: func(path string) (string, error) {
			if text, ok := files[path]; ok {
				return strings.TrimSpace(text), nil
			}
			return "", os.ErrNotExist
		},
	}
}

func policyFor(aws bool, partition string) (string, error) {
	return fmt.Sprintf("policy %t %s", aws, partition), nil
}

// jwt is a token with an audience; it is not signed.
func jwt(audience string) string {
	return "h." + base64.RawURLEncoding.EncodeToString([]byte(`{"aud":`+audience+`}`)) + ".s"
}

// Every row of how credentials are narrowed, for every scope and kind of service.
func TestHowSessionsAreMade(t *testing.T) {
	const (
		aws      = "{region: eu-west-1}"
		noFed    = "{sts: {kinds: [assumeRole, webIdentity]}}"
		onlyFed  = "{sts: {kinds: [federationToken]}}"
		noSTS    = "{endpoint: 'http://minio:9000'}"
		minio    = "{endpoint: 'http://minio:9000', sts: {roleOptional: true, audience: minio}}"
		strict   = "{endpoint: 'http://minio:9000', sts: {}}"
		refused  = credentials.Kind("refused")
		asIs     = credentials.AsIs
		assume   = credentials.AssumeRole
		federate = credentials.FederationToken
		web      = credentials.WebIdentity
		agent    = credentials.PodIdentity
	)
	both := credentials.Tokens{"sts.amazonaws.com": {Value: "sts-token"}, credentials.PodIdentityAudience: {Value: "agent-token"}}
	stsOnly, agentOnly := both.Only("sts.amazonaws.com"), both.Only(credentials.PodIdentityAudience)
	minioToken := credentials.Tokens{"minio": {Value: "minio-token"}, "sts.amazonaws.com": {Value: "sts-token"}}
	secret := func(k credentials.Keys, role string) Request {
		return Request{Source: credentials.SourceSecret, Keys: k, RoleARN: role}
	}
	workload := func(tokens credentials.Tokens, role string) Request {
		return Request{Source: credentials.SourceWorkload, Tokens: tokens, RoleARN: role, Pod: Pod{"ns", "sa"}}
	}
	for _, c := range []struct {
		name                string
		backend             string
		request             Request
		off, auto, required credentials.Kind
		part                string // of the refusal
	}{
		{"user keys on AWS", aws, secret(static, ""), asIs, federate, federate, ""},
		{"user keys on AWS with a role", aws, secret(static, roleA), assume, assume, assume, ""},
		{"user keys on AWS without federation", noFed, secret(static, ""), asIs, asIs, refused, "roleARN"},
		{"user keys with a role where it cannot be taken on", onlyFed, secret(static, roleA), refused, refused, refused, "assumeRole"},
		{"session keys on AWS", aws, secret(session, ""), asIs, asIs, refused, "roleARN"},
		{"session keys on AWS with a role", aws, secret(session, roleA), assume, assume, assume, ""},
		{"keys where there is no STS", noSTS, secret(static, ""), asIs, asIs, refused, "set sts"},
		{"session keys where there is no STS", noSTS, secret(session, ""), asIs, asIs, refused, "set sts"},
		{"a role where there is no STS", noSTS, secret(static, minioRole), refused, refused, refused, "declare"},
		{"keys of MinIO's user", minio, secret(static, ""), asIs, assume, assume, ""},
		{"keys of MinIO's user with a role", minio, secret(static, minioRole), assume, assume, assume, ""},
		{"session keys of MinIO", minio, secret(session, ""), asIs, asIs, refused, "keys of a user"},
		{"keys where a role is needed", strict, secret(static, ""), asIs, asIs, refused, "roleOptional"},
		{"no keys", aws, secret(credentials.Keys{}, ""), refused, refused, refused, "no keys"},

		{"a token for AWS with a role", aws, workload(stsOnly, roleA), web, web, web, ""},
		{"a token for AWS without a role", aws, workload(stsOnly, ""), refused, refused, refused, "workloadRoleARN"},
		{"a token for the agent with a role", aws, workload(agentOnly, roleA), agent, agent, agent, ""},
		{"a token for the agent without a role", aws, workload(agentOnly, ""), agent, refused, refused, "narrowed"},
		{"both tokens with a role", aws, workload(both, roleA), web, web, web, ""},
		{"both tokens without a role", aws, workload(both, ""), agent, refused, refused, "annotation eks.amazonaws.com/role-arn"},
		{"the agent's session where no role can be taken on", onlyFed, workload(agentOnly, roleA), refused, refused, refused, "assumeRole"},
		{"no token", aws, workload(nil, roleA), refused, refused, refused, "no token of audience sts.amazonaws.com"},
		{"a token of another audience", aws, workload(credentials.Tokens{"minio": {Value: "x"}}, roleA), refused, refused, refused, "no token of audience"},
		{"a token for MinIO", minio, workload(minioToken, ""), web, web, web, ""},
		{"a token for MinIO with a role", minio, workload(minioToken, minioRole), web, web, web, ""},
		{"only AWS's token for MinIO", minio, workload(both, minioRole), refused, refused, refused, "no token of audience minio"},
		{"tokens where there is no audience", strict, workload(minioToken, minioRole), refused, refused, refused, "sts.audience"},
		{"tokens where there is no STS", noSTS, workload(minioToken, minioRole), refused, refused, refused, "declare"},
	} {
		for scope, want := range map[string]credentials.Kind{volume.ScopeOff: c.off, volume.ScopeAuto: c.auto, volume.ScopeRequired: c.required} {
			// The driver's own credentials are narrowed like those of a secret.
			requests := []Request{c.request}
			if c.request.Source == credentials.SourceSecret && !c.request.Keys.IsZero() {
				requests = append(requests, Request{Source: credentials.SourceDriver, RoleARN: c.request.RoleARN})
			}
			for _, r := range requests {
				t.Run(c.name+"/"+scope+"/"+r.Source, func(t *testing.T) {
					r.Backend, r.Scope, r.Policy, r.Bucket, r.Name = backends(t, c.backend), scope, policyFor, "bucket", "0123456789ab"
					o, err := planner(c.request.Keys, nil, nil).Plan(t.Context(), r)
					if want == refused {
						if !fault.Is(err, fault.Precondition) && !fault.Is(err, fault.Unauthenticated) {
							t.Fatalf("got %v, %v", o, err)
						}
						if !strings.Contains(err.Error(), c.part) || strings.Contains(err.Error(), "canary") {
							t.Errorf("the error is: %v", err)
						}
						return
					}
					if err != nil || o.Kind != want {
						t.Fatalf("got %v, %v, want %s", o, err, want)
					}
					checkOrder(t, o, r, scope)
				})
			}
		}
	}
}

// checkOrder looks at what an order of each kind must hold, and must not.
func checkOrder(t *testing.T, o credentials.Order, r Request, scope string) {
	t.Helper()
	if o.Kind == credentials.AsIs {
		if o.Policy != "" || o.RoleARN != "" || o.Token != "" || o.Keys.IsZero() {
			t.Errorf("keys as they are with more: %+v", o)
		}
		return
	}
	if narrowed := o.Policy != ""; narrowed != (scope != volume.ScopeOff) {
		t.Errorf("policy %q with scope %s", o.Policy, scope)
	}
	if want := fmt.Sprintf("policy %t aws", r.Backend.AWS()); o.Policy != "" && o.Policy != want {
		t.Errorf("policy %q, want %q", o.Policy, want)
	}
	if o.RoleARN != r.RoleARN || o.Name == "" || len(o.Name) > 64 || !strings.HasSuffix(o.Name, ".0123456789ab") {
		t.Errorf("role %q, name %q", o.RoleARN, o.Name)
	}
	tokens := map[credentials.Kind]string{credentials.WebIdentity: map[bool]string{true: "sts-token", false: "minio-token"}[r.Backend.AWS()],
		credentials.PodIdentity: "agent-token"}
	if o.Token != tokens[o.Kind] {
		t.Errorf("token %q", o.Token)
	}
	if withKeys := !o.Keys.IsZero(); withKeys != (o.Kind == credentials.AssumeRole || o.Kind == credentials.FederationToken) {
		t.Errorf("keys %v", o.Keys)
	}
	if (o.AgentURI != "") != (o.Kind == credentials.PodIdentity) || (o.STS.Region == "") != (o.Kind == credentials.PodIdentity && o.RoleARN == "") {
		t.Errorf("agent %q, STS %+v", o.AgentURI, o.STS)
	}
}

func TestADriverWithAWebIdentityGivesItToItsOwnTokenServiceOnly(t *testing.T) {
	env := map[string]string{"AWS_ROLE_ARN": roleA, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
	with := func(more ...string) map[string]string {
		all := map[string]string{"AWS_ROLE_ARN": roleA, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
		for i := 0; i < len(more); i += 2 {
			all[more[i]] = more[i+1]
		}
		return all
	}
	const aws, minio = "{}", "{endpoint: 'http://minio:9000', sts: {audience: minio, roleOptional: true}}"
	one := jwt(`"sts.amazonaws.com"`)
	for name, c := range map[string]struct {
		backend, scope, role string
		env                  map[string]string
		token                string
		want                 credentials.Kind
	}{
		"its own role":                 {aws, "", "", env, one + "\n", credentials.WebIdentity},
		"several audiences":            {aws, "", "", env, jwt(`["x","sts.amazonaws.com"]`), credentials.WebIdentity},
		"its own role by name":         {aws, "", roleA, env, one, credentials.WebIdentity},
		"another role":                 {aws, "", roleB, env, one, credentials.AssumeRole},
		"scope off":                    {aws, "off", "", env, one, credentials.AsIs},
		"keys come first":              {aws, "", "", with("AWS_ACCESS_KEY_ID", "x", "AWS_SECRET_ACCESS_KEY", "y"), one, credentials.AsIs},
		"half a set of keys":           {aws, "", "", with("AWS_ACCESS_KEY_ID", "x"), one, credentials.WebIdentity},
		"no role":                      {aws, "", "", map[string]string{"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, one, credentials.AsIs},
		"no exchange of tokens":        {"{sts: {kinds: [assumeRole]}}", "", "", env, one, credentials.AsIs},
		"another service":              {minio, "", "", env, one, credentials.AsIs},
		"another service's token":      {minio, "", "", env, jwt(`"minio"`), credentials.WebIdentity},
		"no token of known form":       {aws, "", "", env, "opaque", credentials.AsIs},
		"a service without a name":     {"{endpoint: 'http://minio:9000', sts: {}}", "", "", env, jwt(`""`), credentials.AsIs},
		"a token for another audience": {aws, "", "", env, jwt(`"vault"`), credentials.AsIs},
	} {
		t.Run(name, func(t *testing.T) {
			p := planner(session, c.env, map[string]string{"/token": c.token})
			o, err := p.Plan(t.Context(), Request{Backend: backends(t, c.backend), Source: credentials.SourceDriver, Scope: c.scope, RoleARN: c.role, Policy: policyFor,
				Name: "n"})
			if err != nil || o.Kind != c.want {
				t.Fatalf("got %v, %v, want %s", o, err, c.want)
			}
			if o.Kind == credentials.WebIdentity && (o.Token != strings.TrimSpace(c.token) || o.RoleARN != roleA || o.Policy == "" || !o.Keys.IsZero()) {
				t.Errorf("got %+v", o)
			}
			if o.Kind != credentials.WebIdentity && o.Token != "" {
				t.Error("the token is in an order that does not need it")
			}
		})
	}
	p := planner(session, env, nil)
	if _, err := p.Plan(t.Context(), Request{Backend: backends(t, aws), Source: credentials.SourceDriver}); !fault.Is(err, fault.Unauthenticated) ||
		!strings.Contains(err.Error(), "AWS_WEB_IDENTITY_TOKEN_FILE") {
		t.Errorf("without the file: %v", err)
	}
}

func TestAnInlineVolumeNeverGetsTheDriversCredentials(t *testing.T) {
	asked := 0
	p := planner(static, map[string]string{"AWS_ROLE_ARN": roleA, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"},
		map[string]string{"/token": jwt(`"sts.amazonaws.com"`)})
	p.chain = fakeChain{keys: static, asked: &asked}
	for _, scope := range []string{"", "off", "required"} {
		o, err := p.Plan(t.Context(), Request{Backend: backends(t, "{}"), Source: credentials.SourceDriver, RoleARN: roleA, Scope: scope, Ephemeral: true})
		if !fault.Is(err, fault.Precondition) || !o.IsZero() || asked != 0 {
			t.Errorf("scope %q: %v, %v", scope, o, err)
		}
	}
	if _, err := p.Plan(t.Context(), Request{Backend: backends(t, "{}"), Source: credentials.SourceSecret, Keys: static, Ephemeral: true}); err != nil {
		t.Errorf("with a secret: %v", err)
	}
}

func TestRolesAreThePodsOwn(t *testing.T) {
	aws := "{workloadRoleARN: 'arn:aws:iam::111122223333:role/w/${pod.namespace}.${pod.serviceAccountName}'}"
	for name, c := range map[string]struct {
		backend string
		r       Request
		want    string
		part    string
	}{
		"the volume's":                   {aws, Request{Source: "workload", RoleARN: roleA}, roleA, ""},
		"the backend's":                  {aws, Request{Source: "workload", Pod: Pod{"ns", "sa"}}, "arn:aws:iam::111122223333:role/w/ns.sa", ""},
		"the backend's for others":       {aws, Request{Source: "driver", Pod: Pod{"ns", "sa"}}, "", ""},
		"the secret's":                   {aws, Request{Source: "secret", SecretRoleARN: roleB}, roleB, ""},
		"the volume's before the secret": {aws, Request{Source: "secret", SecretRoleARN: roleB, RoleARN: roleA}, roleA, ""},
		"the secret's is the secret's":   {aws, Request{Source: "driver", SecretRoleARN: roleB}, "", ""},
		"templates in the volume's":      {"{}", Request{Source: "driver", RoleARN: roleA + "-${pod.namespace}", Pod: Pod{"ns", "sa"}}, roleA + "-ns", ""},
		"an unknown pod":                 {aws, Request{Source: "workload"}, "", "podInfoOnMount"},
		"a namespace that is a path":     {aws, Request{Source: "workload", Pod: Pod{"../x", "sa"}}, "", "../x"},
		"two pods could have the role": {"{}", Request{Source: "driver", RoleARN: roleA + "${pod.namespace}-${pod.serviceAccountName}", Pod: Pod{"ns", "sa"}}, "",
			"two pods"},
		"a role of another service":       {"{}", Request{Source: "driver", RoleARN: minioRole}, "", "AWS"},
		"a role of AWS elsewhere is fine": {"{endpoint: 'http://a', sts: {}}", Request{Source: "driver", RoleARN: roleA}, roleA, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c.r.Backend = backends(t, c.backend)
			got, err := Role(c.r)
			if c.part != "" {
				if !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), c.part) {
					t.Errorf("got %q, %v", got, err)
				}
				return
			}
			if err != nil || got != c.want {
				t.Errorf("got %q, %v, want %q", got, err, c.want)
			}
		})
	}
}

func TestTheOperatorsRulesComeFirst(t *testing.T) {
	asked := 0
	p := planner(static, nil, nil)
	p.chain = fakeChain{keys: static, asked: &asked}
	r := Request{
		Backend: backends(t, `{allow: [{namespaces: [a], buckets: [b], roles: ["`+roleA+`-a"], sources: [driver]}]}`),
		Source:  credentials.SourceDriver, RoleARN: roleA + "-${pod.namespace}", Bucket: "b", Pod: Pod{"a", "sa"}, Policy: policyFor,
	}
	if _, err := p.Plan(t.Context(), r); err != nil {
		t.Fatalf("what is allowed: %v", err)
	}
	asked = 0
	for name, change := range map[string]func(*Request){
		"namespace": func(r *Request) { r.Pod.Namespace = "b" },
		"bucket":    func(r *Request) { r.Bucket = "c" },
		"role":      func(r *Request) { r.RoleARN = roleA },
		"source":    func(r *Request) { r.Source, r.Keys = credentials.SourceSecret, static },
	} {
		other := r
		change(&other)
		if o, err := p.Plan(t.Context(), other); !fault.Is(err, fault.Denied) || !o.IsZero() || asked != 0 {
			t.Errorf("another %s: %v, %v", name, o, err)
		}
		other.Allowed = true
		if _, err := p.Plan(t.Context(), other); err != nil {
			t.Errorf("another %s that was allowed before: %v", name, err)
		}
		asked = 0
	}
}

func TestAVolumeCannotAskForLessScopeThanItsBackend(t *testing.T) {
	p := planner(static, nil, nil)
	_, err := p.Plan(t.Context(), Request{Backend: backends(t, "{scope: required}"), Source: credentials.SourceDriver, Scope: "off"})
	if !fault.Is(err, fault.Precondition) {
		t.Errorf("got %v", err)
	}
}

func TestDurationsAreThoseThatAWSGives(t *testing.T) {
	for name, c := range map[string]struct {
		backend string
		keys    credentials.Keys
		role    string
		d       time.Duration
		want    time.Duration
		part    string
	}{
		"the service's own":       {"{}", static, roleA, 0, 0, ""},
		"a user's, without one":   {"{}", static, "", 0, time.Hour, ""},
		"a user's, long":          {"{}", static, "", 36 * time.Hour, 36 * time.Hour, ""},
		"too short":               {"{}", static, "", 14 * time.Minute, 0, "15m"},
		"a role's":                {"{}", static, roleA, 12 * time.Hour, 12 * time.Hour, ""},
		"a role's, too long":      {"{}", static, roleA, 13 * time.Hour, 0, "12h"},
		"chained":                 {"{}", session, roleA, time.Hour, time.Hour, ""},
		"chained, too long":       {"{}", session, roleA, 2 * time.Hour, 0, "chaining"},
		"elsewhere they are free": {"{endpoint: 'http://a', sts: {}}", session, roleA, 5 * time.Second, 5 * time.Second, ""},
		"as they are":             {"{}", session, "", 5 * time.Second, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := planner(c.keys, nil, nil).Plan(t.Context(), Request{Backend: backends(t, c.backend), Source: credentials.SourceDriver, RoleARN: c.role,
				Duration: c.d, Policy: policyFor})
			if c.part != "" {
				if !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), c.part) || !strings.Contains(err.Error(), "sessionDuration") {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil || o.Duration != c.want {
				t.Errorf("got %s, %v, want %s", o.Duration, err, c.want)
			}
		})
	}
}

func TestPoliciesFollowThePartitionAndRefuseWhatTheyCannotSay(t *testing.T) {
	p := planner(static, nil, nil)
	o, err := p.Plan(t.Context(), Request{Backend: backends(t, "{region: cn-north-1}"), Source: credentials.SourceDriver, Policy: policyFor})
	if err != nil || o.Policy != "policy true aws-cn" {
		t.Errorf("got %q, %v", o.Policy, err)
	}
	o, err = p.Plan(t.Context(), Request{Backend: backends(t, "{}"), Source: credentials.SourceDriver, RoleARN: "arn:aws-us-gov:iam::111122223333:role/a",
		Policy: policyFor})
	if err != nil || o.Policy != "policy true aws-us-gov" {
		t.Errorf("with a role: %q, %v", o.Policy, err)
	}
	cannot := func(bool, string) (string, error) { return "", fault.Errorf(fault.Precondition, "cannot be said") }
	for _, c := range []struct {
		bucket, scope string
		want          credentials.Kind
	}{
		{"bucket", "auto", ""}, {"bucket", "required", ""}, {"bucket", "off", credentials.AsIs},
		// A directory bucket and an alias of an access point tell by their names that policies cannot name their parts.
		{"bucket--use1-az4--x-s3", "auto", credentials.AsIs}, {"bucket--use1-az4--x-s3", "required", ""},
	} {
		o, err := p.Plan(t.Context(), Request{Backend: backends(t, "{}"), Source: credentials.SourceDriver, Scope: c.scope, Bucket: c.bucket, Policy: cannot})
		if o.Kind != c.want || (err != nil) != (c.want == "") || err != nil && !fault.Is(err, fault.Precondition) {
			t.Errorf("%s with scope %s: %v, %v, want %q", c.bucket, c.scope, o, err, c.want)
		}
	}
}

func TestTheDriversOwnErrorIsTheAnswer(t *testing.T) {
	p := planner(static, nil, nil)
	wrong := fault.Errorf(fault.Unauthenticated, "none")
	p.chain = fakeChain{err: wrong}
	if _, err := p.Plan(t.Context(), Request{Backend: backends(t, "{}"), Source: credentials.SourceDriver}); !errors.Is(err, wrong) {
		t.Errorf("got %v", err)
	}
	if _, err := p.Plan(t.Context(), Request{Backend: backends(t, "{}"), Source: "pod"}); !fault.Is(err, fault.Invalid) {
		t.Errorf("an unknown source: %v", err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
