//go:build !lane || ordinary

package credentials

import (
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	scope "github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
)

// What EKS Pod Identity's agent gives is narrowed to the volume by taking on a role with it. The driver does that for backends
// that are AWS, so that here the order is made by hand.
func TestPodIdentityIsNarrowedByAnotherRole(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server := rigtest.StartServer(t, s3server.Options{})
	issuer, err := sts.NewIssuer()
	if err != nil {
		t.Fatal(err)
	}
	defer issuer.Close()
	eks, err := server.AddUser(ctx, "eks", everything)
	if err != nil {
		t.Fatal(err)
	}
	associated, err := server.SetRole(ctx, s3server.Role{Name: "associated", Policy: everything, Trust: s3server.Trust{Users: []string{"eks"}}})
	if err != nil {
		t.Fatal(err)
	}
	role, err := server.SetRole(ctx, s3server.Role{Name: "volumes", Policy: everything, Trust: s3server.Trust{Roles: []string{"associated"}}})
	if err != nil {
		t.Fatal(err)
	}
	agent, err := sts.NewAgent(sts.AgentOptions{Issuer: issuer, STS: server.STS(), Region: server.Region(), Keys: eks})
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	agent.Associate(namespace, account, associated)
	service := policy.Service{Name: policy.Versitygw, Endpoint: server.Endpoint(), Region: server.Region(), Root: server.Process.Keys(),
		STS: credentials.STSService{Endpoint: server.STS(), Region: server.Region()}, OtherRole: role, Principal: "*"}
	p := policy.NewPlace(t, service, true)
	document, err := scope.Scope{Bucket: p.Bucket, Prefix: policy.Prefix, Needs: scope.Needs{Delete: true}, AWS: true}.Session()
	if err != nil {
		t.Fatal(err)
	}
	order := func(audience string, lifetime time.Duration) credentials.Order {
		token, err := issuer.Token(sts.TokenRequest{Namespace: namespace, ServiceAccount: account, Audiences: []string{audience}, Lifetime: lifetime})
		if err != nil {
			t.Fatal(err)
		}
		return credentials.Order{Kind: credentials.PodIdentity, Token: token.Value, RoleARN: role, Name: "pod", Policy: document, Duration: time.Minute,
			STS: service.STS, AgentURI: agent.URL()}
	}
	keys, err := session.NewMaker("").Make(ctx, order(sts.PodIdentityAudience, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if lasts := time.Until(keys.Expires); lasts <= 0 || lasts > time.Minute {
		t.Errorf("the session lasts %s, want the role's minute", lasts)
	}
	policy.Try(t, p, policy.Writing, keys)
	for name, o := range map[string]credentials.Order{"expired": order(sts.PodIdentityAudience, -time.Minute), "of another audience": order(audience, time.Hour)} {
		_, err := session.NewMaker("").Make(ctx, o)
		if fault.KindOf(err) != fault.Unauthenticated && fault.KindOf(err) != fault.Denied {
			t.Errorf("a token that is %s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), o.Token) {
			t.Errorf("a token that is %s: the error shows it", name)
		}
	}
}
