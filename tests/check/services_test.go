package check

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pages"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"

	checks "github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// gateway is a versitygw with a security token service, a user and a role that the user can take on.
type gateway struct {
	*s3server.Process
	user credentials.Keys
	role string
}

func newGateway(t *testing.T) gateway {
	t.Helper()
	p, err := s3server.StartProcess(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	g := gateway{Process: p, user: must(p.AddUser(t.Context(), "alice", everything))(t)}
	g.role = must(p.SetRole(t.Context(), s3server.Role{Name: "role", Policy: everything, Trust: s3server.Trust{Users: []string{"alice"}}}))(t)
	return g
}

// backend is the gateway as a backend with these further settings.
func (g gateway) backend(more string) string {
	return fmt.Sprintf("  lab: {endpoint: %q, region: %s%s}\n", g.Endpoint(), g.Region(), more)
}

// proxy passes requests on to the gateway.
func (g gateway) proxy(t *testing.T) http.Handler {
	t.Helper()
	upstream := must(url.Parse(g.Endpoint()))(t)
	return &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(upstream)
		r.Out.Host = r.In.Host // it is signed
	}}
}

func (g gateway) sts(kinds string) string {
	return fmt.Sprintf(", sts: {endpoint: %q, kinds: [%s]}", g.STS(), kinds)
}

// storage is what versitygw can do, where the check makes a bucket of its own.
const storage = `
	reachable yes
	clock yes
	credentials yes
	createBucket yes
	region yes
	bucketOwner yes
	bucketTags yes
	missingKey yes
	emptyListing yes
	uploadListing yes
	versioning yes
	objects yes
` + operations

// operations is what both servers can do. versitygw does not encode listings, so names with control characters are not listed as they are.
const operations = `
	metadata yes
	emptyObjects yes
	ranges yes
	conditionalReads yes
	conditionalWrites yes
	names yes
	pagination yes
	listingOrder yes
	listingNames yes
	directories yes
	controlNames no
	copies yes
	conditionalCopies yes
	multipart yes
	partCopies yes
	manyParts yes
	checksums yes
	multiDelete yes
	deletes yes
`

func TestAGatewayWithATokenService(t *testing.T) {
	g := newGateway(t)
	t.Cleanup(func() { nothingLeft(t, client(g.Endpoint(), g.Region(), g.Keys())) })

	t.Run("with a role to take on", func(t *testing.T) {
		r := run(t, g.user, g.backend(g.sts("assumeRole, webIdentity, federationToken")+", scope: required, controllerRoleARN: "+g.role), "--create-bucket")
		expect(t, r, storage+`
			callerIdentity yes
			assumeRole yes
			webIdentity yes
			federationToken yes
			leastSession yes
			sessions yes
			sessionPolicies yes
			timeSnapshots no`)
		if least := row(t, r, "leastSession"); !strings.HasPrefix(least.Why, "1s ") {
			t.Errorf("%+v", least)
		}
		if snapshots := row(t, r, "timeSnapshots"); !strings.Contains(snapshots.Why, "does not keep the times of versions") {
			t.Errorf("%+v", snapshots)
		}
		if sessions := row(t, r, "sessions"); !strings.Contains(sessions.Why, "assumeRole") {
			t.Errorf("%+v", sessions)
		}
	})

	t.Run("without a role federation tokens are found", func(t *testing.T) {
		r := run(t, g.user, g.backend(g.sts("assumeRole, federationToken")), "--create-bucket")
		expect(t, r, storage+`
			callerIdentity yes
			assumeRole unknown
			webIdentity yes
			federationToken yes
			leastSession yes
			sessions yes
			sessionPolicies yes
			timeSnapshots no`)
		if web := row(t, r, "webIdentity"); !strings.Contains(web.Advice, "webIdentity to the backend's sts.kinds") {
			t.Errorf("%+v", web)
		}
	})

	t.Run("sessions are required and none can be made", func(t *testing.T) {
		r := run(t, g.user, g.backend(g.sts("webIdentity")+", scope: required"), "--create-bucket")
		expect(t, r, storage+`
			callerIdentity yes
			assumeRole unknown
			webIdentity yes
			federationToken yes
			leastSession yes
			sessions no !
			sessionPolicies yes
			timeSnapshots no`)
	})

	t.Run("a bucket that is there", func(t *testing.T) {
		c := client(g.Endpoint(), g.Region(), g.Keys())
		if _, err := c.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String("there")}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.PutBucketVersioning(t.Context(), &s3.PutBucketVersioningInput{Bucket: aws.String("there"),
			VersioningConfiguration: &types.VersioningConfiguration{Status: types.BucketVersioningStatusEnabled}}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String("there"), Key: aws.String(".s3-csi/check/mine"),
			Body: strings.NewReader("x")}); err != nil {
			t.Fatal(err)
		}
		r := run(t, g.user, g.backend(g.sts("federationToken")), "--bucket=there")
		expect(t, r, strings.Replace(strings.Replace(storage, "createBucket", "bucket", 1), "bucketTags yes", "bucketTags unknown", 1)+`
			callerIdentity yes
			assumeRole unknown
			webIdentity yes
			federationToken yes
			leastSession yes
			sessions yes
			sessionPolicies yes
			timeSnapshots no`)
		if v := row(t, r, "versioning"); !strings.Contains(v.Why, "enabled") {
			t.Errorf("%+v", v)
		}
		left, err := c.ListObjectVersions(t.Context(), &s3.ListObjectVersionsInput{Bucket: aws.String("there")})
		if err != nil || len(left.Versions) != 1 || aws.ToString(left.Versions[0].Key) != ".s3-csi/check/mine" || len(left.DeleteMarkers) != 0 {
			t.Errorf("what was there before must be what is there after: %+v %+v, %v", left.Versions, left.DeleteMarkers, err)
		}
	})

	t.Run("a bucket that is not there", func(t *testing.T) {
		r := run(t, g.user, g.backend(""), "--bucket=not-there")
		if b := row(t, r, "bucket"); b.Result != checks.No || r.OK || r.code != 1 {
			t.Errorf("%+v, exit code %d", b, r.code)
		}
	})

	t.Run("the table for people says the same", func(t *testing.T) {
		cmd := command(t, g.user, g.backend(", scope: required"), "--create-bucket")
		out, err := cmd.Output()
		for _, want := range []string{"backend lab (" + g.Endpoint() + ")\n", "\n  yes      conditional writes", "\n! no       volumes with the driver's " +
			"credentials get sessions", "sts: {roleOptional: true} for MinIO", `marked with "!"`} {
			if !strings.Contains(string(out), want) {
				t.Errorf("%q is not in\n%s", want, out)
			}
		}
		if err == nil || cmd.ProcessState.ExitCode() != 1 {
			t.Errorf("exit code %d", cmd.ProcessState.ExitCode())
		}
	})
}

func TestAServiceThatIgnoresSessionPoliciesIsFoundOut(t *testing.T) {
	g := newGateway(t)
	if err := g.SetSTS(t.Context(), s3server.STS{IgnorePolicies: true}); err != nil {
		t.Fatal(err)
	}
	r := run(t, g.user, g.backend(g.sts("assumeRole")+", controllerRoleARN: "+g.role), "--create-bucket")
	expect(t, r, storage+`
		callerIdentity yes
		assumeRole yes
		webIdentity yes
		federationToken yes
		leastSession yes
		sessions yes
		sessionPolicies no !
		timeSnapshots no`)
	nothingLeft(t, client(g.Endpoint(), g.Region(), g.Keys()))
}

func TestAGatewayWithoutATokenService(t *testing.T) {
	g := newGateway(t)
	r := run(t, g.user, g.backend(""), "--create-bucket")
	expect(t, r, strings.Replace(storage, "bucketOwner yes", "bucketOwner no", 1)+`
		callerIdentity no
		assumeRole no
		webIdentity no
		federationToken no
		leastSession unknown
		sessions no
		sessionPolicies unknown
		timeSnapshots no`)
	nothingLeft(t, client(g.Endpoint(), g.Region(), g.Keys()))
}

func TestMinIO(t *testing.T) {
	m, err := minio.Start(t.Context(), t.TempDir())
	if errors.Is(err, minio.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	})
	can := `
		reachable yes
		clock yes
		credentials yes
		createBucket yes
		region yes
		bucketOwner no
		bucketTags no
		missingKey yes
		emptyListing yes
		uploadListing no
		versioning yes
		objects yes
	` + strings.Replace(operations, "controlNames no", "controlNames yes", 1) + `
		callerIdentity no
		assumeRole yes
		webIdentity unknown
		federationToken no
		leastSession yes
	`
	backend := func(more string) string { return fmt.Sprintf("  lab: {endpoint: %q%s}\n", m.Endpoint(), more) }
	t.Run("declared", func(t *testing.T) {
		r := run(t, m.Keys(), backend(", sts: {roleOptional: true}"), "--create-bucket")
		expect(t, r, can+"sessions yes\nsessionPolicies yes\ntimeSnapshots yes")
		if least := row(t, r, "leastSession"); !strings.HasPrefix(least.Why, "15m ") {
			t.Errorf("%+v", least)
		}
	})
	t.Run("not declared", func(t *testing.T) {
		r := run(t, m.Keys(), backend(""), "--create-bucket")
		expect(t, r, can+"sessions no\nsessionPolicies yes\ntimeSnapshots yes")
		if role := row(t, r, "assumeRole"); !strings.Contains(role.Advice, "sts: {roleOptional: true}") {
			t.Errorf("%+v", role)
		}
	})
	t.Run("a bucket that is there", func(t *testing.T) {
		c := client(m.Endpoint(), m.Region(), m.Keys())
		bucket := aws.String("there")
		if _, err := c.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: bucket}); err != nil {
			t.Fatal(err)
		}
		if off := row(t, run(t, m.Keys(), backend(""), "--bucket=there"), "timeSnapshots"); off.Result != checks.No || !strings.Contains(off.Why, "versioning") {
			t.Errorf("%+v", off)
		}
		if _, err := c.PutBucketVersioning(t.Context(), &s3.PutBucketVersioningInput{Bucket: bucket,
			VersioningConfiguration: &types.VersioningConfiguration{Status: types.BucketVersioningStatusEnabled}}); err != nil {
			t.Fatal(err)
		}
		if on := row(t, run(t, m.Keys(), backend(""), "--bucket=there"), "timeSnapshots"); on.Result != checks.Yes {
			t.Errorf("%+v", on)
		}
		if left, err := c.ListObjectVersions(t.Context(), &s3.ListObjectVersionsInput{Bucket: bucket}); err != nil ||
			len(left.Versions)+len(left.DeleteMarkers) != 0 {
			t.Errorf("left: %+v %+v, %v", left.Versions, left.DeleteMarkers, err)
		}
	})
	nothingLeft(t, client(m.Endpoint(), m.Region(), m.Keys()))
}

// The controller's policy of docs/how-to/aws.md is enough for the check with a bucket that the page runs.
func TestTheControllersPolicyOfThePage(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	const bucket = "team-data" // the page's
	if _, err := client(g.Endpoint(), g.Region(), g.Keys()).CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	document := strings.ReplaceAll(pages.Files(pages.Read(t, "how-to/aws"))["controller.json"], "$BUCKET", bucket)
	if !json.Valid([]byte(document)) {
		t.Fatalf("the page's controller.json is not JSON: %s", document)
	}
	r := run(t, must(g.AddUser(t.Context(), "controller", document))(t), g.backend(""), "--bucket="+bucket)
	if r.code != 0 || !r.OK {
		t.Errorf("exit code %d: %s\n%+v", r.code, r.stderr, r.Report)
	}
}

// untried is what cannot be tried without a bucket.
const untried = `
		bucketOwner unknown
		bucketTags unknown
		missingKey unknown !
		emptyListing unknown !
		uploadListing unknown
		versioning unknown
		objects unknown !
		metadata unknown !
		emptyObjects unknown !
		ranges unknown !
		conditionalReads unknown !
		conditionalWrites unknown !
		names unknown !
		pagination unknown !
		listingOrder unknown !
		listingNames unknown !
		directories unknown !
		controlNames unknown
		copies unknown !
		conditionalCopies unknown !
		multipart unknown !
		partCopies unknown !
		manyParts unknown
		checksums unknown !
		multiDelete unknown !
		deletes unknown !
`

func TestWhatCannotBeTriedIsUnknown(t *testing.T) {
	t.Parallel()
	const nothing = untried + `
		callerIdentity unknown
		assumeRole unknown
		webIdentity unknown
		federationToken unknown
		leastSession unknown
		sessions unknown
		sessionPolicies unknown
		timeSnapshots unknown`
	t.Run("a service that is not there", func(t *testing.T) {
		r := run(t, credentials.Keys{AccessKeyID: "a", SecretAccessKey: "not-to-be-shown"}, `  lab: {endpoint: "http://127.0.0.1:1"}`+"\n")
		expect(t, r, "reachable no !\nclock unknown\ncredentials yes\ncreateBucket unknown\nregion unknown"+nothing)
	})
	t.Run("no credentials", func(t *testing.T) {
		g := newGateway(t)
		r := run(t, credentials.Keys{}, g.backend(""))
		expect(t, r, "reachable yes\nclock yes\ncredentials no !\ncreateBucket unknown\nregion unknown"+nothing)
	})
	t.Run("credentials that may make no bucket", func(t *testing.T) {
		g := newGateway(t)
		poor := must(g.AddUser(t.Context(), "poor", ""))(t)
		r := run(t, poor, g.backend(""), "--create-bucket")
		if b := row(t, r, "createBucket"); b.Result != checks.No || !strings.Contains(b.Advice, "--bucket") {
			t.Errorf("%+v", b)
		}
		if r.code != 1 {
			t.Errorf("exit code %d", r.code)
		}
	})
}

func TestNothingIsCreatedUnlessAsked(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	var mu sync.Mutex
	var written []string
	proxy := g.proxy(t)
	server := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			mu.Lock()
			written = append(written, r.Method+" "+r.URL.Path)
			mu.Unlock()
		}
		proxy.ServeHTTP(w, r)
	}))
	backend := fmt.Sprintf("  lab: {endpoint: %q, region: %s%s}\n", server, g.Region(), g.sts("federationToken"))
	r := run(t, g.user, backend)
	if len(written) > 0 {
		t.Errorf("it sent %q", written)
	}
	expect(t, r, `
		reachable yes
		clock yes
		credentials yes
		createBucket unknown
		region unknown
`+untried+`
		callerIdentity yes
		assumeRole unknown
		webIdentity yes
		federationToken yes
		leastSession yes
		sessions unknown
		sessionPolicies unknown
		timeSnapshots unknown`)
	if b := row(t, r, "createBucket"); !strings.Contains(b.Advice, "--bucket") || !strings.Contains(b.Advice, "--create-bucket") {
		t.Errorf("%+v", b)
	}
	// A node has other credentials than the controller, or none, and nothing of it depends on them.
	r = run(t, g.user, backend, "--node", "--state-dir="+t.TempDir(), "--host-dir="+t.TempDir())
	for _, row := range r.Sections[0].Rows {
		if row.Needed && row.Result != checks.Yes {
			t.Errorf("%+v", row)
		}
	}
}

func TestAWorkloadsRole(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	issuer, err := sts.NewIssuer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := issuer.Close(); err != nil {
			t.Error(err)
		}
	})
	const audience = "sts.example"
	if err := g.AddIssuer(t.Context(), issuer.URL(), audience); err != nil {
		t.Fatal(err)
	}
	for _, bucket := range []string{"mine", "others"} {
		if _, err := client(g.Endpoint(), g.Region(), g.Keys()).CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: &bucket}); err != nil {
			t.Fatal(err)
		}
	}
	role := must(g.SetRole(t.Context(), s3server.Role{
		Name: "workload",
		Policy: `{"Version":"2012-10-17","Statement":[
			{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::mine","Condition":{"StringLike":{"s3:prefix":"team/*"}}},
			{"Effect":"Allow","Action":"s3:*Object","Resource":"arn:aws:s3:::mine/team/*"}]}`,
		Trust: s3server.Trust{Issuers: []s3server.TrustedIssuer{{URL: issuer.URL(), Audiences: []string{audience},
			Subjects: []string{"system:serviceaccount:apps:web"}}}},
	}))(t)
	file := func(account string) string {
		token, err := issuer.Token(sts.TokenRequest{Namespace: "apps", ServiceAccount: account, Audiences: []string{audience}})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(token.Value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, tc := range []struct {
		name, account string
		args          []string
		want          checks.Result
	}{
		{"the account that it trusts", "web", nil, checks.Yes},
		{"another account", "db", nil, checks.No},
		{"a prefix that it may list", "web", []string{"--bucket=mine", "--prefix=team/"}, checks.Yes},
		{"another prefix", "web", []string{"--bucket=mine", "--prefix=other/"}, checks.No},
		{"another bucket", "web", []string{"--bucket=others"}, checks.No},
	} {
		t.Run(tc.name, func(t *testing.T) {
			token := file(tc.account)
			r := run(t, credentials.Keys{}, g.backend(g.sts("webIdentity")), append(tc.args, "--role="+role, "--token-file="+token)...)
			if got := row(t, r, "workloadRole"); got.Result != tc.want || !got.Needed {
				t.Errorf("%+v", got)
			}
			secret := must(os.ReadFile(token))(t)
			if text := fmt.Sprintf("%+v%s", r.Report, r.stderr); strings.Contains(text, strings.TrimSpace(string(secret))) {
				t.Errorf("the token is in the output: %s", text)
			}
		})
	}
	t.Run("only the backend that is named sees the token", func(t *testing.T) {
		var seen atomic.Int64
		other := listen(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			seen.Add(1)
			w.WriteHeader(http.StatusForbidden)
		}))
		backends := g.backend(g.sts("webIdentity")) + fmt.Sprintf("  other: {endpoint: %q, sts: {}}\n", other)
		args := []string{"--role=" + role, "--token-file=" + file("web")}
		cmd := command(t, credentials.Keys{}, backends, args...)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "--backend") || seen.Load() > 0 {
			t.Errorf("%v, %d requests to the other backend: %s", err, seen.Load(), out)
		}
		if got := row(t, run(t, credentials.Keys{}, backends, append(args, "--backend=lab")...), "workloadRole"); got.Result != checks.Yes || seen.Load() > 0 {
			t.Errorf("%+v, %d requests to the other backend", got, seen.Load())
		}
	})
}

// A token service that takes any token is a danger wherever it is found, also by a node, which needs no credentials of its own.
func TestANodeReportsATokenServiceThatVerifiesNothing(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	service := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil || r.PostForm.Get("Action") != "AssumeRoleWithWebIdentity" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		fmt.Fprint(w,
			`<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>`+
				`<AccessKeyId>A</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>2100-01-01T00:00:00Z</Expiration>`+
				`</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`)
	}))
	r := run(t, g.user, g.backend(fmt.Sprintf(", sts: {endpoint: %q}", service)), "--node", "--state-dir="+t.TempDir(), "--host-dir="+t.TempDir())
	if got := row(t, r, "webIdentity"); got.Result != checks.No || !got.Needed {
		t.Errorf("%+v", got)
	}
	if got := row(t, r, "objects"); got.Result != checks.Unknown || got.Needed {
		t.Errorf("%+v", got)
	}
}

func TestOnlyTheBackendThatIsNamedIsChecked(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	r := run(t, g.user, g.backend("")+`  dead: {endpoint: "http://127.0.0.1:1"}`+"\n", "--backend=lab", "--create-bucket")
	if len(r.Sections) != 1 || !strings.HasPrefix(r.Sections[0].Name, "backend lab ") || r.code != 0 {
		t.Errorf("%+v, exit code %d", r.Report, r.code)
	}
	r = run(t, g.user, g.backend("")+`  dead: {endpoint: "http://127.0.0.1:1"}`+"\n", "--create-bucket")
	if len(r.Sections) != 2 || r.code != 1 {
		t.Errorf("all that are declared: %d sections, exit code %d", len(r.Sections), r.code)
	}
}

// hold lets requests through to a service, but for the first that writes an object of a check: that waits until no process waits
// for it any more, and is carried out when the check's bucket is about to be deleted.
type hold struct {
	http.Handler
	once    sync.Once
	reached chan struct{} // closed when it waits
	late    chan *http.Request
}

func (h *hold) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/.s3-csi/check/"):
		first := false
		h.once.Do(func() { first = true })
		if first {
			body, _ := io.ReadAll(r.Body)
			late := r.Clone(context.Background())
			late.Body = io.NopCloser(bytes.NewReader(body))
			h.late <- late
			close(h.reached)
			<-r.Context().Done()
			return
		}
	case r.Method == http.MethodDelete && strings.Count(r.URL.Path, "/") == 1:
		select {
		case late := <-h.late:
			h.Handler.ServeHTTP(httptest.NewRecorder(), late)
		default:
		}
	}
	h.Handler.ServeHTTP(w, r)
}

func TestAnInterruptedCheckLeavesNothing(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	h := &hold{Handler: g.proxy(t), reached: make(chan struct{}), late: make(chan *http.Request, 1)}
	server := listen(t, h)
	cmd := command(t, g.user, fmt.Sprintf("  lab: {endpoint: %q, region: %s}\n", server, g.Region()), "--create-bucket")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-h.reached:
	case <-t.Context().Done():
	}
	root := client(g.Endpoint(), g.Region(), g.Keys())
	if all, err := root.ListBuckets(t.Context(), &s3.ListBucketsInput{}); err != nil || len(all.Buckets) != 1 {
		t.Errorf("while it runs there must be its bucket: %+v, %v", all, err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit code %d\n%s", code, out.String())
	}
	if len(h.late) > 0 {
		t.Error("the request that was broken off was not carried out: this test proves nothing")
	}
	nothingLeft(t, root)
}
