package session

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestSessionNamesTellThePodAndTheMount(t *testing.T) {
	long := strings.Repeat("n", 63)
	for name, c := range map[string]struct {
		r    Request
		kind credentials.Kind
		want string
	}{
		"a pod":            {Request{Source: "workload", Pod: Pod{"ns", "sa"}, Name: "0123456789ab"}, credentials.WebIdentity, "ns.sa.0123456789ab"},
		"a long pod":       {Request{Source: "workload", Pod: Pod{long, "sa"}, Name: "0123456789ab"}, credentials.WebIdentity, long[:51] + ".0123456789ab"},
		"the driver":       {Request{Source: "driver", Pod: Pod{"ns", "sa"}, Name: "0123456789ab"}, credentials.AssumeRole, "s3csi.0123456789ab"},
		"odd characters":   {Request{Source: "secret", Name: "pv/x y:é"}, credentials.AssumeRole, "s3csi.pv-x-y--"},
		"a federation":     {Request{Source: "secret", Name: strings.Repeat("v", 40)}, credentials.FederationToken, "s3csi." + strings.Repeat("v", 16)},
		"nothing is known": {Request{Source: "driver"}, credentials.AssumeRole, "s3csi"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := sessionName(c.r, c.kind); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func FuzzSessionName(f *testing.F) {
	f.Add("ns", "sa", "0123456789ab", true)
	f.Add(strings.Repeat("a", 63), strings.Repeat("b", 253), "\x00é", false)
	f.Fuzz(func(t *testing.T, namespace, account, name string, federation bool) {
		kind, limit := credentials.WebIdentity, 64
		if federation {
			kind, limit = credentials.FederationToken, 32
		}
		got := sessionName(Request{Source: credentials.SourceWorkload, Pod: Pod{namespace, account}, Name: name}, kind)
		if len(got) < 2 || len(got) > limit || clean(got) != got {
			t.Fatalf("%q", got)
		}
	})
}

func FuzzAudiences(f *testing.F) {
	f.Add(jwt(`"a"`))
	f.Add(jwt(`["a","b"]`))
	f.Add("a.e30.c")
	f.Add("a.bnVsbA.c")
	f.Fuzz(func(_ *testing.T, token string) { audiences(token) })
}

func TestTokensAreReadFromFiles(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"a token":              {"a.b.c", "a.b.c"},
		"with a line's end":    {" a.b.c\n", "a.b.c"},
		"none":                 {" \n", ""},
		"one that is too long": {strings.Repeat("x", maxTokenFile+1), ""},
		"the longest":          {strings.Repeat("x", maxTokenFile), strings.Repeat("x", maxTokenFile)},
	} {
		path := filepath.Join(t.TempDir(), "token")
		must(t, os.WriteFile(path, []byte(tc.text), 0o600))
		got, err := ReadToken(path)
		if got != tc.want || (tc.want == "") != fault.Is(err, fault.Unauthenticated) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	if _, err := ReadToken(filepath.Join(t.TempDir(), "token")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}
