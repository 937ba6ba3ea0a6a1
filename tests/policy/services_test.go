package policy_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
	table "github.com/s3-csi/s3-csi-driver/tests/policy"
)

const (
	audience = "s3-csi"
	// everything is what the users and roles of the tests may do, so that whatever is refused is the session policy's doing.
	everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`
	everyS3    = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"arn:aws:s3:::*"}]}`
	lasts      = 15 * time.Minute // MinIO's least
)

// service is one of the table's, with the ways to its sessions.
type service struct {
	table.Service

	// orders make sessions of everything, by the kind of how.
	orders map[credentials.Kind]credentials.Order
	aws    bool // it understands all of IAM's policy language

	process *s3server.Process // nil: MinIO
}

// services starts them; MinIO only where there is one.
func services(t *testing.T) []service {
	t.Helper()
	issuer, err := sts.NewIssuer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { issuer.Close() })
	token, err := issuer.Token(sts.TokenRequest{Namespace: "apps", ServiceAccount: "web", Audiences: []string{audience}})
	if err != nil {
		t.Fatal(err)
	}
	all := []service{versitygw(t, issuer, token.Value)}
	m, err := minioService(t, issuer, token.Value)
	if errors.Is(err, minio.ErrMissing) {
		t.Log(err)
		return all
	}
	if err != nil {
		t.Fatal(err)
	}
	return append(all, m)
}

func versitygw(t *testing.T, issuer *sts.Issuer, token string) service {
	t.Helper()
	p, err := s3server.StartProcess(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	ctx := t.Context()
	user := must(p.AddUser(ctx, "alice", everything))(t)
	role := must(p.SetRole(ctx, s3server.Role{Name: "role", Policy: everything, Trust: s3server.Trust{
		Users: []string{"alice"}, Issuers: []s3server.TrustedIssuer{{URL: issuer.URL()}}}}))(t)
	other := must(p.SetRole(ctx, s3server.Role{Name: "other", Policy: everything, Trust: s3server.Trust{Roles: []string{"role"}}}))(t)
	if err := p.AddIssuer(ctx, issuer.URL(), audience); err != nil {
		t.Fatal(err)
	}
	at := credentials.STSService{Endpoint: p.STS(), Region: p.Region()}
	return service{table.Service{Name: table.Versitygw, Endpoint: p.Endpoint(), Region: p.Region(), Root: p.Keys(), STS: at, OtherRole: other,
		Principal: "arn:aws:sts::000000000000:assumed-role/role/table"}, map[credentials.Kind]credentials.Order{
		credentials.AssumeRole:      {Kind: credentials.AssumeRole, Keys: user, RoleARN: role, Name: "table", Duration: lasts, STS: at},
		credentials.FederationToken: {Kind: credentials.FederationToken, Keys: user, Name: "table", Duration: lasts, STS: at},
		credentials.WebIdentity:     {Kind: credentials.WebIdentity, Token: token, RoleARN: role, Name: "table", Duration: lasts, STS: at},
	}, true, p}
}

func minioService(t *testing.T, issuer *sts.Issuer, token string) (service, error) {
	t.Helper()
	m, err := minio.Start(t.Context(), t.TempDir(), minio.OpenID(issuer.URL(), audience, "readwrite")...)
	if err != nil {
		return service{}, err
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	})
	user, err := m.AddUser(t.Context(), "alice", everyS3)
	at := credentials.STSService{Endpoint: m.Endpoint(), Region: m.Region()}
	role := minio.RoleARN(audience)
	return service{table.Service{Name: table.MinIO, Endpoint: m.Endpoint(), Region: m.Region(), Root: m.Keys(), STS: at, OtherRole: role, Principal: "*"},
		map[credentials.Kind]credentials.Order{
			credentials.AssumeRole:  {Kind: credentials.AssumeRole, Keys: user, Name: "table", Duration: lasts, STS: at},
			credentials.WebIdentity: {Kind: credentials.WebIdentity, Token: token, RoleARN: role, Name: "table", Duration: lasts, STS: at},
		}, false, nil}, err
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// session makes a session with a policy, as the driver does.
func (s service) session(ctx context.Context, kind credentials.Kind, policy string) (credentials.Keys, error) {
	order := s.orders[kind]
	order.Policy = policy
	return session.NewMaker("").Make(ctx, order)
}
