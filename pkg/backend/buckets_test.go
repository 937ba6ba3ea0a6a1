package backend

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func ok(http.ResponseWriter, *http.Request) {}

func status(code int, name string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) { refuse(w, r, code, name) }
}

func TestValidateAsksOnceAndRemembersAsLongAsTheOutcomeDeserves(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(http.ResponseWriter, *http.Request)
		keep   time.Duration
		asked  int
		kind   fault.Kind
	}{
		"success":   {ok, successTTL, 1, fault.Unknown},
		"not found": {status(404, "NoSuchBucket"), failureTTL, 2, fault.NotFound},
		"denied":    {status(403, "AccessDenied"), failureTTL, 2, fault.Denied},
	} {
		t.Run(name, func(t *testing.T) {
			f, clients, be := serve(t, c.answer, "")
			now := time.Unix(1_000_000, 0)
			buckets := newTestBuckets(t, clients, func() time.Time { return now })
			ask := func(keys credentials.Keys, want int) {
				t.Helper()
				_, err := buckets.Validate(bounded(t), be, keys, BucketInfo{Name: "b"})
				if fault.KindOf(err) != c.kind || (err == nil) != (c.kind == fault.Unknown) {
					t.Errorf("kind %v: %v", fault.KindOf(err), err)
				}
				if got := len(f.requests()); got != want {
					t.Errorf("%d requests, want %d: %v", got, want, f.requests())
				}
			}
			ask(testKeys, c.asked)
			now = now.Add(c.keep - time.Second)
			ask(testKeys, c.asked)
			now = now.Add(time.Second)
			ask(testKeys, 2*c.asked)
			ask(credentials.Keys{AccessKeyID: "OTHER", SecretAccessKey: "x"}, 3*c.asked)
			buckets.Forget(be, "b")
			ask(testKeys, 4*c.asked)
			buckets.Forget(be, "another")
			ask(testKeys, 4*c.asked)
		})
	}
}

func TestValidateOfACrowdIsOneRequest(t *testing.T) {
	f, clients, be := serve(t, func(http.ResponseWriter, *http.Request) { time.Sleep(100 * time.Millisecond) }, "")
	buckets := newTestBuckets(t, clients, nil)
	var group sync.WaitGroup
	for range 40 {
		group.Go(func() {
			if info, err := buckets.Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"}); err != nil || info.Region != fallbackRegion || info.Name != "b" {
				t.Errorf("got %+v, %v", info, err)
			}
		})
	}
	group.Wait()
	if got := f.requests(); !slices.Equal(got, []string{"HEAD /b"}) {
		t.Errorf("requests: %v", got)
	}
}

func TestValidateLeavesWithItsCallersDeadline(t *testing.T) {
	release := make(chan struct{})
	_, clients, be := serve(t, func(http.ResponseWriter, *http.Request) { <-release }, "")
	defer close(release)
	buckets := newTestBuckets(t, clients, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := buckets.Validate(ctx, be, testKeys, BucketInfo{Name: "b"}); !fault.Is(err, fault.Timeout) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
}

// A region is followed by signature only: the endpoint stays the operator's.
func TestValidateFollowsTheRegionOnceOnEveryKindOfRefusal(t *testing.T) {
	for _, code := range []int{301, 307, 400, 403} {
		f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Amz-Bucket-Region", "eu-west-3")
			if !strings.Contains(r.Header.Get("Authorization"), "/eu-west-3/s3/") {
				w.Header().Set("Location", "http://127.0.0.1:1/elsewhere")
				refuse(w, r, code, "")
			}
		}, "    region: us-west-2\n")
		info, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
		if err != nil || info.Region != "eu-west-3" {
			t.Errorf("%d: %+v, %v", code, info, err)
		}
		if got := f.requests(); len(got) != 2 {
			t.Errorf("%d: requests: %v", code, got)
		}
	}
}

func TestValidateFollowsARegionThatIsNamedInABodyOnly(t *testing.T) {
	f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.Header.Get("Authorization"), "/eu-west-3/s3/") {
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		if r.Method != http.MethodHead {
			say(w, `<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong</Message><Region>eu-west-3</Region></Error>`)
		}
	}, "")
	info, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
	if err != nil || info.Region != "eu-west-3" {
		t.Errorf("got %+v, %v", info, err)
	}
	if got := f.requests(); !slices.Equal(got, []string{"HEAD /b", "GET /b", "HEAD /b"}) {
		t.Errorf("requests: %v", got)
	}
}

func TestValidateDoesNotFollowARegionForEverOrIntoAHostName(t *testing.T) {
	for _, region := range []string{"eu-west-3", "evil.example/", "a b"} {
		f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Amz-Bucket-Region", region)
			refuse(w, r, 301, "PermanentRedirect")
		}, "")
		_, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
		if !fault.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", region, err)
		}
		if got := f.requests(); len(got) > 3 {
			t.Errorf("%s: requests: %v", region, got)
		}
	}
}

func TestValidateKeepsTheRegionThatWorkedOutsideAWS(t *testing.T) {
	_, clients, be := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Amz-Bucket-Region", "WNAM") }, "    region: auto\n")
	info, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
	if err != nil || info.Region != "auto" {
		t.Errorf("got %+v, %v", info, err)
	}
}

func TestValidateGetsTheReasonThatHEADCannotGive(t *testing.T) {
	for name, c := range map[string]struct {
		head, list int
		code       string
		kind       fault.Kind
		text       string
	}{
		"expired token":           {400, 400, "ExpiredToken", fault.Unauthenticated, "expired"},
		"unknown key":             {403, 403, "InvalidAccessKeyId", fault.Unauthenticated, "InvalidAccessKeyId"},
		"clock":                   {403, 403, "RequestTimeTooSkewed", fault.Precondition, "clock"},
		"absent":                  {404, 404, "NoSuchBucket", fault.NotFound, "NoSuchBucket"},
		"absent, but for others":  {404, 403, "AccessDenied", fault.Denied, "AccessDenied"},
		"a web server":            {404, 404, "", fault.Unavailable, "the endpoint is an S3 service"},
		"appeared meanwhile":      {404, 200, "", fault.Busy, "try again"},
		"listing works, HEAD not": {403, 200, "", fault.Denied, "HEAD"},
	} {
		t.Run(name, func(t *testing.T) {
			_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.Method == http.MethodHead:
					refuse(w, r, c.head, "")
				case c.list == 200:
					say(w, emptyListing)
				default:
					refuse(w, r, c.list, c.code)
				}
			}, "")
			_, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
			if !fault.Is(err, c.kind) {
				t.Errorf("kind %v, want %v", fault.KindOf(err), c.kind)
			}
			wantText(t, err, "bucket b", "backend fake (http://127.0.0.1:", c.text)
		})
	}
}

func TestEveryRequestForABucketNamesItsOwner(t *testing.T) {
	for name, c := range map[string]struct{ extra, given, want string }{
		"given":          {"    expectedBucketOwner: '111111111111'\n", "222222222222", "222222222222"},
		"of the backend": {"    expectedBucketOwner: '111111111111'\n", "", "111111111111"},
		"none":           {"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodHead && strings.Contains(r.URL.Path, accessProbe) {
					refuse(w, r, 404, "")
				} else if r.Method == http.MethodGet {
					say(w, emptyListing)
				}
			}, c.extra)
			buckets := newTestBuckets(t, clients, nil)
			info, err := buckets.Validate(bounded(t), be, testKeys, BucketInfo{Name: "b", Owner: c.given})
			if err != nil || info.Owner != c.want {
				t.Fatalf("got %+v, %v", info, err)
			}
			if seen, err := buckets.CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b", Owner: c.given}}); err != nil ||
				seen != info {
				t.Fatalf("got %+v, %v", seen, err)
			}
			if _, err := buckets.Versioning(bounded(t), be, testKeys, info); err != nil {
				t.Fatal(err)
			}
			if _, err := buckets.Retention(bounded(t), be, testKeys, info); err != nil {
				t.Fatal(err)
			}
			client, err := clients.Bucket(bounded(t), be, testKeys, info)
			check(t, err)
			for _, operation := range []string{"GetObject", "PutObject", "ListObjectsV2"} {
				check(t, operations[operation](bounded(t), client))
			}
			if len(f.asked()) < 8 {
				t.Errorf("only %v", f.requests())
			}
			for _, r := range f.asked() {
				if got := r.Header.Get("X-Amz-Expected-Bucket-Owner"); got != c.want {
					t.Errorf("%s %s: owner %q, want %q", r.Method, r.URL, got, c.want)
				}
				if c.want != "" && !strings.Contains(r.Header.Get("Authorization"), "x-amz-expected-bucket-owner") {
					t.Errorf("%s %s: the owner is not signed", r.Method, r.URL)
				}
			}
		})
	}
}

func TestARefusalSaysThatTheOwnerCheckMayBeWhy(t *testing.T) {
	_, clients, be := serve(t, status(403, "AccessDenied"), "    expectedBucketOwner: '111111111111'\n")
	buckets := newTestBuckets(t, clients, nil)
	_, err := buckets.Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
	wantText(t, err, "111111111111", "expectedBucketOwner")
	_, err = buckets.CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b"}})
	wantText(t, err, "111111111111", "expectedBucketOwner")
	if !fault.Is(err, fault.Denied) || IsNotFound(err) {
		t.Errorf("a refusal is not absence: %v", err)
	}
}

func TestFeaturesOfABucket(t *testing.T) {
	for name, c := range map[string]struct {
		answer     func(http.ResponseWriter, *http.Request)
		versioning Versioning
		retention  Retention
		kind       fault.Kind
	}{
		"none": {func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Has("versioning") {
				say(w, `<VersioningConfiguration/>`)
				return
			}
			refuse(w, r, 404, "ObjectLockConfigurationNotFoundError")
		}, Versioning{}, Retention{}, fault.Unknown},
		"not implemented": {status(501, "NotImplemented"), Versioning{}, Retention{}, fault.Unknown},
		"method":          {status(405, "MethodNotAllowed"), Versioning{}, Retention{}, fault.Unknown},
		"all": {func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Has("versioning") {
				say(w, `<VersioningConfiguration><Status>Enabled</Status><MfaDelete>Enabled</MfaDelete></VersioningConfiguration>`)
				return
			}
			say(w, `<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled>`+
				`<Rule><DefaultRetention><Mode>GOVERNANCE</Mode><Days>30</Days></DefaultRetention></Rule></ObjectLockConfiguration>`)
		}, Versioning{Enabled: true, MFADelete: true}, Retention{Enabled: true, Mode: "GOVERNANCE", Days: 30}, fault.Unknown},
		"suspended, lock without default": {func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Has("versioning") {
				say(w, `<VersioningConfiguration><Status>Suspended</Status></VersioningConfiguration>`)
				return
			}
			say(w, `<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled></ObjectLockConfiguration>`)
		}, Versioning{Suspended: true}, Retention{Enabled: true}, fault.Unknown},
		"denied":    {status(403, "AccessDenied"), Versioning{}, Retention{}, fault.Denied},
		"no bucket": {status(404, "NoSuchBucket"), Versioning{}, Retention{}, fault.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			f, clients, be := serve(t, c.answer, "")
			buckets := newTestBuckets(t, clients, nil)
			info := BucketInfo{Name: "b", Region: "us-east-1"}
			for range 2 {
				v, err := buckets.Versioning(bounded(t), be, testKeys, info)
				if v != c.versioning || fault.KindOf(err) != c.kind {
					t.Errorf("versioning %+v, %v", v, err)
				}
				r, err := buckets.Retention(bounded(t), be, testKeys, info)
				if r != c.retention || fault.KindOf(err) != c.kind {
					t.Errorf("retention %+v, %v", r, err)
				}
			}
			if got := f.requests(); len(got) != 2 {
				t.Errorf("requests: %v", got)
			}
			// Directory buckets have neither, and are not asked.
			info.Name = "b--use1-az4--x-s3"
			if v, err := buckets.Versioning(bounded(t), be, testKeys, info); err != nil || v != (Versioning{}) || len(f.requests()) != 2 {
				t.Errorf("a directory bucket: %+v, %v, %v", v, err, f.requests())
			}
		})
	}
}
