package credentials

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestOrdersAreNeverPrinted(t *testing.T) {
	o := Order{Kind: AssumeRole, Keys: Keys{AccessKeyID: "a", SecretAccessKey: "canary-key", SessionToken: "canary-session"}, Token: "canary-token",
		RoleARN: "role"}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		for _, v := range []any{o, &o, struct{ O Order }{o}} {
			if s := fmt.Sprintf(format, v); strings.Contains(s, "canary") {
				t.Errorf("%s of %T shows a secret: %s", format, v, s)
			}
		}
	}
	if got := len(o.Secrets()); got != 3 {
		t.Errorf("%d secrets", got)
	}
}

func TestThePasswordOfAProxyIsASecretInBothForms(t *testing.T) {
	for proxy, want := range map[string][]string{
		"":                             nil,
		"http://p:3128":                nil,
		"http://u:canary@p:3128":       {"canary"},
		"http://u:can%21a%28ry@p:3128": {"can%21a%28ry", "can!a(ry"},
	} {
		if got := (Order{STS: STSService{Proxy: proxy}}).Secrets(); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", proxy, got, want)
		}
	}
}

func TestDigestsTellOrdersApart(t *testing.T) {
	salt := []byte("a helper's")
	at := time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)
	o := Order{
		Kind: WebIdentity, Keys: Keys{AccessKeyID: "a", SecretAccessKey: "b", SessionToken: "c", Expires: at}, Token: "t", RoleARN: "r", Name: "n", Policy: "p",
		Duration: time.Hour, STS: STSService{Endpoint: "e", Region: "g", CA: "ca"}, AgentURI: "u",
	}
	digest := o.Digest(salt)
	if len(digest) != 32 {
		t.Errorf("digest %q", digest)
	}
	same := o
	same.Keys.Expires = at.In(time.FixedZone("x", 3600))
	if same.Digest(salt) != digest {
		t.Error("the same moment in another zone is another order")
	}
	seen := map[string]bool{digest: true, o.Digest([]byte("another's")): true}
	for i, change := range []func(o *Order){
		func(o *Order) { o.Kind = AssumeRole }, func(o *Order) { o.Keys.SecretAccessKey = "x" }, func(o *Order) { o.Keys.Expires = at.Add(1) },
		func(o *Order) { o.Token = "x" }, func(o *Order) { o.RoleARN = "x" }, func(o *Order) { o.Name = "x" }, func(o *Order) { o.Policy = "x" },
		func(o *Order) { o.Duration++ }, func(o *Order) { o.STS.Endpoint = "x" }, func(o *Order) { o.STS.CA = "x" }, func(o *Order) { o.STS.FIPS = true },
		func(o *Order) { o.AgentURI = "x" }, func(o *Order) { o.Token, o.RoleARN = "", "tr" },
	} {
		other := o
		change(&other)
		if d := other.Digest(salt); seen[d] {
			t.Errorf("change %d: the digest of another", i)
		} else {
			seen[d] = true
		}
	}
	if len(seen) != 15 {
		t.Errorf("%d digests", len(seen))
	}
	if d := (Order{Token: "t"}).Digest(salt); d != "" {
		t.Errorf("no order: %q", d)
	}
	o.Keys.Expires = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)
	if d := o.Digest(salt); d != "" {
		t.Errorf("an order that cannot be passed on: %q", d)
	}
}
