package credentials

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestKeysFromSecrets(t *testing.T) {
	for _, tc := range []struct {
		name    string
		secrets map[string]string
		want    Keys
		ok      bool
		field   string
	}{
		{"none", nil, Keys{}, false, ""},
		{"keys of others", map[string]string{"endpoint": "https://x", "accessKeyId": "y"}, Keys{}, false, ""},
		{"both", map[string]string{"accessKeyID": "a", "secretAccessKey": "s"}, Keys{AccessKeyID: "a", SecretAccessKey: "s"}, true, ""},
		{"a session", map[string]string{"accessKeyID": "a", "secretAccessKey": "s", "sessionToken": "t"},
			Keys{AccessKeyID: "a", SecretAccessKey: "s", SessionToken: "t"}, true, ""},
		{"no secret key", map[string]string{"accessKeyID": "a"}, Keys{}, false, "secrets.secretAccessKey"},
		{"no access key", map[string]string{"secretAccessKey": "s"}, Keys{}, false, "secrets.accessKeyID"},
		{"a token alone", map[string]string{"sessionToken": "t"}, Keys{}, false, "secrets.accessKeyID"},
		{"a newline at the end", map[string]string{"accessKeyID": "a", "secretAccessKey": "canary\n"}, Keys{}, false, "secrets.secretAccessKey"},
		{"a header in a token", map[string]string{"accessKeyID": "a", "secretAccessKey": "s", "sessionToken": "canary\r\nx: y"}, Keys{}, false,
			"secrets.sessionToken"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, ok, err := FromSecret(tc.secrets)
			if got != tc.want || ok != tc.ok {
				t.Errorf("got %#v %t, want %#v %t", got, ok, tc.want, tc.ok)
			}
			var f *fault.Error
			switch {
			case tc.field == "" && err != nil:
				t.Errorf("error %v", err)
			case tc.field != "" && (!errors.As(err, &f) || f.Kind != fault.Invalid || f.Field != tc.field):
				t.Errorf("error %v, want one of the field %s", err, tc.field)
			case err != nil && strings.Contains(err.Error(), "canary"):
				t.Errorf("the error shows a secret: %v", err)
			}
		})
	}
}

func TestKeysAreNeverPrinted(t *testing.T) {
	k := Keys{AccessKeyID: "AKIA", SecretAccessKey: "canary-secret", SessionToken: "canary-token"}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		for _, v := range []any{k, &k, struct{ K Keys }{k}} {
			if s := fmt.Sprintf(format, v); strings.Contains(s, "canary") {
				t.Errorf("%s of %T shows a secret: %s", format, v, s)
			}
		}
	}
}

func TestDigestsTellKeysApart(t *testing.T) {
	salt := []byte("a node's")
	k := Keys{AccessKeyID: "a", SecretAccessKey: "b", SessionToken: "c"}
	digest := k.Digest(salt)
	seen := map[string]bool{digest: true}
	for _, other := range []Keys{
		{AccessKeyID: "x", SecretAccessKey: "b", SessionToken: "c"}, {AccessKeyID: "a", SecretAccessKey: "x", SessionToken: "c"},
		{AccessKeyID: "a", SecretAccessKey: "b", SessionToken: "x"}, {AccessKeyID: "ab", SecretAccessKey: "", SessionToken: "c"}, {},
	} {
		if d := other.Digest(salt); seen[d] {
			t.Errorf("%v has the digest of another", other)
		} else {
			seen[d] = true
		}
	}
	if again := k.Digest(salt); again != digest || digest == k.Digest([]byte("another")) {
		t.Error("a digest is one node's, and always the same")
	}
}
