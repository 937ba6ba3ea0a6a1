package policy_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/tests/minio"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/sts"
)

const (
	audience = "s3-csi"
	// everything is what the users and roles of the tests may do, so that whatever is refused is the session policy's doing.
	everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`
	everyS3    = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"arn:aws:s3:::*"}]}`
	lasts      = 15 * time.Minute // MinIO's least
)

// service is an S3 service with a security token service that enforces session policies.
type service struct {
	name             string
	endpoint, region string
	root             credentials.Keys
	// orders make sessions of everything, by the kind of how.
	orders    map[credentials.Kind]credentials.Order
	otherRole string        // which sessions of the orders' role may take on as far as the service is concerned
	principal string        // of the orders' role's sessions, in a bucket policy
	aws       bool          // it understands all of IAM's policy language
	buckets   *atomic.Int32 // made so far
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
	return service{"versitygw", p.Endpoint(), p.Region(), p.Keys(), map[credentials.Kind]credentials.Order{
		credentials.AssumeRole:      {Kind: credentials.AssumeRole, Keys: user, RoleARN: role, Name: "table", Duration: lasts, STS: at},
		credentials.FederationToken: {Kind: credentials.FederationToken, Keys: user, Name: "table", Duration: lasts, STS: at},
		credentials.WebIdentity:     {Kind: credentials.WebIdentity, Token: token, RoleARN: role, Name: "table", Duration: lasts, STS: at},
	}, other, "arn:aws:sts::000000000000:assumed-role/role/table", true, new(atomic.Int32)}
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
	return service{"MinIO", m.Endpoint(), m.Region(), m.Keys(), map[credentials.Kind]credentials.Order{
		credentials.AssumeRole:  {Kind: credentials.AssumeRole, Keys: user, Name: "table", Duration: lasts, STS: at},
		credentials.WebIdentity: {Kind: credentials.WebIdentity, Token: token, RoleARN: role, Name: "table", Duration: lasts, STS: at},
	}, role, "*", false, new(atomic.Int32)}, err
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

func (s service) client(k credentials.Keys) *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: aws.String(s.endpoint), Region: s.region, UsePathStyle: true, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(k.AccessKeyID, k.SecretAccessKey, k.SessionToken),
		HTTPClient:  &http.Client{Timeout: 30 * time.Second},
	})
}

// session makes a session with a policy, as the driver does.
func (s service) session(ctx context.Context, kind credentials.Kind, policy string) (credentials.Keys, error) {
	order := s.orders[kind]
	order.Policy = policy
	return session.Make(ctx, order)
}

// The volume of the tests, and what lies around it.
const (
	parent = "base/"
	prefix = parent + "vol-1/"
	beside = parent + "vol-10/"
	record = ".s3-csi/volumes/vol-1"
)

// place is what the calls of one table go to: two buckets with the same in them.
type place struct {
	service service
	root    *s3.Client
	keys    credentials.Keys // of the session
	own     string           // the volume's bucket
	other   string
}

// seeds are the objects of both buckets. Each holds its own key.
func seeds() []string {
	return []string{prefix + "a", prefix + "dir/b", prefix + "doomed", prefix + "doomed2", beside + "a", beside + "doomed", parent + "vol-1x", "top", record, ".s3-csi/volumes/vol-10"}
}

// place makes the buckets.
func (s service) place(t *testing.T, open bool) place {
	t.Helper()
	n := s.buckets.Add(1)
	p := place{service: s, root: s.client(s.root), own: fmt.Sprintf("own-%d", n), other: fmt.Sprintf("other-%d", n)}
	for _, bucket := range []string{p.own, p.other} {
		must(p.root.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: &bucket}))(t)
		for _, key := range seeds() {
			must(p.root.PutObject(t.Context(), &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader(key)}))(t)
		}
		if !open {
			continue
		}
		must(p.root.PutBucketPolicy(t.Context(), &s3.PutBucketPolicyInput{Bucket: &bucket, Policy: aws.String(
			`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"AWS":["` + s.principal + `"]},"Action":"s3:*","Resource":["arn:aws:s3:::` + bucket + `","arn:aws:s3:::` + bucket + `/*"]}]}`)}))(t)
	}
	return p
}

// stands tells whether an object still holds what it was made with.
func (p place) stands(ctx context.Context, bucket, key string) error {
	out, err := p.root.GetObject(ctx, &s3.GetObjectInput{Bucket: &bucket, Key: &key})
	if err != nil {
		return err
	}
	defer out.Body.Close()
	b := make([]byte, len(key)+1)
	n, _ := out.Body.Read(b)
	if got := string(b[:n]); got != key {
		return fmt.Errorf("holds %q", got)
	}
	return nil
}
