package minio_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
)

func TestServerStoresAndStops(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	s, err := minio.Start(ctx, t.TempDir())
	if errors.Is(err, minio.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := s3.New(s3.Options{
		BaseEndpoint: aws.String(s.Endpoint()), Region: s.Region(), UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider(s.Keys().AccessKeyID, s.Keys().SecretAccessKey, ""),
	})
	if _, err := c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String("a-bucket")}); err != nil {
		t.Error(err)
	}
	_, err = c.PutObject(ctx, &s3.PutObjectInput{Bucket: aws.String("a-bucket"), Key: aws.String("x"), Body: strings.NewReader("x"),
		ServerSideEncryption: "AES256"})
	if err != nil {
		t.Error(err)
	}
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
	if strings.Contains(s.Output(), s.Keys().SecretAccessKey) {
		t.Error("its output shows its secret")
	}
}
