package s3server_test

import (
	"context"
	"errors"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"

	csicredentials "github.com/s3-csi/s3-csi-driver/pkg/credentials"
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

func prefixPolicy(bucket, prefix string) string {
	return `{"Version":"2012-10-17","Statement":[
		{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::` + bucket + `","Condition":{"StringLike":{"s3:prefix":"` + prefix + `*"}}},
		{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:DeleteObject"],"Resource":"arn:aws:s3:::` + bucket + `/` + prefix + `*"}]}`
}
