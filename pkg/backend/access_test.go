package backend

import (
	"net/http"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestCheckAccessTriesWhatAClientWillDo(t *testing.T) {
	for name, c := range map[string]struct {
		list, head int
		code       string
		kind       fault.Kind
		text       string
	}{
		"enough":              {200, 404, "", fault.Unknown, ""},
		"no list permission":  {403, 404, "AccessDenied", fault.Denied, "b/p/"},
		"no read permission":  {200, 403, "", fault.Denied, "s3:GetObject"},
		"no bucket":           {404, 404, "NoSuchBucket", fault.NotFound, "NoSuchBucket"},
		"expired credentials": {400, 400, "ExpiredToken", fault.Unauthenticated, "expired"},
		"overload, later":     {200, 500, "", fault.Unavailable, "500"},
	} {
		t.Run(name, func(t *testing.T) {
			f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.Method == http.MethodHead:
					refuse(w, r, c.head, "")
				case c.list == 200:
					say(w, emptyListing)
				default:
					refuse(w, r, c.list, c.code)
				}
			}, "")
			_, err := newTestBuckets(t, clients, nil).CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b",
				Region: "eu-west-1"}})
			if fault.KindOf(err) != c.kind || (err == nil) != (c.kind == fault.Unknown) {
				t.Errorf("kind %v: %v", fault.KindOf(err), err)
			}
			if err != nil {
				wantText(t, err, c.text)
			}
			for _, r := range f.asked() {
				q := r.URL.Query()
				list := r.Method == http.MethodGet && r.URL.Path == "/b" && q.Get("prefix") == "p/" && q.Get("max-keys") == "1"
				head := r.Method == http.MethodHead && strings.HasPrefix(r.URL.Path, "/b/p/"+accessProbe)
				if !list && !head {
					t.Errorf("asked %s %s", r.Method, r.URL)
				}
			}
		})
	}
}

func TestCheckAccessFollowsTheRegion(t *testing.T) {
	wrong := make(chan struct{})
	f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !strings.Contains(r.Header.Get("Authorization"), "/eu-west-3/s3/"):
			if r.Method == http.MethodHead {
				close(wrong)
			}
			<-wrong // both are asked
			w.Header().Set("X-Amz-Bucket-Region", "eu-west-3")
			refuse(w, r, 400, "AuthorizationHeaderMalformed")
		case r.Method == http.MethodHead:
			refuse(w, r, 404, "")
		default:
			say(w, emptyListing)
		}
	}, "")
	info, err := newTestBuckets(t, clients, nil).CheckAccess(bounded(t), be, Access{Keys: testKeys, Bucket: BucketInfo{Name: "b"}})
	if err != nil || info.Region != "eu-west-3" {
		t.Errorf("got %+v, %v", info, err)
	}
	if got := f.requests(); len(got) != 4 { // both in the wrong region, both in the right one
		t.Errorf("requests: %v", got)
	}
}

func TestCheckAccessAsksBothAtOnceWhereTheRegionIsNoGuess(t *testing.T) {
	for name, c := range map[string]struct {
		aws           bool
		config, given string
		together      bool
	}{
		"AWS, region not known":     {true, "", "", false},
		"AWS, region configured":    {true, "    region: eu-west-1\n", "", true},
		"AWS, region of the volume": {true, "", "eu-west-1", true},
		"another service":           {false, "", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			hermetic(t)
			var list, head, both = make(chan struct{}), make(chan struct{}), make(chan struct{})
			go func() { <-list; <-head; close(both) }()
			f := &fakeS3{answer: func(w http.ResponseWriter, r *http.Request) {
				mine := list
				if r.Method == http.MethodHead {
					mine = head
				}
				close(mine) // each is asked once
				if c.together {
					<-both // an answer comes only when the other question is there
				}
				if r.Method == http.MethodHead {
					refuse(w, r, 404, "")
					return
				}
				say(w, emptyListing)
			}}
			if !c.aws {
				c.config += "    endpoint: http://fake.example\n"
			}
			cfg, err := ParseConfig([]byte("backends:\n  fake:\n    expectedBucketOwner: '111111111111'\n"+c.config), "", "")
			check(t, err)
			clients, be := newTestClients(t, cfg, "fake", withTransport(f))
			if _, err := newTestBuckets(t, clients, nil).CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b",
				Region: c.given}}); err != nil {
				t.Fatal(err)
			}
			if got := f.requests(); len(got) != 2 || !c.together && !strings.HasPrefix(got[0], "GET") {
				t.Errorf("requests: %v", got)
			}
		})
	}
}

// Whichever answer comes first.
func TestCheckAccessReportsTheListingsFailureFirst(t *testing.T) {
	asked := make(chan struct{})
	_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			refuse(w, r, 403, "")
			close(asked)
			return
		}
		<-asked
		refuse(w, r, 404, "NoSuchBucket")
	}, "")
	_, err := newTestBuckets(t, clients, nil).CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b"}})
	if !fault.Is(err, fault.NotFound) {
		t.Errorf("got %v", err)
	}
	wantText(t, err, "b/p/", "NoSuchBucket")
}

// A listing that is refused does not wait for what is asked beside it.
func TestCheckAccessDoesNotWaitForAnAnswerThatDoesNotCount(t *testing.T) {
	asked, left := make(chan struct{}), make(chan struct{})
	_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			close(asked)
			<-r.Context().Done()
			close(left)
			return
		}
		<-asked
		refuse(w, r, 403, "AccessDenied")
	}, "")
	if _, err := newTestBuckets(t, clients, nil).CheckAccess(bounded(t), be, Access{Keys: testKeys, Prefix: "p/", Bucket: BucketInfo{Name: "b"}}); !fault.Is(err,
		fault.Denied) {
		t.Errorf("got %v", err)
	}
	<-left
}
