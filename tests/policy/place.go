package policy

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// The services.
const (
	Versitygw = "versitygw"
	MinIO     = "MinIO"
)

// Service is an S3 service with a security token service that enforces session policies.
type Service struct {
	Name             string // one of the above
	Endpoint, Region string
	Root             credentials.Keys
	STS              credentials.STSService
	OtherRole        string // an ARN; sessions of the role under test may take it on as far as the service is concerned
	Principal        string // of those sessions, in a bucket policy
}

func (s Service) client(k credentials.Keys) *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: aws.String(s.Endpoint), Region: s.Region, UsePathStyle: true, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(k.AccessKeyID, k.SecretAccessKey, k.SessionToken),
		HTTPClient:  &http.Client{Timeout: 30 * time.Second},
	})
}

// Prefix is the volume of the table; around it lies what it must not reach.
const Prefix = parent + "vol-1/"

const (
	parent = "base/"
	prefix = Prefix
	beside = parent + "vol-10/"
	record = ".s3-csi/volumes/vol-1"
)

// Place is what the calls of one table go to: two buckets with the same in them.
type Place struct {
	Service Service
	Bucket  string // the volume's

	other string
	root  *s3.Client
	keys  credentials.Keys // of the session under test
}

// seeds are the objects of both buckets. Each holds its own key.
func seeds() []string {
	return []string{prefix + "a", prefix + "dir/b", prefix + "doomed", prefix + "doomed2", beside + "a", beside + "doomed", parent + "vol-1x", "top", record,
		".s3-csi/volumes/vol-10"}
}

// NewPlace makes the buckets. open: a bucket policy lets the session do everything.
func NewPlace(t testing.TB, s Service, open bool) Place {
	t.Helper()
	name := strings.ToLower(rand.Text()[:10])
	p := Place{Service: s, root: s.client(s.Root), Bucket: "own-" + name, other: "other-" + name}
	for _, bucket := range []string{p.Bucket, p.other} {
		if _, err := p.root.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: &bucket}); err != nil {
			t.Fatal(err)
		}
		for _, key := range seeds() {
			if err := store(t.Context(), p.root, bucket, key, func(in *s3.PutObjectInput) { in.Body = strings.NewReader(key) }); err != nil {
				t.Fatal(err)
			}
		}
		if !open {
			continue
		}
		_, err := p.root.PutBucketPolicy(t.Context(), &s3.PutBucketPolicyInput{Bucket: &bucket, Policy: aws.String(
			`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"AWS":["` + s.Principal + `"]},"Action":"s3:*",` +
				`"Resource":["arn:aws:s3:::` + bucket + `","arn:aws:s3:::` + bucket + `/*"]}]}`)})
		if err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// stands reports whether an object still holds what it was made with.
func (p Place) stands(ctx context.Context, bucket, key string) error {
	out, err := p.root.GetObject(ctx, &s3.GetObjectInput{Bucket: &bucket, Key: &key})
	if err != nil {
		return err
	}
	defer out.Body.Close()
	b, err := io.ReadAll(out.Body)
	if err == nil && string(b) != key {
		err = fmt.Errorf("holds %q", b)
	}
	return err
}
