package backend

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func identityAnswer(w http.ResponseWriter, account string) {
	say(w, `<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>`+
		`<Account>%s</Account></GetCallerIdentityResult></GetCallerIdentityResponse>`, account)
}

func stsRefusal(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	say(w, `<ErrorResponse><Error><Code>%s</Code><Message>no</Message></Error></ErrorResponse>`, code)
}

func TestOnAWSTheOwnerIsTheCallersAccountAndTheRegionIsFollowed(t *testing.T) {
	hermetic(t)
	cfg, err := DefaultConfig("", "")
	check(t, err)
	f := &fakeS3{answer: func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.Host, "sts."):
			identityAnswer(w, "111111111111")
		case r.Host == "bucket.s3.eu-central-1.amazonaws.com":
			w.Header().Set("X-Amz-Bucket-Region", "eu-central-1")
		default:
			w.Header().Set("X-Amz-Bucket-Region", "eu-central-1")
			refuse(w, r, 301, "PermanentRedirect")
		}
	}}
	clients, be := newTestClients(t, cfg, "default", withTransport(f))
	now := time.Unix(1_000_000, 0)
	buckets := newTestBuckets(t, clients, func() time.Time { return now })
	want := BucketInfo{Name: "bucket", Region: "eu-central-1", Owner: "111111111111"}
	if info, err := buckets.Validate(bounded(t), be, testKeys, BucketInfo{Name: "bucket"}); err != nil || info != want {
		t.Fatalf("got %+v, %v", info, err)
	}
	var hosts []string
	for _, r := range f.asked() {
		hosts = append(hosts, r.URL.Host)
	}
	if got := strings.Join(hosts, " "); got != "sts.us-east-1.amazonaws.com bucket.s3.us-east-1.amazonaws.com bucket.s3.eu-central-1.amazonaws.com" {
		t.Errorf("asked %s", got)
	}
	// The account is remembered longer than the bucket.
	now = now.Add(successTTL)
	if _, err := buckets.Validate(bounded(t), be, testKeys, BucketInfo{Name: "bucket"}); err != nil || len(f.asked()) != 5 {
		t.Errorf("%d requests, %v", len(f.asked()), err)
	}
}

func TestAnSTSThatGivesNoAccount(t *testing.T) {
	answer := func(f func(http.ResponseWriter)) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				f(w)
			}
		}
	}
	for name, c := range map[string]struct {
		answer   func(http.ResponseWriter)
		declared fault.Kind // with sts in the config
		aws      fault.Kind // on AWS, with nothing in the config
	}{
		"refused":      {func(w http.ResponseWriter) { stsRefusal(w, 403, "AccessDenied") }, fault.Unknown, fault.Unknown},
		"not known":    {func(w http.ResponseWriter) { stsRefusal(w, 400, "InvalidAction") }, fault.Unknown, fault.Unknown},
		"no account":   {func(w http.ResponseWriter) { identityAnswer(w, "") }, fault.Unknown, fault.Unknown},
		"wrong keys":   {func(w http.ResponseWriter) { stsRefusal(w, 403, "InvalidClientTokenId") }, fault.Unauthenticated, fault.Unauthenticated},
		"down":         {func(w http.ResponseWriter) { stsRefusal(w, 500, "InternalFailure") }, fault.Unavailable, fault.Unknown},
		"not an STS":   {func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) }, fault.Unavailable, fault.Unknown},
		"a web server": {func(w http.ResponseWriter) { say(w, "<html>hello") }, fault.Unavailable, fault.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			owned := func(clients *Clients, be Backend, want fault.Kind) {
				t.Helper()
				info, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "bucket"})
				if fault.KindOf(err) != want || (err == nil) != (want == fault.Unknown) || info.Owner != "" {
					t.Errorf("%+v, kind %v, want %v: %v", info, fault.KindOf(err), want, err)
				}
				if fault.Is(err, fault.Unavailable) {
					wantText(t, err, "expectedBucketOwner")
				}
			}
			_, clients, be := serve(t, answer(c.answer), "    sts: {}\n")
			owned(clients, be, c.declared)
			cfg, err := DefaultConfig("", "")
			check(t, err)
			clients, be = newTestClients(t, cfg, "default", withTransport(&fakeS3{answer: answer(c.answer)}))
			owned(clients, be, c.aws)
		})
	}
}

func TestOutsideAWSOnlyADeclaredSTSIsAsked(t *testing.T) {
	for extra, want := range map[string]int{"": 1, "    sts: {region: eu-west-1}\n": 2} {
		f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				if !strings.Contains(r.Header.Get("Authorization"), "/eu-west-1/sts/") {
					t.Errorf("signed %s", r.Header.Get("Authorization"))
				}
				identityAnswer(w, "000000000000")
			}
		}, extra)
		if _, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "bucket"}); err != nil {
			t.Error(err)
		}
		if got := f.requests(); len(got) != want {
			t.Errorf("requests: %v", got)
		}
	}
}

func TestAccountsOfDifferentKeysAreDifferent(t *testing.T) {
	_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			account := "111111111111"
			if strings.Contains(r.Header.Get("Authorization"), "Credential=OTHER/") {
				account = "222222222222"
			}
			identityAnswer(w, account)
		}
	}, "    sts: {}\n")
	buckets := newTestBuckets(t, clients, nil)
	for _, c := range []struct {
		keys credentials.Keys
		want string
	}{{testKeys, "111111111111"}, {credentials.Keys{AccessKeyID: "OTHER", SecretAccessKey: "x"}, "222222222222"}} {
		if info, err := buckets.Validate(bounded(t), be, c.keys, BucketInfo{Name: "b"}); err != nil || info.Owner != c.want {
			t.Errorf("got %+v, %v", info, err)
		}
	}
}

func TestAServiceThatDoesNotKnowTheQuestionIsNotAskedForEachSession(t *testing.T) {
	asked := 0
	status, code := http.StatusBadRequest, "InvalidParameterValue" // as MinIO answers
	_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			say(w, emptyListing)
			return
		}
		asked++
		stsRefusal(w, status, code)
	}, "    sts: {}\n")
	now := time.Now()
	b := newTestBuckets(t, clients, func() time.Time { return now })
	ask := func(id string) {
		t.Helper()
		owner, err := b.expectedOwner(bounded(t), be, credentials.Keys{AccessKeyID: id, SecretAccessKey: "s", SessionToken: "t"}, "")
		if err != nil || owner != "" {
			t.Fatalf("got %q, %v", owner, err)
		}
	}
	ask("one")
	ask("two")
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	now = now.Add(noAccountTTL)
	// A refusal may be meant for one identity alone.
	status, code = http.StatusForbidden, "AccessDenied"
	ask("three")
	ask("four")
	if asked != 3 {
		t.Errorf("asked %d times", asked)
	}
}

func TestADeclaredSTSMayTakeLonger(t *testing.T) {
	_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			time.Sleep(stsBound + 500*time.Millisecond)
			identityAnswer(w, "111122223333")
		}
	}, "    sts: {}\n")
	if info, err := newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "bucket"}); err != nil || info.Owner != "111122223333" {
		t.Errorf("%+v, %v", info, err)
	}
}
