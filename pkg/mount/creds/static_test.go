package creds

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A client that cannot get other keys while it runs gets only keys of a secret, which do not expire.
func TestStaticKeysAreOfASecretAndDoNotExpire(t *testing.T) {
	d := client.Declaration{
		Program: "s3fs", Fuse: client.FusePath, Credentials: client.CredentialsStatic, Drain: client.DrainExits, Cache: client.CacheNone,
		Operands: []string{"${bucket}", "${mountpoint}"},
	}
	cl, err := d.Client("s3fs", "clients.s3fs")
	must(t, err)
	user := credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}
	session := user
	session.SessionToken = "c"
	for what, tc := range map[string]struct {
		source, scope string
		keys          credentials.Keys
		kind          credentials.Kind
		want          bool
	}{
		"keys of a user":        {credentials.SourceSecret, volume.ScopeOff, user, credentials.AsIs, true},
		"without a service":     {credentials.SourceSecret, volume.ScopeAuto, user, credentials.AsIs, true},
		"keys of a session":     {credentials.SourceSecret, volume.ScopeOff, session, credentials.AsIs, false},
		"the driver's own keys": {credentials.SourceDriver, volume.ScopeOff, user, credentials.AsIs, false},
		"a role":                {credentials.SourceSecret, volume.ScopeOff, user, credentials.AssumeRole, false},
		"a federation token":    {credentials.SourceSecret, volume.ScopeAuto, user, credentials.FederationToken, false},
		"a token of the pod":    {credentials.SourceWorkload, volume.ScopeOff, credentials.Keys{}, credentials.WebIdentity, false},
		"a required scope":      {credentials.SourceSecret, volume.ScopeRequired, user, credentials.AsIs, false},
	} {
		tokens := &mounttest.Tokens{Kind: tc.kind}
		p := New(mounttest.S3{}, tokens, client.Registry{Source: client.NewSet([]client.Client{cl}), Default: client.Default}, nil)
		_, err := p.Plan(t.Context(), mount.Request{Source: tc.source, Keys: tc.keys}, mount.Spec{Bucket: "bucket", Client: "s3fs", Source: tc.source,
			Scope: tc.scope})
		if tc.want && err != nil || !tc.want && !fault.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", what, err)
		}
		if n := tokens.Sessions(); n != 0 {
			t.Errorf("%s: %d sessions were made", what, n)
		}
		if _, err := p.Plan(t.Context(), mount.Request{Source: tc.source, Keys: tc.keys}, mount.Spec{Bucket: "bucket", Source: tc.source,
			Scope: tc.scope}); err != nil {
			t.Errorf("%s, with a client that uses the endpoint: %v", what, err)
		}
	}
}
