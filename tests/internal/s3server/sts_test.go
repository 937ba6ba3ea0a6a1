package s3server_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/aws-sdk-go-v2/service/sts/types"
	"github.com/golang-jwt/jwt/v5"

	csicredentials "github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	fakests "github.com/s3-csi/s3-csi-driver/tests/internal/sts"
)

const audience = "s3-csi"

// stsRig is a server with a user, two roles, an issuer and two buckets.
type stsRig struct {
	*s3server.Process

	issuer      *fakests.Issuer
	user        csicredentials.Keys
	role, other string // ARNs; the user and pods of the namespace "apps" may take on the first, its sessions the second
}

const (
	allOfOne = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":["arn:aws:s3:::one","arn:aws:s3:::one/*"]}]}`
	allOfAll = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`
)

func newSTSRig(t *testing.T) *stsRig {
	t.Helper()
	ctx := t.Context()
	p, err := s3server.StartProcess(ctx, s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := fakests.NewIssuer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Stop(), issuer.Close()); err != nil {
			t.Error(err)
		}
	})
	r := &stsRig{Process: p, issuer: issuer}
	r.user = must(p.AddUser(ctx, "alice", allOfOne))(t)
	r.role = must(p.SetRole(ctx, s3server.Role{Name: "role", Policy: allOfOne, Trust: s3server.Trust{
		Users:   []string{"alice"},
		Issuers: []s3server.TrustedIssuer{{URL: issuer.URL(), Audiences: []string{audience}, Subjects: []string{"system:serviceaccount:apps:*"}}},
	}}))(t)
	r.other = must(p.SetRole(ctx, s3server.Role{Name: "other", Policy: allOfAll, Trust: s3server.Trust{Roles: []string{"role"}}}))(t)
	if err := p.AddIssuer(ctx, issuer.URL(), audience, "unused"); err != nil {
		t.Fatal(err)
	}
	for _, bucket := range []string{"one", "two"} {
		if _, err := client(p, p.Keys()).CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &bucket}); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// sts is a client of the service with some keys; zero keys sign nothing.
func (r *stsRig) sts(k csicredentials.Keys, opts ...func(*sts.Options)) *sts.Client {
	o := sts.Options{BaseEndpoint: aws.String(r.STS()), Region: r.Region(), RetryMaxAttempts: 1}
	if !k.IsZero() {
		o.Credentials = credentials.NewStaticCredentialsProvider(k.AccessKeyID, k.SecretAccessKey, k.SessionToken)
	}
	return sts.New(o, opts...)
}

func keysOf(c *types.Credentials) csicredentials.Keys {
	return csicredentials.Keys{AccessKeyID: *c.AccessKeyId, SecretAccessKey: *c.SecretAccessKey, SessionToken: *c.SessionToken, Expires: *c.Expiration}
}

// assume, federate and identify make sessions of the three kinds.
func (r *stsRig) assume(ctx context.Context, by csicredentials.Keys, role, policy string, lasts time.Duration) (csicredentials.Keys, error) {
	out, err := r.sts(by).AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &role, RoleSessionName: aws.String("tester"), Policy: optional(policy),
		DurationSeconds: seconds(lasts)})
	if err != nil {
		return csicredentials.Keys{}, err
	}
	return keysOf(out.Credentials), nil
}

func (r *stsRig) federate(ctx context.Context, by csicredentials.Keys, name, policy string) (csicredentials.Keys, error) {
	out, err := r.sts(by).GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: &name, Policy: optional(policy)})
	if err != nil {
		return csicredentials.Keys{}, err
	}
	return keysOf(out.Credentials), nil
}

func (r *stsRig) identify(ctx context.Context, token fakests.TokenRequest, role, policy string) (csicredentials.Keys, error) {
	if token.Audiences == nil {
		token.Audiences = []string{audience}
	}
	if token.Namespace == "" {
		token.Namespace = "apps"
	}
	made, err := r.issuer.Token(token)
	if err != nil {
		return csicredentials.Keys{}, err
	}
	out, err := r.sts(csicredentials.Keys{}).AssumeRoleWithWebIdentity(ctx, &sts.AssumeRoleWithWebIdentityInput{
		RoleArn: &role, RoleSessionName: aws.String("pod"), WebIdentityToken: &made.Value, Policy: optional(policy)})
	if err != nil {
		return csicredentials.Keys{}, err
	}
	return keysOf(out.Credentials), nil
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func seconds(d time.Duration) *int32 {
	if d == 0 {
		return nil
	}
	return aws.Int32(int32(d / time.Second))
}

func TestSessionsMayDoWhatRoleAndPolicyBothAllow(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	makes := map[string]func(policy string) (csicredentials.Keys, error){
		"AssumeRole":         func(p string) (csicredentials.Keys, error) { return r.assume(ctx, r.user, r.role, p, 0) },
		"GetFederationToken": func(p string) (csicredentials.Keys, error) { return r.federate(ctx, r.user, "tester", p) },
		"AssumeRoleWithWebIdentity": func(p string) (csicredentials.Keys, error) {
			return r.identify(ctx, fakests.TokenRequest{}, r.role, p)
		},
	}
	for kind, session := range makes {
		for _, tt := range []struct {
			name, policy string
			can, cannot  []string // bucket/key
		}{
			{"a policy narrows", prefixPolicy("one", "vol-1/"), []string{"one/vol-1/x"}, []string{"one/vol-10/x", "one/x", "two/vol-1/x"}},
			{"a policy does not widen", allOfAll, []string{"one/x"}, []string{"two/x"}},
			{"a policy does not move", prefixPolicy("two", ""), nil, []string{"one/x", "two/x"}},
		} {
			keys, err := session(tt.policy)
			if err != nil {
				t.Errorf("%s, %s: %v", kind, tt.name, err)
				continue
			}
			for _, path := range slices.Concat(tt.can, tt.cannot) {
				bucket, key, _ := strings.Cut(path, "/")
				err := put(ctx, client(r, keys), bucket, key, "x", nil)
				if slices.Contains(tt.can, path) && err != nil || slices.Contains(tt.cannot, path) && code(err) != "AccessDenied" {
					t.Errorf("%s, %s: writing %s: %v", kind, tt.name, path, err)
				}
			}
		}
	}
	if err := put(ctx, client(r, must(r.assume(ctx, r.user, r.role, "", 0))(t)), "one", "x", "x", nil); err != nil {
		t.Errorf("a role's session without a policy: %v", err)
	}
	if err := put(ctx, client(r, must(r.federate(ctx, r.user, "tester", ""))(t)), "one", "x", "x", nil); code(err) != "AccessDenied" {
		t.Errorf("a user's session without a policy: %v, want AccessDenied", err)
	}
	keys := must(r.federate(ctx, r.user, "tester", allOfAll))(t)
	if err := r.SetPolicy(ctx, "alice", prefixPolicy("one", "mine/")); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, client(r, keys), "one", "x", "x", nil); code(err) != "AccessDenied" {
		t.Errorf("a user's session after the user's policy has changed: %v, want AccessDenied", err)
	}
	keys.SessionToken = keys.SessionToken[:len(keys.SessionToken)-4] + "AAAA"
	if err := put(ctx, client(r, keys), "one", "mine/x", "x", nil); err == nil {
		t.Error("keys with another token are as good")
	}
}

func TestSTSRefusesWhatAWSRefuses(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	session := must(r.assume(ctx, r.user, r.role, "", 0))(t)
	scoped := must(r.assume(ctx, r.user, r.role, prefixPolicy("one", "x/"), 0))(t)
	stranger := must(r.AddUser(ctx, "bob", allOfAll))(t)
	wrong := r.user
	wrong.SecretAccessKey += "x"
	withToken := r.user
	withToken.SessionToken = session.SessionToken
	assume := func(by csicredentials.Keys, role, policy string, lasts time.Duration) func() error {
		return func() error { _, err := r.assume(ctx, by, role, policy, lasts); return err }
	}
	identify := func(token fakests.TokenRequest, role string) func() error {
		return func() error { _, err := r.identify(ctx, token, role, ""); return err }
	}
	federate := func(by csicredentials.Keys, name string) func() error {
		return func() error { _, err := r.federate(ctx, by, name, allOfAll); return err }
	}
	for name, tt := range map[string]struct {
		call func() error
		want string
	}{
		"wrong secret":            {assume(wrong, r.role, "", 0), "SignatureDoesNotMatch"},
		"unknown key":             {assume(csicredentials.Keys{AccessKeyID: "AKIANOBODY", SecretAccessKey: "x"}, r.role, "", 0), "InvalidClientTokenId"},
		"user's key with a token": {assume(withToken, r.role, "", 0), "InvalidClientTokenId"},
		"session's key without a token": {assume(csicredentials.Keys{AccessKeyID: session.AccessKeyID, SecretAccessKey: session.SecretAccessKey}, r.other, "", 0),
			"InvalidClientTokenId"},
		"no such role":                  {assume(r.user, s3server.RoleARN("none"), "", 0), "AccessDenied"},
		"a user the role trusts not":    {assume(stranger, r.role, "", 0), "AccessDenied"},
		"a role that trusts roles only": {assume(r.user, r.other, "", 0), "AccessDenied"},
		"root":                          {assume(r.Keys(), r.role, "", 0), "AccessDenied"},
		"a session's way out":           {assume(scoped, r.other, "", 0), "AccessDenied"},
		"a session of its own role":     {assume(session, r.role, "", 0), "AccessDenied"},
		"no policy document":            {assume(r.user, r.role, `{"Version":`, 0), "MalformedPolicyDocument"},
		"a policy of another grammar": {assume(r.user, r.role, `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*"}]}`, 0),
			"MalformedPolicyDocument"},
		"a long policy":                  {assume(r.user, r.role, prefixPolicy("one", strings.Repeat("x", 2048)), 0), "ValidationError"},
		"a chained session of two hours": {assume(session, r.other, "", 2*time.Hour), "ValidationError"},
		"thirteen hours":                 {assume(r.user, r.role, "", 13*time.Hour), "ValidationError"},
		"an expired token":               {identify(fakests.TokenRequest{Lifetime: -time.Second}, r.role), "ExpiredTokenException"},
		"another's key":                  {identify(fakests.TokenRequest{WrongKey: true}, r.role), "InvalidIdentityToken"},
		"another's issuer":               {identify(fakests.TokenRequest{Issuer: "http://127.0.0.1:9"}, r.role), "InvalidIdentityToken"},
		"an unknown audience":            {identify(fakests.TokenRequest{Audiences: []string{"vault"}}, r.role), "InvalidIdentityToken"},
		"an audience the role knows not": {identify(fakests.TokenRequest{Audiences: []string{"unused"}}, r.role), "AccessDenied"},
		"another namespace":              {identify(fakests.TokenRequest{Namespace: "apps2"}, r.role), "AccessDenied"},
		"a role without issuers":         {identify(fakests.TokenRequest{}, r.other), "AccessDenied"},
		"a session for a session":        {federate(session, "tester"), "AccessDenied"},
		"a long name":                    {federate(r.user, strings.Repeat("x", 33)), "ValidationError"},
		"a name with a slash":            {federate(r.user, "a/b"), "ValidationError"},
		"another region": {func() error {
			_, err := r.sts(r.user, func(o *sts.Options) { o.Region = "eu-central-1" }).GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{})
			return err
		}, "SignatureDoesNotMatch"},
		"no signature": {func() error {
			_, err := r.sts(csicredentials.Keys{}, func(o *sts.Options) { o.Credentials = aws.AnonymousCredentials{} }).GetCallerIdentity(ctx,
				&sts.GetCallerIdentityInput{})
			return err
		}, "MissingAuthenticationToken"},
	} {
		if got := code(tt.call()); got != tt.want {
			t.Errorf("%s: %q, want %s", name, got, tt.want)
		}
	}
	// What the caller sends is what was signed.
	tamper := &http.Client{Transport: tamperer{}}
	_, err := r.sts(r.user, func(o *sts.Options) { o.HTTPClient = tamper }).AssumeRole(ctx,
		&sts.AssumeRoleInput{RoleArn: &r.role, RoleSessionName: aws.String("tester"), Policy: aws.String(allOfOne)})
	if code(err) != "SignatureDoesNotMatch" {
		t.Errorf("a body that was changed on its way: %v, want SignatureDoesNotMatch", err)
	}
	if err := r.SetSTS(ctx, s3server.STS{MinDuration: 15 * time.Minute, MaxPacked: 10}); err != nil {
		t.Fatal(err)
	}
	if err := assume(r.user, r.role, "", time.Minute)(); code(err) != "ValidationError" {
		t.Errorf("a minute where a quarter of an hour is the least: %v, want ValidationError", err)
	}
	if err := assume(r.user, r.role, allOfAll, 0)(); code(err) != "PackedPolicyTooLarge" {
		t.Errorf("a policy that packs badly: %v, want PackedPolicyTooLarge", err)
	}
}

// tamperer changes a request after it has been signed.
type tamperer struct{}

func (tamperer) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	changed := strings.Replace(string(body), "one", "two", 1)
	r = r.Clone(r.Context())
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(changed)), int64(len(changed))
	return http.DefaultTransport.RoundTrip(r)
}

func TestSessionsChainWhereTheyMay(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	for name, policy := range map[string]string{"without a policy": "", "with one that allows it": allOfAll} {
		first := must(r.assume(ctx, r.user, r.role, policy, 0))(t)
		second := must(r.assume(ctx, first, r.other, prefixPolicy("two", "x/"), time.Hour))(t)
		if err := put(ctx, client(r, second), "two", "x/y", "x", nil); err != nil {
			t.Errorf("a session %s: %v", name, err)
		}
		who, err := r.sts(second).GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{})
		if err != nil || *who.Arn != "arn:aws:sts::000000000000:assumed-role/other/tester" {
			t.Errorf("it is %v, %v", who, err)
		}
	}
}

// The account that the token service names is the one that owns the buckets.
func TestBucketsAreTheAccounts(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	who, err := r.sts(r.user).GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{})
	if err != nil {
		t.Fatal(err)
	}
	for owner, want := range map[string]bool{*who.Account: true, "999999999999": false} {
		_, err := client(r, r.user).HeadBucket(ctx, &s3.HeadBucketInput{Bucket: aws.String("one"), ExpectedBucketOwner: &owner})
		if (err == nil) != want {
			t.Errorf("expecting the owner %s: %v", owner, err)
		}
	}
}

func TestTokensOfNewKeysAreBelieved(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	must(r.identify(ctx, fakests.TokenRequest{}, r.role, ""))(t)
	if err := r.issuer.Rotate(jwt.SigningMethodES256); err != nil {
		t.Fatal(err)
	}
	must(r.identify(ctx, fakests.TokenRequest{}, r.role, ""))(t)
}

func TestSessionsEnd(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	revoked := must(r.assume(ctx, r.user, r.role, "", time.Hour))(t)
	if err := r.RevokeSessions(ctx, r.role); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, client(r, revoked), "one", "x", "x", nil); code(err) != "InvalidAccessKeyId" {
		t.Errorf("after it was revoked: %v, want InvalidAccessKeyId", err)
	}
	const lasts = 4 * time.Second
	short := must(r.assume(ctx, r.user, r.role, "", lasts))(t)
	if err := put(ctx, client(r, short), "one", "x", "x", nil); err != nil {
		t.Errorf("at once: %v", err)
	}
	for end := time.Now().Add(lasts + 10*time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := put(ctx, client(r, short), "one", "x", "x", nil)
		if code(err) == "InvalidAccessKeyId" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("a session of %s goes on: %v", lasts, err)
		}
	}
	if _, err := r.assume(ctx, short, r.other, "", 0); code(err) != "ExpiredToken" {
		t.Errorf("its answer to what comes after: %v, want ExpiredToken", err)
	}
}

func TestSTSClockIsItsOwn(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	for _, offset := range []time.Duration{-7 * time.Minute, 0, 7 * time.Minute} {
		if err := r.SetSTS(ctx, s3server.STS{ClockOffset: offset}); err != nil {
			t.Fatal(err)
		}
		out, err := r.sts(r.user).AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &r.role, RoleSessionName: aws.String("tester"), DurationSeconds: aws.Int32(60)})
		if err != nil {
			t.Fatal(err)
		}
		said, _ := middleware.GetServerTime(out.ResultMetadata)
		if lasts := out.Credentials.Expiration.Sub(said); lasts < 59*time.Second || lasts > 61*time.Second {
			t.Errorf("%v ahead: a session of a minute lasts %v", offset, lasts)
		}
		if ahead := time.Until(said) - offset; ahead > 5*time.Second || ahead < -30*time.Second {
			t.Errorf("%v ahead: it says that it is %v", offset, said)
		}
		if err := put(ctx, client(r, keysOf(out.Credentials)), "one", "x", "x", nil); err != nil {
			t.Errorf("%v ahead: %v", offset, err)
		}
	}
}

func TestSTSFaults(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	url := r.STS()
	for fault, want := range map[string]string{
		s3server.FaultUnavailable: "ServiceUnavailable", s3server.FaultThrottle: "Throttling", s3server.FaultRefuse: "AccessDenied",
		s3server.FaultDown: "", s3server.FaultHang: "",
	} {
		if err := r.SetSTS(ctx, s3server.STS{Fault: fault}); err != nil {
			t.Fatal(err)
		}
		limit := 10 * time.Second
		if fault == s3server.FaultHang {
			limit = 2 * time.Second // the call has come by then
		}
		short, cancel := context.WithTimeout(ctx, limit)
		_, err := r.assume(short, r.user, r.role, "", 0)
		late := short.Err() != nil
		cancel()
		if err == nil || code(err) != want || late != (fault == s3server.FaultHang) {
			t.Errorf("%s: %v", fault, err)
		}
	}
	if err := r.SetSTS(ctx, s3server.STS{}); err != nil {
		t.Fatal(err)
	}
	before := must(r.STSCalls(ctx))(t)
	if n := before.Refused["Throttling"]; n != 1 || before.Calls["AssumeRole"] != 4 || before.Made() != 0 {
		t.Errorf("counted: %+v", before)
	}
	if r.STS() != url {
		t.Errorf("it is elsewhere: %s, was %s", r.STS(), url)
	}
	must(r.assume(ctx, r.user, r.role, "", 0))(t)
	must(r.federate(ctx, r.user, "somebody", ""))(t)
	if calls := must(r.STSCalls(ctx))(t); !slices.Equal(calls.Sessions, []string{"tester", "somebody"}) {
		t.Errorf("sessions: %q, calls: %v", calls.Sessions, slices.Collect(maps.Keys(calls.Calls)))
	}
	if err := r.SetSTS(ctx, s3server.STS{IgnorePolicies: true}); err != nil {
		t.Fatal(err)
	}
	wide := must(r.assume(ctx, r.user, r.role, prefixPolicy("one", "x/"), 0))(t)
	if err := put(ctx, client(r, wide), "one", "y", "x", nil); err != nil {
		t.Errorf("a service that ignores policies enforces one: %v", err)
	}
	if err := r.SetSTS(ctx, s3server.STS{Fault: "nonsense"}); err == nil {
		t.Error("a fault that is none is accepted")
	}
}

func TestPodIdentityAgentGivesTheAssociationsSession(t *testing.T) {
	t.Parallel()
	r, ctx := newSTSRig(t), t.Context()
	agent, err := fakests.NewAgent(fakests.AgentOptions{Issuer: r.issuer, STS: r.STS(), Region: r.Region(), Keys: r.user})
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	agent.Associate("apps", "web", r.role)
	get := func(request fakests.TokenRequest) (status int, keys csicredentials.Keys) {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, agent.URL(), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", must(r.issuer.Token(request))(t).Value)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var got struct {
			AccessKeyID     string `json:"AccessKeyId"`
			SecretAccessKey string
			Token           string
			Expiration      time.Time
		}
		if resp.StatusCode == http.StatusOK {
			if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
				t.Fatal(err)
			}
		}
		return resp.StatusCode, csicredentials.Keys{AccessKeyID: got.AccessKeyID, SecretAccessKey: got.SecretAccessKey, SessionToken: got.Token}
	}
	good := fakests.TokenRequest{Namespace: "apps", ServiceAccount: "web", Audiences: []string{fakests.PodIdentityAudience}}
	if status, keys := get(good); status != http.StatusOK || put(ctx, client(r, keys), "one", "x", "x", nil) != nil {
		t.Errorf("status %d, and the keys are not the role's", status)
	}
	for name, change := range map[string]func(*fakests.TokenRequest){
		"no association":   func(t *fakests.TokenRequest) { t.ServiceAccount = "db" },
		"another audience": func(t *fakests.TokenRequest) { t.Audiences = []string{audience} },
		"expired":          func(t *fakests.TokenRequest) { t.Lifetime = -time.Minute },
		"another's key":    func(t *fakests.TokenRequest) { t.WrongKey = true },
	} {
		request := good
		change(&request)
		if status, _ := get(request); status < 400 || status >= 500 {
			t.Errorf("%s: status %d", name, status)
		}
	}
	agent.Fail(http.StatusServiceUnavailable)
	if status, _ := get(good); status != http.StatusServiceUnavailable || agent.Calls() != 6 {
		t.Errorf("status %d after %d calls", status, agent.Calls())
	}
}
