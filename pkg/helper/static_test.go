package helper

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// startStatic runs a stand-in that takes static keys.
func (r *rig) startStatic(keys credentials.Keys, order credentials.Order, steps ...string) error {
	r.t.Helper()
	req := r.request(steps...)
	req.Keys, req.Order, req.StaticKeys = keys, order, true
	_, err := r.startWith(req)
	return err
}

// A client with static keys has them in its environment, and nothing of the endpoint. Its output never shows them, also when the
// helper has other keys by then; the next client gets those.
func TestAClientWithStaticKeysHasThemInItsEnvironment(t *testing.T) {
	r := newRig(t)
	user := testKeys
	user.SessionToken = ""
	steps := []string{"env:AWS_ACCESS_KEY_ID", "env:AWS_CONTAINER_CREDENTIALS_FULL_URI", "wait:" + r.dir + "/go", "env:AWS_SECRET_ACCESS_KEY", "exit:1"}
	if err := r.startStatic(user, credentials.Order{}, steps...); err != nil {
		t.Fatal(err)
	}
	r.says("env AKIDCANARY")
	other := credentials.Keys{AccessKeyID: "AKIDOTHER", SecretAccessKey: "other/secret+key"}
	for range maxRetired + 1 { // so that a secret is not only remembered for having been replaced
		other.SecretAccessKey += "x"
		if err := r.peer.Renew(bounded(t), other, credentials.Order{}); err != nil {
			t.Fatal(err)
		}
	}
	touch(t, r.dir+"/go")
	s := r.until("the exit", exited)
	if !slices.Contains(s.Tail, "env") && !slices.Contains(s.Tail, "env ") {
		t.Errorf("the client knows the endpoint: %q", s.Tail)
	}
	if last := s.Tail[len(s.Tail)-1]; last != "env "+redacted {
		t.Errorf("the client's secret key is shown: %q", last)
	}
	if strings.Contains(r.log(), user.SecretAccessKey) {
		t.Error("the log has the secret key")
	}
	if err := r.startStatic(credentials.Keys{}, credentials.Order{}, "env:AWS_ACCESS_KEY_ID", "wait:"+r.dir+"/never"); err != nil {
		t.Fatal(err)
	}
	r.says("env AKIDOTHER")
}

// Keys that expire would end with the client still running.
func TestStaticKeysThatExpireAreRefused(t *testing.T) {
	user := credentials.Keys{AccessKeyID: "AKIDCANARY", SecretAccessKey: "canary"}
	expiring := user
	expiring.Expires = time.Now().Add(time.Hour)
	for what, tc := range map[string]struct {
		keys  credentials.Keys
		order credentials.Order
		kind  fault.Kind
	}{
		"none":                 {kind: fault.Unauthenticated},
		"of a session":         {keys: testKeys, kind: fault.Precondition},
		"with an end":          {keys: expiring, kind: fault.Precondition},
		"renewed from a token": {keys: user, order: credentials.Order{Kind: credentials.WebIdentity, Token: "t"}, kind: fault.Precondition},
	} {
		r := newRig(t, func(o *options) { o.exchange = (&tokenService{life: time.Hour}).make })
		if err := r.startStatic(tc.keys, tc.order, "exit:0"); !fault.Is(err, tc.kind) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
