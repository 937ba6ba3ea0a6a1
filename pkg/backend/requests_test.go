package backend

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func optionsOf(t *testing.T, flags ...string) []volume.Option {
	t.Helper()
	options, err := volume.ParseMountOptions(flags, "options")
	check(t, err)
	return options
}

// demanding refuses requests that lack a header, as bucket policies and Requester Pays buckets do.
func demanding(header, value string, of func(*http.Request) bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if of(r) && r.Header.Get(header) != value {
			refuse(w, r, http.StatusForbidden, "AccessDenied")
			return
		}
		if r.Method == http.MethodHead && r.URL.Path != "/b" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		say(w, emptyListing)
	}
}

func TestRequests_RequesterPaysIsInEachRequest(t *testing.T) {
	all := func(*http.Request) bool { return true }
	for name, c := range map[string]struct {
		extra   string
		options []string
		works   bool
	}{
		"nothing":             {"", nil, false},
		"volume":              {"", []string{"requester-pays"}, true},
		"backend":             {"    requesterPays: true\n", nil, true},
		"backend, not volume": {"    requesterPays: true\n", []string{"requester-pays=false"}, false},
	} {
		_, clients, be := serve(t, demanding("X-Amz-Request-Payer", "requester", all), c.extra)
		be = be.For(optionsOf(t, c.options...))
		b := newTestBuckets(t, clients, nil)
		_, access := b.CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b", Region: "us-east-1"}})
		_, valid := b.Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
		if (access == nil) != c.works || (valid == nil) != c.works {
			t.Errorf("%s: %v, %v", name, access, valid)
		}
	}
	// What one volume may does not count for another.
	f, clients, be := serve(t, demanding("X-Amz-Request-Payer", "requester", all), "")
	b := newTestBuckets(t, clients, nil)
	if _, err := b.Validate(bounded(t), be.For(optionsOf(t, "requester-pays")), testKeys, BucketInfo{Name: "b"}); err != nil {
		t.Error(err)
	}
	if _, err := b.Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"}); !fault.Is(err, fault.Denied) {
		t.Errorf("without the option: %v, after %v", err, f.requests())
	}
}

func TestRequests_EncryptionIsInEachRequestThatStores(t *testing.T) {
	const kms = "arn:aws:kms:eu-west-1:111122223333:key/a"
	for name, c := range map[string]struct {
		extra, algorithm, key string
		options               []string
	}{
		"none":               {"", "", "", nil},
		"backend":            {"    sse: {algorithm: AES256}\n", "AES256", "", nil},
		"backend with a key": {"    sse: {algorithm: 'aws:kms', kmsKeyID: '" + kms + "'}\n", "aws:kms", kms, nil},
		"volume":             {"", "aws:kms:dsse", kms, []string{"sse-kms-key-id=" + kms, "sse=aws:kms:dsse"}},
		"volume's wins":      {"    sse: {algorithm: 'aws:kms', kmsKeyID: '" + kms + "'}\n", "AES256", "", []string{"sse=AES256"}},
	} {
		f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Query().Has("uploads"):
				say(w, "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
			case r.Header.Get("X-Amz-Copy-Source") != "":
				say(w, "<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")
			}
		}, c.extra)
		client, err := clients.Bucket(bounded(t), be.For(optionsOf(t, c.options...)), testKeys, BucketInfo{Name: "b", Region: "us-east-1"})
		check(t, err)
		for name, send := range map[string]func(context.Context) error{
			"put": func(ctx context.Context) error {
				_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: new("b"), Key: new("k"), Body: strings.NewReader("x")})
				return err
			},
			"copy": func(ctx context.Context) error {
				_, err := client.CopyObject(ctx, &s3.CopyObjectInput{Bucket: new("b"), Key: new("k"), CopySource: new("b/x")})
				return err
			},
			"create upload": func(ctx context.Context) error {
				_, err := client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: new("b"), Key: new("k")})
				return err
			},
			"head": func(ctx context.Context) error {
				_, err := client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: new("b"), Key: new("k")})
				return err
			},
		} {
			if err := send(bounded(t)); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		for _, r := range f.asked() {
			algorithm, key := r.Header.Get("X-Amz-Server-Side-Encryption"), r.Header.Get("X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id")
			if r.Method == http.MethodHead && algorithm+key != "" || r.Method != http.MethodHead && (algorithm != c.algorithm || key != c.key) {
				t.Errorf("%s: %s %s has %q, %q", name, r.Method, r.URL, algorithm, key)
			}
			if algorithm != "" && !strings.Contains(r.Header.Get("Authorization"), "x-amz-server-side-encryption") {
				t.Errorf("%s: the header is not signed", name)
			}
		}
	}
}

func TestRequests_ClientsGetTheBackendsSettings(t *testing.T) {
	for name, c := range map[string]struct {
		extra   string
		client  string
		options []string
		want    string
		kind    fault.Kind
	}{
		"nothing": {"", "rclone", []string{"sse=AES256"}, "sse=AES256", fault.Unknown},
		"encryption": {"sse: {algorithm: AES256}, requesterPays: true", "mountpoint-s3", []string{"debug"}, "debug requester-pays sse=AES256",
			fault.Unknown},
		"volume's own": {"sse: {algorithm: 'aws:kms', kmsKeyID: 'arn:aws:kms:eu-west-1:111122223333:key/a'}", "rclone", []string{"sse=AES256"},
			"sse=AES256", fault.Unknown},
		"unknown to the client":  {"sse: {algorithm: 'aws:kms:dsse'}", "rclone", nil, "sse=aws:kms:dsse", fault.Precondition},
		"requests are not paid":  {"requesterPays: true", "rclone", nil, "requester-pays", fault.Precondition},
		"dual stack":             {"dualStack: true", "mountpoint-s3", []string{"dual-stack"}, "", fault.Unknown},
		"not dual stack":         {"dualStack: true", "mountpoint-s3", []string{"dual-stack=false"}, "", fault.Precondition},
		"FIPS, not dual stack":   {"fips: true", "mountpoint-s3", []string{"dual-stack"}, "dual-stack", fault.Precondition},
		"FIPS, not accelerated":  {"fips: true", "mountpoint-s3", []string{"transfer-acceleration"}, "transfer-acceleration", fault.Precondition},
		"FIPS, no acceleration":  {"fips: true", "mountpoint-s3", []string{"transfer-acceleration=false"}, "transfer-acceleration=false", fault.Unknown},
		"dual stack of a volume": {"", "mountpoint-s3", []string{"dual-stack"}, "dual-stack", fault.Unknown},
	} {
		cfg, err := ParseConfig([]byte("backends:\n  default: {"+c.extra+"}\n"), "", "")
		check(t, err)
		be, err := cfg.Backend("default")
		check(t, err)
		cl, err := client.Get(c.client)
		check(t, err)
		options := optionsOf(t, c.options...)
		var got []string
		for _, o := range be.ClientOptions(options) {
			got = append(got, o.String())
		}
		if err := be.CheckClient(cl, "b", options); strings.Join(got, " ") != c.want || fault.KindOf(err) != c.kind {
			t.Errorf("%s: options %v, kind %v: %v", name, got, fault.KindOf(err), err)
		}
	}
}

func TestEndpoints_OfAWSAreTheSameForDriverAndClients(t *testing.T) {
	hermetic(t)
	// The driver's environment does not reach clients, so it decides nothing.
	t.Setenv("AWS_USE_FIPS_ENDPOINT", "true")
	t.Setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
	for extra, want := range map[string][3]string{
		"":                {"s3.eu-west-1.amazonaws.com", "sts.eu-west-1.amazonaws.com", ""},
		"dualStack: true": {"s3.dualstack.eu-west-1.amazonaws.com", "sts.eu-west-1.api.aws", "https://s3.dualstack.eu-west-1.amazonaws.com"},
		"fips: true":      {"s3-fips.eu-west-1.amazonaws.com", "sts-fips.eu-west-1.amazonaws.com", "https://s3-fips.eu-west-1.amazonaws.com"},
		"dualStack: true, fips: true": {"s3-fips.dualstack.eu-west-1.amazonaws.com", "sts-fips.eu-west-1.api.aws",
			"https://s3-fips.dualstack.eu-west-1.amazonaws.com"},
	} {
		cfg, err := ParseConfig([]byte("backends:\n  default: {"+extra+"}\n"), "eu-west-1", "")
		check(t, err)
		f := &fakeS3{answer: ok}
		clients, be := newTestClients(t, cfg, "default", withTransport(f))
		if _, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "bucket", Owner: "111122223333"}); err != nil {
			t.Fatal(err)
		}
		if host := f.asked()[0].URL.Host; host != "bucket."+want[0] {
			t.Errorf("%s: S3 is %s", extra, host)
		}
		if s, err := clients.STSService(bounded(t), be); err != nil || s.FIPS != be.FIPS || s.DualStack != be.DualStack {
			t.Errorf("%s: helpers get %+v, %v", extra, s, err)
		}
		sender, err := clients.STS(bounded(t), be, testKeys)
		check(t, err)
		_, _ = sender.GetCallerIdentity(bounded(t), nil)
		if all := f.asked(); all[len(all)-1].URL.Host != want[1] {
			t.Errorf("%s: STS is %s", extra, all[len(all)-1].URL.Host)
		}
		if got, err := be.ClientEndpoint(bounded(t), "eu-west-1"); err != nil || got != want[2] {
			t.Errorf("%s: clients get %s, %v", extra, got, err)
		}
	}
}

func TestBucketNames_AreTheBackends(t *testing.T) {
	cfg, err := ParseConfig([]byte("backends:\n  strict: {endpoint: 'https://s3.example'}\n  relaxed: {endpoint: 'https://s3.example', bucketNames: relaxed, "+
		"volumeBuckets: [My_bucket]}\n"), "", "")
	check(t, err)
	for backend, works := range map[string]bool{"default": false, "strict": false, "relaxed": true} {
		be, err := cfg.Backend(backend)
		check(t, err)
		for _, name := range []string{"my_bucket", "Data", "my-an", "xn--x", "sthree-x"} {
			if err := be.CheckBucketName(name); (err == nil) != works || err != nil && !fault.Is(err, fault.Invalid) {
				t.Errorf("%s, %s: %v", backend, name, err)
			}
		}
		if err := be.CheckBucketName("a/b"); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", backend, err)
		}
	}
}

func TestConfig_RefusesSettingsOfRequestsThatCannotWork(t *testing.T) {
	for extra, place := range map[string]string{
		"sse: {algorithm: aes}":                                "sse.algorithm",
		"sse: {}":                                              "sse.algorithm",
		"sse: {algorithm: AES256, kmsKeyID: k}":                "sse.kmsKeyID",
		"sse: {algorithm: 'aws:kms', kmsKeyID: 'a b'}":         "sse.kmsKeyID",
		"endpoint: 'https://s3.example', dualStack: true":      "endpoint",
		"endpoint: 'https://s3.example', fips: true":           "endpoint",
		"bucketNames: relaxed":                                 "bucketNames",
		"endpoint: 'https://s3.example', bucketNames: any":     "bucketNames",
		"endpoint: 'https://s3.example', sse: {algorithm: ''}": "sse.algorithm",
	} {
		_, err := ParseConfig([]byte("backends:\n  x: {"+extra+"}\n"), "", "")
		if !fault.Is(err, fault.Invalid) || !slices.Contains(strings.Fields(err.Error()), "backends.x."+place+":") {
			t.Errorf("%s: %v", extra, err)
		}
	}
}
