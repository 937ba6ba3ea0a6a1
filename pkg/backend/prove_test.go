package backend

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// enforcing answers as a service does that keeps a session to what allowed says.
func enforcing(allowed func(r *http.Request) bool) func(w http.ResponseWriter, r *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !allowed(r):
			refuse(w, r, http.StatusForbidden, "AccessDenied")
		case r.Method == http.MethodHead:
			w.WriteHeader(http.StatusNotFound)
		default:
			say(w, emptyListing)
		}
	}
}

var testSession = credentials.Keys{AccessKeyID: "ASIATEST", SecretAccessKey: "very-secret-value", SessionToken: "t"}

func TestASessionThatIsKeptToItsScopeIsProvenOnce(t *testing.T) {
	f, clients, be := serve(t, enforcing(func(*http.Request) bool { return false }), "")
	now := time.Now()
	b := newTestBuckets(t, clients, func() time.Time { return now })
	prove := func(class, bucket, prefix string) {
		t.Helper()
		check(t, b.ProveScope(bounded(t), be, Access{Keys: testSession, Class: class, Prefix: prefix,
			Bucket: BucketInfo{Name: bucket, Region: "us-east-1", Owner: "111122223333"}}))
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { prove("c", "b", "vol-1/") })
	}
	wg.Wait()
	asked := f.asked()
	if len(asked) != 3 {
		t.Fatalf("asked %v", f.requests())
	}
	seen := map[string]bool{}
	for _, r := range asked {
		if r.Header.Get("X-Amz-Expected-Bucket-Owner") != "111122223333" || r.Header.Get("X-Amz-Security-Token") != "t" {
			t.Errorf("%s %s without the owner or the session: %v", r.Method, r.URL, r.Header)
		}
		if r.Method != http.MethodHead {
			seen["list "+r.URL.Query().Get("prefix")] = true
		} else if strings.HasPrefix(r.URL.Path, "/b/s3-csi-access-check-") {
			seen["head"] = true
		}
	}
	if !seen["list "] || !seen["list vol-1-s3-csi-scope-check/"] || !seen["head"] {
		t.Errorf("asked %v", seen)
	}
	prove("c", "b", "vol-2/") // the same for all prefixes
	if n := len(f.asked()); n != 3 {
		t.Errorf("asked %d times for another prefix", n-3)
	}
	prove("other", "b", "vol-1/")
	prove("c", "b2", "vol-1/")
	prove("c", "b", "")
	if n := len(f.asked()); n != 3+3+3+2 {
		t.Errorf("asked %d times for another identity, another bucket and a whole bucket", n-3)
	}
	for _, r := range f.asked()[9:] {
		if r.Method == http.MethodHead && !strings.HasPrefix(r.URL.Path, "/b/.s3-csi/") || r.Method != http.MethodHead && r.URL.Query().Get("prefix") != ".s3-csi/" {
			t.Errorf("asked for a whole bucket: %s %s", r.Method, r.URL)
		}
	}
	now = now.Add(proofTTL)
	prove("c", "b", "vol-1/")
	b.Forget(be, "b")
	prove("c", "b", "vol-1/")
	if n := len(f.asked()); n != 11+3+3 {
		t.Errorf("asked %d times after an hour, and after the bucket was forgotten", n-11)
	}
}

func TestASessionThatCanDoMoreIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		prefix  string
		allowed func(r *http.Request) bool
		part    string
	}{
		"everything":             {"vol-1/", func(*http.Request) bool { return true }, "list"},
		"the root can be listed": {"vol-1/", func(r *http.Request) bool { return r.Method != http.MethodHead && r.URL.Query().Get("prefix") == "" }, "list b/"},
		"a neighbour can":        {"vol-1/", func(r *http.Request) bool { return strings.HasPrefix(r.URL.Query().Get("prefix"), "vol-1") }, "list b/vol-1-"},
		"objects can be seen":    {"vol-1/", func(r *http.Request) bool { return r.Method == http.MethodHead }, "read metadata of objects"},
		"records can be listed":  {"", func(r *http.Request) bool { return r.Method != http.MethodHead }, ".s3-csi/"},
		"records can be read":    {"", func(r *http.Request) bool { return r.Method == http.MethodHead }, ".s3-csi/"},
	} {
		t.Run(name, func(t *testing.T) {
			_, clients, be := serve(t, enforcing(c.allowed), "")
			err := newTestBuckets(t, clients, nil).ProveScope(bounded(t), be, Access{Keys: testSession, Class: "c", Prefix: c.prefix, Bucket: BucketInfo{Name: "b"}})
			if !fault.Is(err, fault.Precondition) {
				t.Fatalf("got %v", err)
			}
			wantText(t, err, "does not enforce session policies", "backend fake", c.part, "scope: off")
		})
	}
}

func TestWhatIsNoRefusalOfTheSessionProvesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		code   string
		kind   fault.Kind
	}{
		"unknown keys":   {http.StatusForbidden, "InvalidAccessKeyId", fault.Unauthenticated},
		"an old session": {http.StatusBadRequest, "ExpiredToken", fault.Unauthenticated},
		"a broken one":   {http.StatusInternalServerError, "InternalError", fault.Unavailable},
		"no bucket":      {http.StatusNotFound, "NoSuchBucket", fault.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodHead {
					refuse(w, r, http.StatusForbidden, "")
					return
				}
				refuse(w, r, c.status, c.code)
			}, "")
			b := newTestBuckets(t, clients, nil)
			if err := b.ProveScope(bounded(t), be, Access{Keys: testSession, Class: "c", Prefix: "p/", Bucket: BucketInfo{Name: "b"}}); fault.KindOf(err) != c.kind ||
				err == nil {
				t.Errorf("got %v of kind %v", err, fault.KindOf(err))
			}
		})
	}
}

func TestADirectoryBucketHasNothingToProve(t *testing.T) {
	hermetic(t)
	f := &fakeS3{answer: enforcing(func(*http.Request) bool { return true })}
	cfg, err := DefaultConfig("", "")
	check(t, err)
	clients, be := newTestClients(t, cfg, "default", withTransport(f))
	check(t, newTestBuckets(t, clients, nil).ProveScope(bounded(t), be, Access{Keys: testSession, Class: "c", Bucket: BucketInfo{Name: "b--use1-az4--x-s3"}}))
	if len(f.asked()) != 0 {
		t.Errorf("asked %v", f.requests())
	}
}

func TestTheAccountOfASessionIsNotAskedForAgain(t *testing.T) {
	hermetic(t)
	f := &fakeS3{answer: func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		say(w, emptyListing)
	}}
	cfg, err := DefaultConfig("eu-west-1", "")
	check(t, err)
	clients, be := newTestClients(t, cfg, "default", withTransport(f))
	keys := testSession
	keys.Account = "111122223333"
	info, err := newTestBuckets(t, clients, nil).CheckAccess(bounded(t), be, Access{Keys: keys, Prefix: "p/", Bucket: BucketInfo{Name: "b"}})
	check(t, err)
	if info.Owner != "111122223333" {
		t.Errorf("the owner is %q", info.Owner)
	}
	for _, r := range f.asked() {
		if strings.HasPrefix(r.URL.Host, "sts.") || strings.HasPrefix(r.Host, "sts.") {
			t.Errorf("STS was asked: %s %s", r.Method, r.URL)
		}
	}
}

func TestSTSService_HasTheSettingsOfTheBackend(t *testing.T) {
	hermetic(t)
	cfg, err := ParseConfig([]byte("backends: {default: {region: eu-west-1, fips: true, dualStack: true, sts: {region: eu-west-2}}, minio: {endpoint: "+
		"'http://minio:1'}, far: {endpoint: 'http://s3:1', sts: {endpoint: 'http://sts:1'}}}"), "", "")
	check(t, err)
	at := map[string]string{"default": "https://sts-fips.eu-west-2.api.aws", "minio": "http://minio:1", "far": "http://sts:1"}
	for name, want := range map[string]credentials.STSService{
		"default": {Region: "eu-west-2", FIPS: true, DualStack: true},
		"minio":   {Endpoint: "http://minio:1", Region: "us-east-1"},
		"far":     {Endpoint: "http://sts:1", Region: "us-east-1"},
	} {
		clients, be := newTestClients(t, cfg, name)
		asked := ""
		clients.proxy = func(r *http.Request) (*url.URL, error) {
			asked = r.URL.String()
			return nil, nil
		}
		got, err := clients.STSService(bounded(t), be)
		check(t, err)
		if got != want || asked != at[name] {
			t.Errorf("%s: %+v at %s, want %+v", name, got, asked, want)
		}
		clients.proxy = func(*http.Request) (*url.URL, error) { return url.Parse("http://user:canary@proxy:3128") }
		got, err = clients.STSService(bounded(t), be)
		check(t, err)
		if got.Proxy != "http://user:canary@proxy:3128" || !slices.Contains(credentials.Order{STS: got}.Secrets(), "canary") {
			t.Errorf("%s: the proxy is %q", name, got.Proxy)
		}
	}
}
