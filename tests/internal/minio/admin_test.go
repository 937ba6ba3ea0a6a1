package minio_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/aws-sdk-go-v2/service/sts/types"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	fakests "github.com/s3-csi/s3-csi-driver/tests/internal/sts"
)

const (
	bucket   = "a-bucket"
	audience = "s3-csi"
	scoped   = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:PutObject","Resource":"arn:aws:s3:::a-bucket/in/*"}]}`
	all      = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"arn:aws:s3:::*"}]}`
)

func put(ctx context.Context, s *minio.Server, k credentials.Keys, key string) string {
	c := s3.New(s3.Options{
		BaseEndpoint: aws.String(s.Endpoint()), Region: s.Region(), UsePathStyle: true, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(k.AccessKeyID, k.SecretAccessKey, k.SessionToken),
	})
	_, err := c.PutObject(ctx, &s3.PutObjectInput{Bucket: aws.String(bucket), Key: &key, Body: strings.NewReader("x")})
	if api, ok := errors.AsType[smithy.APIError](err); ok {
		return api.ErrorCode()
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

func keysOf(c *types.Credentials) credentials.Keys {
	return credentials.Keys{AccessKeyID: *c.AccessKeyId, SecretAccessKey: *c.SecretAccessKey, SessionToken: *c.SessionToken}
}

func TestUsersAndTokensMakeScopedSessions(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	issuer, err := fakests.NewIssuer()
	if err != nil {
		t.Fatal(err)
	}
	defer issuer.Close()
	s, err := minio.Start(ctx, t.TempDir(), minio.OpenID(issuer.URL(), audience, "readwrite")...)
	if errors.Is(err, minio.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	}()
	root := s3.New(s3.Options{BaseEndpoint: aws.String(s.Endpoint()), Region: s.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(s.Keys().AccessKeyID, s.Keys().SecretAccessKey, "")})
	if _, err := root.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	user, err := s.AddUser(ctx, "alice", all)
	if err != nil {
		t.Fatal(err)
	}
	if got := put(ctx, s, user, "x"); got != "" {
		t.Errorf("a user: %s", got)
	}
	service := sts.New(sts.Options{BaseEndpoint: aws.String(s.Endpoint()), Region: s.Region(), RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(user.AccessKeyID, user.SecretAccessKey, "")})
	assumed, err := service.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: aws.String("arn:aws:iam::123456789012:role/any"), RoleSessionName: aws.String("any"),
		Policy: aws.String(scoped), DurationSeconds: aws.Int32(900)})
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Token(fakests.TokenRequest{Audiences: []string{audience}})
	if err != nil {
		t.Fatal(err)
	}
	identified, err := service.AssumeRoleWithWebIdentity(ctx, &sts.AssumeRoleWithWebIdentityInput{RoleArn: aws.String(minio.RoleARN(audience)),
		RoleSessionName:  aws.String("any"),
		WebIdentityToken: &token.Value, Policy: aws.String(scoped), DurationSeconds: aws.Int32(900)})
	if err != nil {
		t.Fatal(err)
	}
	for kind, c := range map[string]*types.Credentials{"AssumeRole": assumed.Credentials, "AssumeRoleWithWebIdentity": identified.Credentials} {
		if got := put(ctx, s, keysOf(c), "in/x"); got != "" {
			t.Errorf("%s: inside: %s", kind, got)
		}
		if got := put(ctx, s, keysOf(c), "out/x"); got != "AccessDenied" {
			t.Errorf("%s: outside: %q, want AccessDenied", kind, got)
		}
	}
	next, err := s.SetSecret(ctx, "alice")
	if err != nil {
		t.Fatal(err)
	}
	if got := put(ctx, s, user, "x"); got != "SignatureDoesNotMatch" {
		t.Errorf("the replaced secret: %q, want SignatureDoesNotMatch", got)
	}
	if got := put(ctx, s, next, "x"); got != "" {
		t.Errorf("the new secret: %s", got)
	}
	if err := s.RemoveUser(ctx, "alice"); err != nil {
		t.Fatal(err)
	}
	if got := put(ctx, s, next, "x"); got != "InvalidAccessKeyId" {
		t.Errorf("a removed user: %q, want InvalidAccessKeyId", got)
	}
}
