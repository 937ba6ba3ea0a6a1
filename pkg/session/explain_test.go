package session

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// What services say, and what it means.
func TestRefusalsHaveAKindAndSayWhatToDo(t *testing.T) {
	assume, web, federate := credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken
	for _, c := range []struct {
		kind   credentials.Kind
		status int
		code   string
		want   fault.Kind
		part   string
	}{
		{assume, 403, "AccessDenied", fault.Denied, "trust policy trusts"},
		{web, 403, "AccessDenied", fault.Denied, "sts:AssumeRoleWithWebIdentity"},
		{federate, 403, "AccessDenied", fault.Denied, "sts:GetFederationToken"},
		{web, 403, "IDPRejectedClaim", fault.Denied, "claims"},
		{web, 400, "ExpiredTokenException", fault.Unauthenticated, "requiresRepublish"},
		{web, 400, "ExpiredToken", fault.Unauthenticated, "expired"},
		{web, 400, "InvalidIdentityToken", fault.Unauthenticated, "issuer"},
		{web, 400, "InvalidParameterValue", fault.Unauthenticated, "issuer"},
		{assume, 403, "InvalidClientTokenId", fault.Unauthenticated, "AKIASTATIC"},
		{assume, 403, "InvalidAccessKeyId", fault.Unauthenticated, "AKIASTATIC"},
		{assume, 403, "SignatureDoesNotMatch", fault.Unauthenticated, "clock"},
		{assume, 400, "Throttling", fault.Busy, "throttles requests"},
		{assume, 429, "AccessDenied", fault.Busy, "throttles requests"},
		{assume, 429, "Whatever", fault.Busy, "throttles requests"},
		{assume, 503, "SlowDown", fault.Busy, "throttles requests"},
		{assume, 400, "MalformedPolicyDocument", fault.Precondition, "policy"},
		{assume, 400, "PackedPolicyTooLarge", fault.Precondition, "shorter prefix"},
		{assume, 403, "RegionDisabledException", fault.Precondition, "sts.region"},
		{assume, 400, "ValidationError", fault.Precondition, "sessionDuration of the volume (20m0s)"},
		{assume, 400, "InvalidParameterValue", fault.Precondition, "sessionDuration"},
		{assume, 400, "InvalidAction", fault.Precondition, "sts.kinds"},
		{assume, 501, "NotImplemented", fault.Precondition, "sts.kinds"},
		{assume, 404, "NoSuchBucket", fault.Precondition, "sts.endpoint"},
		{assume, 400, "SomethingNew", fault.Precondition, "sts.endpoint"},
		{assume, 403, "SomethingNew", fault.Denied, "trust policy"},
		{web, 400, "IDPCommunicationError", fault.Unavailable, "retries"},
		{assume, 500, "InternalFailure", fault.Unavailable, "retries"},
		{assume, 503, "STSNotInitialized", fault.Unavailable, "retries"},
	} {
		t.Run(fmt.Sprint(c.kind, c.status, c.code), func(t *testing.T) {
			t.Parallel()
			f := serveSTS(t, func(w http.ResponseWriter, _ asked, _ int) { refuseSTS(w, c.status, c.code, "says the service") })
			keys, err := maker(t).Make(bounded(t), orderFor(c.kind, f.url))
			if fault.KindOf(err) != c.want || !keys.IsZero() {
				t.Fatalf("got %v of kind %d, want %d", err, fault.KindOf(err), c.want)
			}
			for _, part := range []string{c.part, "backend x", c.code, "REQ1", string(c.kind)} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v does not say %q", err, part)
				}
			}
			if c.kind != federate && !strings.Contains(err.Error(), roleA) {
				t.Errorf("%v does not name the role", err)
			}
			again := c.want == fault.Busy || c.want == fault.Unavailable
			if n := len(f.requests()); again != (n > 1) {
				t.Errorf("asked %d times", n)
			}
		})
	}
}

func TestTheLastWordOfAServiceIsToldWhenTheTimeRunsOut(t *testing.T) {
	ctx, cancel := context.WithCancel(bounded(t))
	f := serveSTS(t, func(w http.ResponseWriter, _ asked, n int) {
		if n == 2 {
			cancel()
		}
		refuseSTS(w, 400, "Throttling", "Rate exceeded")
	})
	m := maker(t)
	m.backoff = time.Hour
	if _, err := m.Make(ctx, orderFor(credentials.AssumeRole, f.url)); !fault.Is(err, fault.Busy) {
		t.Errorf("got %v of kind %d", err, fault.KindOf(err))
	}
}

func TestACallerWhoseTimeRunsOutIsToldSo(t *testing.T) {
	here := make(chan struct{}, maxConcurrent)
	f := serveSTS(t, func(_ http.ResponseWriter, r asked, _ int) {
		here <- struct{}{}
		<-r.Context().Done()
	})
	for _, kind := range []credentials.Kind{credentials.WebIdentity, credentials.PodIdentity} {
		ctx, cancel := context.WithCancel(bounded(t))
		go func() {
			<-here
			cancel()
		}()
		o := orderFor(kind, f.url)
		o.AgentURI = f.url
		if _, err := maker(t).Make(ctx, o); !fault.Is(err, fault.Timeout) || !strings.Contains(err.Error(), "backend x") {
			t.Errorf("%s: %v of kind %d", kind, err, fault.KindOf(err))
		}
	}
}

func TestAServiceThatIsNotThereIsUnavailable(t *testing.T) {
	server := httptest.NewServer(nil)
	server.Close()
	_, err := maker(t).Make(bounded(t), orderFor(credentials.WebIdentity, server.URL))
	if !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "connection refused") || !strings.Contains(err.Error(), "backend x") {
		t.Errorf("got %v", err)
	}
}

func TestNoTextHoldsWhatTheServiceEchoes(t *testing.T) {
	all := orderFor(credentials.AssumeRole, "")
	all.Keys, all.Token = session, token
	all.Keys.SecretAccessKey = "a/b+c/canary"
	for name, message := range map[string]string{
		"as it is":  "bad token " + token + " and " + all.Keys.SecretAccessKey + ", " + session.SessionToken,
		"cut off":   "bad token " + token[:30],
		"quoted":    "Value &apos;" + token + "&apos; at &apos;webIdentityToken&apos; failed",
		"far along": strings.Repeat("x", 390) + token,
		"escaped":   url.QueryEscape(all.Keys.SecretAccessKey),
	} {
		for _, kind := range []credentials.Kind{credentials.WebIdentity, credentials.AssumeRole} {
			for code := range map[string]bool{"AccessDenied": true, "InvalidIdentityToken": true, "Throttling": true, "": true} {
				f := serveSTS(t, func(w http.ResponseWriter, _ asked, _ int) { refuseSTS(w, 400, code, message) })
				o := all
				o.Kind, o.STS.Endpoint = kind, f.url
				_, err := maker(t).Make(bounded(t), o)
				if err == nil || strings.Contains(err.Error(), "canary") {
					t.Errorf("%s, %s %q: %v", name, kind, code, err)
				}
			}
		}
	}
}

// Keys of services that are not AWS may hold anything, also what ends a word.
func TestNoPartOfASecretIsShown(t *testing.T) {
	for _, secret := range []string{`(my)-long,secret"key'of-a user`, "abc,defghi;jklmnop<q>rstuvwxyz", `"quoted,secret,of-a-user-123"`} {
		o := credentials.Order{Keys: credentials.Keys{SecretAccessKey: secret}}
		for _, shown := range []string{secret, secret[:len(secret)-3], secret[:12], fmt.Sprintf("%q", secret)} {
			got := make(chan string, 1)
			go func() { got <- scrub(o, "it says "+shown+", and more") }()
			select {
			case s := <-got:
				if strings.Contains(s, secret[4:8]) || strings.Contains(s, secret[10:14]) || !strings.HasPrefix(s, "it says ") || !strings.HasSuffix(s, ", and more") {
					t.Errorf("%q shows as %q", shown, s)
				}
			case <-time.After(time.Minute):
				t.Fatalf("%q is looked for without an end", shown)
			}
		}
	}
}
