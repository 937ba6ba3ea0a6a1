package backend

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/middleware"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestBackendsDoNotSeeTheEnvironmentsEndpoint(t *testing.T) {
	f, clients, be := serve(t, ok, "")
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the environment's endpoint was asked: %s %s", r.Method, r.URL)
	}))
	defer other.Close()
	t.Setenv("AWS_ENDPOINT_URL", other.URL)
	t.Setenv("AWS_ENDPOINT_URL_S3", other.URL)
	t.Setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
	for _, keys := range []credentials.Keys{testKeys, {}} {
		client, err := clients.S3(bounded(t), be, keys, "")
		check(t, err)
		check(t, operations["HeadBucket"](bounded(t), client))
	}
	if len(f.asked()) != 2 || !strings.Contains(f.asked()[1].Header.Get("Authorization"), "Credential=ENVKEY/") {
		t.Errorf("requests: %v", f.requests())
	}

	// Neither does AWS, when the config came to be without one.
	cfg, err := DefaultConfig("eu-west-1", "")
	check(t, err)
	amazon := &fakeS3{answer: ok}
	clients, be = newTestClients(t, cfg, "default", withTransport(amazon))
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	check(t, operations["HeadBucket"](bounded(t), client))
	if host := amazon.asked()[0].URL.Host; host != "bucket.s3.eu-west-1.amazonaws.com" {
		t.Errorf("asked %s", host)
	}
}

func TestClientsTrustTheBackendsCAFileForThatBackendOnly(t *testing.T) {
	hermetic(t)
	server := httptest.NewTLSServer(http.HandlerFunc(ok))
	defer server.Close()
	ca, file := filepath.Join(t.TempDir(), "ca.pem"), filepath.Join(t.TempDir(), "config.yaml")
	check(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600))
	text := "backends:\n  with: {endpoint: '" + server.URL + "', caFile: '" + ca + "'}\n  without: {endpoint: '" + server.URL + "'}\n"
	check(t, os.WriteFile(file, []byte(text), 0o600))
	cfg, err := LoadConfig(file, "", "")
	check(t, err)
	for name, works := range map[string]bool{"with": true, "without": false} {
		clients, be := newTestClients(t, cfg, name)
		_, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
		if (err == nil) != works {
			t.Errorf("%s: %v", name, err)
		}
		if !works {
			wantText(t, err, "caFile")
		}
	}
}

// The config file and its files are one state. A CA file that is replaced or removed later counts with the next reload.
func TestClientsUseTheFilesThatTheConfigRead(t *testing.T) {
	hermetic(t)
	server := httptest.NewTLSServer(http.HandlerFunc(ok))
	defer server.Close()
	dir := t.TempDir()
	ca, config := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "config.yaml")
	for path, content := range map[string][]byte{
		ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), config: []byte("backends:\n  own: {endpoint: '" + server.URL +
			"', caFile: '" + ca + "'}\n"),
	} {
		check(t, os.WriteFile(path, content, 0o600))
	}
	cfg, err := LoadConfig(config, "", "")
	check(t, err)
	check(t, os.Remove(ca))
	clients, be := newTestClients(t, cfg, "own")
	if _, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"}); err != nil {
		t.Error(err)
	}
}

func TestRequestsCarryTheUserAgentAndPassTheMiddleware(t *testing.T) {
	var counted atomic.Int32
	f, clients, be := serve(t, ok, "", WithVersion("1.2.3"), WithMiddleware(func(s *middleware.Stack) error {
		return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("count", func(ctx context.Context, in middleware.DeserializeInput,
			next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
			counted.Add(1)
			return next.HandleDeserialize(ctx, in)
		}), middleware.After)
	}))
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	for range 2 {
		check(t, operations["PutObject"](bounded(t), client))
	}
	if counted.Load() != 2 {
		t.Errorf("%d requests counted", counted.Load())
	}
	r := f.asked()[0]
	if got := r.Header.Get("User-Agent"); !strings.Contains(got, "s3-csi-driver/1.2.3") {
		t.Errorf("user agent %q", got)
	}
	for name := range r.Header {
		if strings.HasPrefix(strings.ToLower(name), "x-amz-checksum") || strings.EqualFold(name, "x-amz-trailer") {
			t.Errorf("an unexpected checksum: %s", name)
		}
	}
}

func TestAddressingPutsTheBucketIntoPathOrHost(t *testing.T) {
	hermetic(t)
	cfg, err := ParseConfig([]byte("backends:\n  p: {endpoint: 'http://s3.test'}\n  v: {endpoint: 'http://s3.test', addressing: virtual}\n  default: "+
		"{addressing: path}\n"), "", "")
	check(t, err)
	for name, want := range map[string]string{"p": "http://s3.test/bucket", "v": "http://bucket.s3.test/",
		"default": "https://s3.us-east-1.amazonaws.com/bucket"} {
		f := &fakeS3{answer: ok}
		clients, be := newTestClients(t, cfg, name, withTransport(f))
		client, err := clients.S3(bounded(t), be, testKeys, "")
		check(t, err)
		check(t, operations["HeadBucket"](bounded(t), client))
		if got := f.asked()[0].URL.String(); got != want {
			t.Errorf("%s: asked %s, want %s", name, got, want)
		}
	}
}

func TestAFailingServiceIsAskedAFewTimesOnly(t *testing.T) {
	f, clients, be := serve(t, status(503, "SlowDown"), "")
	_, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("got %v", err)
	}
	if got := len(f.requests()); got != maxAttempts {
		t.Errorf("%d requests", got)
	}
}

func TestUnknownBackendGetsNoClient(t *testing.T) {
	_, clients, _ := serve(t, ok, "")
	if _, err := clients.S3(bounded(t), Backend{Name: "gone", Endpoint: "http://127.0.0.1:1"}, testKeys, ""); !fault.Is(err, fault.Precondition) {
		t.Errorf("got %v", err)
	}
}

func TestDriverKeysAreThoseOfTheChainWithTheirEnd(t *testing.T) {
	_, clients, _ := serve(t, ok, "")
	_, err := clients.DriverKeys(bounded(t))
	if !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("no credentials: kind %v: %v", fault.KindOf(err), err)
	}
	wantText(t, err, "AWS_ACCESS_KEY_ID", "controllerCredentials")

	_, clients, _ = serve(t, ok, "")
	t.Setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
	t.Setenv("AWS_SESSION_TOKEN", "env-token")
	if got, err := clients.DriverKeys(bounded(t)); err != nil || got != (credentials.Keys{AccessKeyID: "ENVKEY", SecretAccessKey: "env-secret",
		SessionToken: "env-token"}) {
		t.Errorf("got %v, %v", got, err)
	}

	end := time.Now().Add(time.Hour)
	_, clients, _ = serve(t, ok, "", WithCredentials(aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
		return aws.Credentials{AccessKeyID: "A", SecretAccessKey: "B", CanExpire: true, Expires: end}, nil
	})))
	if got, err := clients.DriverKeys(bounded(t)); err != nil || !got.Expires.Equal(end) {
		t.Errorf("got %v that end %v, %v", got, got.Expires, err)
	}
}

func TestAbsentCredentialsAreAClearErrorOfEveryRequest(t *testing.T) {
	f, clients, be := serve(t, ok, "")
	_, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, credentials.Keys{}, BucketInfo{Name: "b"})
	if !fault.Is(err, fault.Unauthenticated) || len(f.requests()) != 0 {
		t.Errorf("kind %v, requests %v: %v", fault.KindOf(err), f.requests(), err)
	}
	wantText(t, err, "no AWS credentials of its own", "secret")

	release := make(chan struct{})
	defer close(release)
	_, clients, _ = serve(t, ok, "", WithCredentials(aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
		<-release
		return aws.Credentials{}, errors.New("too late")
	})))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := clients.DriverKeys(ctx); !fault.Is(err, fault.Timeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestAClientWithASourceAsksItForEachRequest(t *testing.T) {
	hermetic(t)
	fake, clients, be := serve(t, func(http.ResponseWriter, *http.Request) {}, "")
	asked := 0
	var refused error
	client, err := clients.BucketWith(t.Context(), be, func(context.Context) (credentials.Keys, error) {
		asked++
		return credentials.Keys{AccessKeyID: fmt.Sprintf("KEY%d", asked), SecretAccessKey: "s", SessionToken: "t"}, refused
	}, BucketInfo{Name: "b", Region: "us-east-1"})
	check(t, err)
	head := func() error {
		_, err := client.HeadBucket(bounded(t), &s3.HeadBucketInput{Bucket: aws.String("b")})
		return err
	}
	for range 2 {
		check(t, head())
	}
	for i, r := range fake.asked() {
		if want := fmt.Sprintf("Credential=KEY%d/", i+1); !strings.Contains(r.Header.Get("Authorization"), want) || r.Header.Get("X-Amz-Security-Token") != "t" {
			t.Errorf("request %d is not signed with %s: %v", i, want, r.Header)
		}
	}
	refused = fault.Errorf(fault.Denied, "no session for you")
	if err := Classify(head(), "looking"); !fault.Is(err, fault.Denied) || len(fake.asked()) != 2 {
		t.Errorf("%v, after %d requests", err, len(fake.asked()))
	}
}
