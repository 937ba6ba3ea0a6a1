package s3server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"

	csicredentials "github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// server is what Server and Process have in common.
type server interface {
	Endpoint() string
	Region() string
	Keys() csicredentials.Keys
	AddUser(ctx context.Context, name, policy string) (csicredentials.Keys, error)
	SetPolicy(ctx context.Context, name, policy string) error
	AddKey(ctx context.Context, name string) (csicredentials.Keys, error)
	RemoveKey(ctx context.Context, name, accessKeyID string) error
	Stop() error
}

func client(s server, k csicredentials.Keys) *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: aws.String(s.Endpoint()), Region: s.Region(), UsePathStyle: true, RetryMaxAttempts: 1,
		Credentials: credentials.NewStaticCredentialsProvider(k.AccessKeyID, k.SecretAccessKey, k.SessionToken),
	})
}

func put(ctx context.Context, c *s3.Client, bucket, key, body string, ifNoneMatch *string) error {
	_, err := c.PutObject(ctx, &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader(body), IfNoneMatch: ifNoneMatch})
	return err
}

func code(err error) string {
	if api, ok := errors.AsType[smithy.APIError](err); ok {
		return api.ErrorCode()
	}
	return ""
}

func TestServerDoesWhatTheDriverNeeds(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := s3server.Start(ctx, s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	exercise(ctx, t, s)
}

func TestProcessDoesWhatTheDriverNeedsBesideAnother(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for range 2 {
		p, err := s3server.StartProcess(ctx, s3server.Options{Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.Stop(); err != nil {
				t.Error(err)
			}
		})
		exercise(ctx, t, p)
	}
}

func exercise(ctx context.Context, t *testing.T, s server) {
	t.Helper()
	root := client(s, s.Keys())
	const bucket = "a-bucket"
	if _, err := root.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, root, bucket, "once", "1", aws.String("*")); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, root, bucket, "once", "2", aws.String("*")); code(err) != "PreconditionFailed" {
		t.Errorf("a second conditional write: %v, want PreconditionFailed", err)
	}
	_, err := root.PutBucketVersioning(ctx, &s3.PutBucketVersioningInput{Bucket: aws.String(bucket),
		VersioningConfiguration: &types.VersioningConfiguration{Status: types.BucketVersioningStatusEnabled}})
	if err != nil {
		t.Errorf("versioning: %v", err)
	}

	keys, err := s.AddUser(ctx, "alice", prefixPolicy(bucket, "alice/"))
	if err != nil {
		t.Fatal(err)
	}
	alice := client(s, keys)
	if err := put(ctx, alice, bucket, "alice/x", "x", nil); err != nil {
		t.Errorf("inside her policy: %v", err)
	}
	if err := put(ctx, alice, bucket, "alice2/x", "x", nil); code(err) != "AccessDenied" {
		t.Errorf("outside her policy: %v, want AccessDenied", err)
	}
	second, err := s.AddKey(ctx, "alice")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveKey(ctx, "alice", keys.AccessKeyID); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, alice, bucket, "alice/x", "x", nil); code(err) != "InvalidAccessKeyId" {
		t.Errorf("with a removed key: %v, want InvalidAccessKeyId", err)
	}
	alice = client(s, second)
	if err := put(ctx, alice, bucket, "alice/x", "x", nil); err != nil {
		t.Errorf("with the new key: %v", err)
	}
	if err := s.SetPolicy(ctx, "alice", prefixPolicy(bucket, "other/")); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, alice, bucket, "alice/x", "x", nil); code(err) != "AccessDenied" {
		t.Errorf("after her policy moved: %v, want AccessDenied", err)
	}
}

func prefixPolicy(bucket, prefix string) string {
	return `{"Version":"2012-10-17","Statement":[
		{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::` + bucket + `","Condition":{"StringLike":{"s3:prefix":"` + prefix + `*"}}},
		{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:DeleteObject"],"Resource":"arn:aws:s3:::` + bucket + `/` + prefix + `*"}]}`
}

func TestServerSpeaksTLS(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cert, key, err := s3server.WriteCert(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	p, err := s3server.StartProcess(ctx, s3server.Options{Dir: t.TempDir(), CertFile: cert, KeyFile: key})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}()
	pem, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	c := s3.New(s3.Options{
		BaseEndpoint: aws.String(p.Endpoint()), Region: p.Region(), UsePathStyle: true,
		HTTPClient:  &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}},
		Credentials: credentials.NewStaticCredentialsProvider(p.Keys().AccessKeyID, p.Keys().SecretAccessKey, ""),
	})
	if _, err := c.ListBuckets(ctx, &s3.ListBucketsInput{}); err != nil {
		t.Error(err)
	}
}
