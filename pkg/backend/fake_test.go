package backend

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testKeys = credentials.Keys{AccessKeyID: "AKIDTEST", SecretAccessKey: "very-secret-value"}

// fakeS3 answers as a test says and remembers what it was asked.
type fakeS3 struct {
	mu     sync.Mutex
	answer func(w http.ResponseWriter, r *http.Request)
	seen   []*http.Request
}

func (f *fakeS3) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.seen = append(f.seen, r)
	answer := f.answer
	f.mu.Unlock()
	answer(w, r)
}

// RoundTrip lets the fake stand in for AWS.
func (f *fakeS3) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	seen := r.Clone(r.Context())
	seen.Host = r.URL.Host
	f.ServeHTTP(w, seen)
	resp := w.Result()
	resp.Request = r
	return resp, nil
}

// asked is what came so far. A request that was given up by its client may still come.
func (f *fakeS3) asked() []*http.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.seen)
}

func (f *fakeS3) requests() []string {
	var all []string
	for _, r := range f.asked() {
		all = append(all, r.Method+" "+r.URL.Path)
	}
	return all
}

// say writes an answer's body. A client that left is no error of the test.
func say(w http.ResponseWriter, format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }

// refuse answers as S3 does: with a body, except to HEAD.
func refuse(w http.ResponseWriter, r *http.Request, status int, code string) {
	w.Header().Set("X-Amz-Request-Id", "REQ1")
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		say(w, `<?xml version="1.0"?><Error><Code>%s</Code><Message>%s, says the service</Message><RequestId>REQ1</RequestId></Error>`, code, code)
	}
}

const emptyListing = `<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>`

// hermetic keeps the tests' machine out.
func hermetic(t *testing.T) {
	t.Helper()
	for _, name := range []string{"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID",
		"AWS_SECRET_ACCESS_KEY",
		"AWS_SESSION_TOKEN", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
}

// serve starts a fake service and a config with it as the backend "fake". extra are more settings of it, as YAML.
func serve(t *testing.T, answer func(w http.ResponseWriter, r *http.Request), extra string, opts ...Option) (*fakeS3, *Clients, Backend) {
	t.Helper()
	hermetic(t)
	f := &fakeS3{answer: answer}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	cfg, err := ParseConfig([]byte("backends:\n  fake:\n    endpoint: "+server.URL+"\n"+extra), "", "")
	check(t, err)
	clients, be := newTestClients(t, cfg, "fake", opts...)
	return f, clients, be
}

func newTestClients(t *testing.T, cfg *Config, name string, opts ...Option) (*Clients, Backend) {
	t.Helper()
	clients, err := NewClients(cfg, append(opts, withoutWaiting())...)
	check(t, err)
	t.Cleanup(clients.Close)
	be, err := cfg.Backend(name)
	check(t, err)
	return clients, be
}

func newTestBuckets(t *testing.T, clients *Clients, now func() time.Time) *Buckets {
	t.Helper()
	b, err := NewBuckets(clients, now)
	check(t, err)
	return b
}

// bounded is a context that ends a test that hangs.
func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func wantText(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
	if strings.Contains(err.Error(), testKeys.SecretAccessKey) {
		t.Errorf("error holds the secret: %v", err)
	}
}

// withTransport sends all requests through rt, for tests.
func withTransport(rt http.RoundTripper) Option { return func(c *Clients) { c.transport = rt } }

// withoutWaiting retries without backoff.
func withoutWaiting() Option { return func(c *Clients) { c.backoff = time.Millisecond } }

// withSilence shortens how long a connection may receive nothing, for tests.
func withSilence(limit time.Duration) Option { return func(c *Clients) { c.silence = limit } }
