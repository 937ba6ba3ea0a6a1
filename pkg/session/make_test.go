package session

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// asked is one request that a fake token service got.
type asked struct {
	*http.Request
	form url.Values
}

// fakeSTS answers as a test says and remembers what it was asked.
type fakeSTS struct {
	mu     sync.Mutex
	seen   []asked
	answer func(w http.ResponseWriter, r asked, n int) // n counts from 1
	url    string
}

func (f *fakeSTS) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	form, _ := url.ParseQuery(string(body))
	f.mu.Lock()
	a := asked{r, form}
	f.seen = append(f.seen, a)
	n, answer := len(f.seen), f.answer
	f.mu.Unlock()
	answer(w, a, n)
}

func (f *fakeSTS) requests() []asked {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]asked(nil), f.seen...)
}

func serveSTS(t *testing.T, answer func(w http.ResponseWriter, r asked, n int)) *fakeSTS {
	t.Helper()
	f := &fakeSTS{answer: answer}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	f.url = server.URL
	return f
}

// issue answers with a session that ends at end.
func issue(w http.ResponseWriter, r asked, end time.Time) {
	action := r.form.Get("Action")
	who := `<AssumedRoleUser><Arn>arn:aws:sts::111122223333:assumed-role/a/n</Arn><AssumedRoleId>X</AssumedRoleId></AssumedRoleUser>`
	if action == "GetFederationToken" {
		who = `<FederatedUser><Arn>arn:aws:sts::111122223333:federated-user/n</Arn><FederatedUserId>X</FederatedUserId></FederatedUser>`
	}
	_, _ = fmt.Fprintf(w, `<%[1]sResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><%[1]sResult><Credentials>`+
		`<AccessKeyId>ASIANEW</AccessKeyId><SecretAccessKey>new-secret</SecretAccessKey>`+
		`<SessionToken>new-token</SessionToken><Expiration>%[2]s</Expiration></Credentials>%[3]s</%[1]sResult></%[1]sResponse>`,
		action, end.UTC().Format(time.RFC3339), who)
}

func refuseSTS(w http.ResponseWriter, status int, code, message string) {
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">`+
		`<Error><Type>Sender</Type><Code>%s</Code><Message>%s</Message></Error><RequestId>REQ1</RequestId></ErrorResponse>`, code, message)
}

func issueForAnHour(w http.ResponseWriter, r asked, _ int) { issue(w, r, time.Now().Add(time.Hour)) }

// maker is one that does not wait between attempts.
func maker(t *testing.T) *Maker {
	t.Helper()
	m := NewMaker("v1")
	m.backoff = 5 * time.Millisecond
	t.Cleanup(m.Close)
	return m
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

const token = "canaryTokenHeader.canaryTokenBody.canaryTokenSignature"

// orderFor is an order of a kind.
func orderFor(kind credentials.Kind, endpoint string) credentials.Order {
	o := credentials.Order{Kind: kind, RoleARN: roleA, Name: "ns.sa.0123456789ab", Policy: `{"Version":"2012-10-17"}`, Duration: 20 * time.Minute,
		STS: credentials.STSService{Endpoint: endpoint, Region: "eu-west-9"}, Backend: "backend x"}
	switch kind {
	case credentials.WebIdentity:
		o.Token = token
	case credentials.FederationToken:
		o.RoleARN, o.Keys = "", static
	case credentials.PodIdentity:
		o.Token = token
	default:
		o.Keys = static
	}
	return o
}

func TestEachKindAsksForExactlyWhatTheOrderSays(t *testing.T) {
	for _, c := range []struct {
		kind   credentials.Kind
		change func(*credentials.Order)
		action string
		signed string // the key in the signature; "": there is none
	}{
		{credentials.AssumeRole, func(*credentials.Order) {}, "AssumeRole", "AKIASTATIC"},
		{credentials.AssumeRole, func(o *credentials.Order) { o.Keys = session }, "AssumeRole", "ASIASESSION"},
		{credentials.AssumeRole, func(o *credentials.Order) { o.RoleARN, o.Policy, o.Duration = "", "", 0 }, "AssumeRole", "AKIASTATIC"},
		{credentials.FederationToken, func(*credentials.Order) {}, "GetFederationToken", "AKIASTATIC"},
		{credentials.WebIdentity, func(*credentials.Order) {}, "AssumeRoleWithWebIdentity", ""},
		{credentials.WebIdentity, func(o *credentials.Order) { o.RoleARN = "" }, "AssumeRoleWithWebIdentity", ""},
	} {
		// What the process has in its environment must not count.
		for name, value := range map[string]string{"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
			"AWS_REGION": "xx", "AWS_PROFILE": "none"} {
			t.Setenv(name, value)
		}
		f := serveSTS(t, issueForAnHour)
		o := orderFor(c.kind, f.url)
		c.change(&o)
		keys, err := maker(t).Make(bounded(t), o)
		if err != nil {
			t.Fatalf("%v: %v", o, err)
		}
		if keys.AccessKeyID != "ASIANEW" || keys.SecretAccessKey != "new-secret" || keys.SessionToken != "new-token" || keys.Account != "111122223333" {
			t.Errorf("%v: got %+v", o, keys)
		}
		r := f.requests()[0]
		if r.Method != http.MethodPost || r.URL.RawQuery != "" || r.URL.Path != "/" {
			t.Errorf("%v: %s %s", o, r.Method, r.URL)
		}
		want := url.Values{"Action": {c.action}, "Version": {"2011-06-15"}}
		set := func(name, value string) {
			if value != "" {
				want.Set(name, value)
			}
		}
		set("Policy", o.Policy)
		if o.Duration != 0 {
			set("DurationSeconds", "1200")
		}
		if c.kind == credentials.FederationToken {
			set("Name", o.Name)
		} else {
			set("RoleSessionName", o.Name)
			want.Set("RoleArn", o.RoleARN)
		}
		set("WebIdentityToken", o.Token)
		if r.form.Encode() != want.Encode() {
			t.Errorf("%v: asked\n%v, want\n%v", o, r.form, want)
		}
		authorization := r.Header.Get("Authorization")
		if c.signed == "" && authorization != "" || !strings.Contains(authorization, c.signed) || c.signed != "" &&
			!strings.Contains(authorization, "/eu-west-9/sts/") {
			t.Errorf("%v: Authorization %q", o, authorization)
		}
		if got := r.Header.Get("X-Amz-Security-Token"); got != o.Keys.SessionToken {
			t.Errorf("%v: session token %q", o, got)
		}
		for name, values := range r.Header {
			if strings.Contains(strings.Join(values, ""), "canaryToken") {
				t.Errorf("%v: the token is in header %s", o, name)
			}
		}
		if !strings.Contains(r.UserAgent(), "s3-csi-driver/v1") {
			t.Errorf("user agent %q", r.UserAgent())
		}
	}
}

func TestKeysAsTheyAreAskNobody(t *testing.T) {
	keys, err := maker(t).Make(t.Context(), credentials.Order{Kind: credentials.AsIs, Keys: static})
	if err != nil || keys != static {
		t.Errorf("got %v, %v", keys, err)
	}
}

func TestAnOrderWithoutItsMaterialAsksNobody(t *testing.T) {
	f := serveSTS(t, issueForAnHour)
	for kind, want := range map[credentials.Kind]fault.Kind{
		credentials.AssumeRole: fault.Unauthenticated, credentials.FederationToken: fault.Unauthenticated, credentials.WebIdentity: fault.Unauthenticated,
		credentials.PodIdentity: fault.Unauthenticated, "saml": fault.Precondition, "": fault.Precondition,
	} {
		_, err := maker(t).Make(t.Context(), credentials.Order{Kind: kind, RoleARN: roleA, Name: "name", STS: credentials.STSService{Endpoint: f.url, Region: "x"}})
		if fault.KindOf(err) != want {
			t.Errorf("%q: %v", kind, err)
		}
	}
	if n := len(f.requests()); n != 0 {
		t.Errorf("asked %d times", n)
	}
}

func TestTheEndOfASessionIsInTheTimeOfThisMachine(t *testing.T) {
	for name, skew := range map[string]time.Duration{"right": 0, "ahead": 10 * time.Minute, "behind": -3 * time.Minute, "a day off": 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			f := serveSTS(t, func(w http.ResponseWriter, r asked, _ int) {
				now := time.Now().Add(skew)
				w.Header().Set("Date", now.UTC().Format(http.TimeFormat))
				issue(w, r, now.Truncate(time.Second).Add(time.Hour))
			})
			before := time.Now()
			keys, err := maker(t).Make(bounded(t), orderFor(credentials.AssumeRole, f.url))
			must(t, err)
			// Never later than it is true, and not much earlier.
			if earliest, latest := before.Add(time.Hour-3*time.Second), time.Now().Add(time.Hour); keys.Expires.Before(earliest) || keys.Expires.After(latest) {
				t.Errorf("ends at %s, want %s to %s", keys.Expires, earliest, latest)
			}
		})
	}
}

func TestAClockThatIsWrongDoesNotKeepRequestsFromBeingSigned(t *testing.T) {
	// AWS refuses a signature that is more than five minutes off, and the next attempt is signed by its clock.
	const skew = 20 * time.Minute
	f := serveSTS(t, func(w http.ResponseWriter, r asked, _ int) {
		now := time.Now().Add(skew)
		w.Header().Set("Date", now.UTC().Format(http.TimeFormat))
		signed, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
		if err != nil || now.Sub(signed).Abs() > 5*time.Minute {
			refuseSTS(w, http.StatusForbidden, "SignatureDoesNotMatch", "Signature expired")
			return
		}
		issue(w, r, now.Add(time.Hour))
	})
	if _, err := maker(t).Make(bounded(t), orderFor(credentials.AssumeRole, f.url)); err != nil || len(f.requests()) != 2 {
		t.Errorf("%v after %d requests", err, len(f.requests()))
	}
}

func TestAnAnswerThatIsNoSessionIsRefused(t *testing.T) {
	for name, answer := range map[string]func(w http.ResponseWriter, r asked, n int){
		"nothing": func(w http.ResponseWriter, _ asked, _ int) {
			_, _ = io.WriteString(w, `<AssumeRoleResponse><AssumeRoleResult></AssumeRoleResult></AssumeRoleResponse>`)
		},
		"a web page":        func(w http.ResponseWriter, _ asked, _ int) { _, _ = io.WriteString(w, `<html>welcome</html>`) },
		"one that was over": func(w http.ResponseWriter, r asked, _ int) { issue(w, r, time.Now().Add(-time.Minute)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := serveSTS(t, answer)
			keys, err := maker(t).Make(bounded(t), orderFor(credentials.AssumeRole, f.url))
			if err == nil || !keys.IsZero() || !fault.Is(err, fault.Unavailable) {
				t.Errorf("got %v, %v of kind %d", keys, err, fault.KindOf(err))
			}
		})
	}
}

func TestWhatPassesIsTriedAgainWithinTheBudget(t *testing.T) {
	for name, trouble := range map[string]func(w http.ResponseWriter){
		"throttled": func(w http.ResponseWriter) { refuseSTS(w, 400, "Throttling", "Rate exceeded") },
		"broken":    func(w http.ResponseWriter) { refuseSTS(w, 500, "InternalFailure", "") },
		"issuer":    func(w http.ResponseWriter) { refuseSTS(w, 400, "IDPCommunicationError", "") },
		"cut off":   func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			f := serveSTS(t, func(w http.ResponseWriter, r asked, n int) {
				if n < 3 {
					trouble(w)
					return
				}
				issueForAnHour(w, r, n)
			})
			if _, err := maker(t).Make(bounded(t), orderFor(credentials.WebIdentity, f.url)); err != nil {
				t.Errorf("after %d requests: %v", len(f.requests()), err)
			}
		})
	}
}

func TestARedirectIsNotFollowedWithAToken(t *testing.T) {
	other := serveSTS(t, issueForAnHour)
	f := serveSTS(t, func(w http.ResponseWriter, r asked, _ int) {
		http.Redirect(w, r.Request, other.url, http.StatusTemporaryRedirect)
	})
	if _, err := maker(t).Make(bounded(t), orderFor(credentials.WebIdentity, f.url)); err == nil || len(other.requests()) != 0 {
		t.Errorf("%v, and another service got %d requests", err, len(other.requests()))
	}
}

func TestTheProxyIsTheOrdersAndNotThatOfTheEnvironment(t *testing.T) {
	proxy := serveSTS(t, issueForAnHour)
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	o := orderFor(credentials.AssumeRole, "http://sts.example.com")
	o.STS.Proxy = proxy.url
	if _, err := maker(t).Make(bounded(t), o); err != nil {
		t.Fatal(err)
	}
	if r := proxy.requests()[0]; r.Host != "sts.example.com" || r.URL.Host != "sts.example.com" {
		t.Errorf("the proxy was asked for %s at %s", r.URL, r.Host)
	}
	o.STS.Proxy = "http://user:canary@%zz"
	if _, err := maker(t).Make(bounded(t), o); !fault.Is(err, fault.Precondition) || strings.Contains(err.Error(), "canary") {
		t.Errorf("got %v", err)
	}
}

func TestManyMountsDoNotHammerAService(t *testing.T) {
	var now, most atomic.Int32
	f := serveSTS(t, func(w http.ResponseWriter, r asked, n int) {
		if c := now.Add(1); c > most.Load() {
			most.Store(c) // a lost update only makes it smaller
		}
		defer now.Add(-1)
		issueForAnHour(w, r, n)
	})
	m := maker(t)
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if _, err := m.Make(bounded(t), orderFor(credentials.AssumeRole, f.url)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if most.Load() > maxConcurrent || len(f.requests()) != 100 {
		t.Errorf("%d at a time, %d in all", most.Load(), len(f.requests()))
	}
}

func TestATurnThatDoesNotComeIsATimeout(t *testing.T) {
	free := make(chan struct{})
	f := serveSTS(t, func(w http.ResponseWriter, r asked, n int) {
		<-free
		issueForAnHour(w, r, n)
	})
	m := maker(t)
	var wg sync.WaitGroup
	for range maxConcurrent {
		wg.Go(func() { _, _ = m.Make(bounded(t), orderFor(credentials.AssumeRole, f.url)) })
	}
	o := orderFor(credentials.AssumeRole, f.url)
	s, err := m.service(o)
	must(t, err)
	for len(s.slots) < maxConcurrent {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Make(ctx, o); !fault.Is(err, fault.Timeout) {
		t.Errorf("got %v", err)
	}
	close(free)
	wg.Wait()
}

func TestAServiceIsTrustedByTheCertificatesOfTheOrder(t *testing.T) {
	f := &fakeSTS{answer: issueForAnHour}
	server := httptest.NewTLSServer(f)
	defer server.Close()
	o := orderFor(credentials.AssumeRole, server.URL)
	if _, err := maker(t).Make(bounded(t), o); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "caFile") {
		t.Errorf("without them: %v", err)
	}
	o.STS.CA = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	if _, err := maker(t).Make(bounded(t), o); err != nil {
		t.Errorf("with them: %v", err)
	}
	o.STS.CA = "none"
	if _, err := maker(t).Make(bounded(t), o); !fault.Is(err, fault.Precondition) {
		t.Errorf("with wrong ones: %v", err)
	}
}

// An endless answer must not fill the memory.
func TestAnAnswerIsReadUpToABound(t *testing.T) {
	for _, status := range []int{http.StatusOK, http.StatusForbidden} {
		var sent atomic.Int64
		f := serveSTS(t, func(w http.ResponseWriter, _ asked, _ int) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "<ErrorResponse><Error><Code>AccessDenied</Code><Message>")
			for chunk := strings.Repeat("x", 1<<16); sent.Load() < 256<<20; {
				n, err := io.WriteString(w, chunk)
				if sent.Add(int64(n)); err != nil {
					return
				}
			}
		})
		if _, err := maker(t).Make(bounded(t), orderFor(credentials.AssumeRole, f.url)); err == nil || len(err.Error()) > 4096 {
			t.Errorf("%d: %.200v", status, err)
		}
		if sent.Load() > 128<<20 { // what is on its way in sockets counts too
			t.Errorf("%d: %d bytes were taken", status, sent.Load())
		}
	}
}

// A session without a known expiry would never be renewed.
func TestASessionWhoseEndIsNotToldEndsAllTheSame(t *testing.T) {
	f := serveSTS(t, func(w http.ResponseWriter, r asked, _ int) {
		b := httptest.NewRecorder()
		issue(b, r, time.Now())
		before, rest, _ := strings.Cut(b.Body.String(), "<Expiration>")
		_, after, _ := strings.Cut(rest, "</Expiration>")
		_, _ = io.WriteString(w, before+after)
	})
	for asked, want := range map[time.Duration]time.Duration{20 * time.Minute: 20 * time.Minute, 0: time.Hour} {
		o := orderFor(credentials.AssumeRole, f.url)
		o.Duration = asked
		keys, err := maker(t).Make(bounded(t), o)
		if left := time.Until(keys.Expires); err != nil || left > want || left < want-time.Minute {
			t.Errorf("of %s: %v, ends in %s", asked, err, left)
		}
	}
}
