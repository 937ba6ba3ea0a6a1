//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"
)

var errAbsent = errors.New("there is no such object")

// store is the bucket. It sends the requests that the real program sends, and no others: ListObjectsV2, HeadObject,
// GetObject with a range, PutObject, the multipart requests and DeleteObject.
type store struct {
	client *s3.Client
	region string
	bucket *string
	owner  *string
	prefix string
	class  types.StorageClass
	sse    types.ServerSideEncryption
	key    *string
	part   int
	sum    types.ChecksumAlgorithm
}

// object is what the bucket says about one object.
type object struct {
	size  int64
	mtime time.Time
	etag  string
}

func newStore(ctx context.Context, a *arguments) (*store, error) {
	region := a.value("region")
	if region == "" {
		if region = os.Getenv("AWS_REGION"); region == "" {
			region = "us-east-1"
		}
	}
	options := []func(*config.LoadOptions) error{config.WithRegion(region), config.WithRetryer(func() aws.Retryer {
		return retry.NewStandard(func(o *retry.StandardOptions) { o.MaxBackoff = 2 * time.Second }) // tests wait for it
	})}
	if !a.has("user-agent-prefix") {
		options = append(options, config.WithAppID("mount-s3-standin"))
	}
	if file := a.value("ca-bundle"); file != "" {
		bundle, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		options = append(options, config.WithCustomCABundle(bytes.NewReader(bundle)))
	}
	if a.has("profile") {
		options = append(options, config.WithSharedConfigProfile(a.value("profile")))
	}
	if a.has("no-sign-request") {
		options = append(options, config.WithCredentialsProvider(aws.AnonymousCredentials{}))
	}
	sum := types.ChecksumAlgorithmCrc32c
	switch a.value("upload-checksums") {
	case "crc64nvme":
		sum = types.ChecksumAlgorithmCrc64nvme
	case "off":
		sum = ""
		options = append(options, config.WithRequestChecksumCalculation(aws.RequestChecksumCalculationWhenRequired))
	}
	cfg, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return nil, err
	}
	s := &store{
		region: region, bucket: &a.bucket, prefix: a.prefix,
		class: types.StorageClass(a.value("storage-class")), sse: types.ServerSideEncryption(a.value("sse")),
		part: int(min(a.number("write-part-size", a.number("part-size", 8<<20)), 1<<30)), sum: sum,
	}
	if owner := a.value("expected-bucket-owner"); owner != "" {
		s.owner = &owner
	}
	if key := a.value("sse-kms-key-id"); key != "" {
		s.key = &key
	}
	s.client = s3.NewFromConfig(cfg, func(o *s3.Options) {
		o.UsePathStyle = a.has("force-path-style")
		o.UseAccelerate = a.has("transfer-acceleration")
		if endpoint := a.value("endpoint-url"); endpoint != "" {
			o.BaseEndpoint = &endpoint
		}
	})
	return s, nil
}

// probe is the request that the real program makes before it serves.
func (s *store) probe(ctx context.Context) error {
	_, err := s.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{
		Bucket: s.bucket, ExpectedBucketOwner: s.owner, Prefix: &s.prefix, Delimiter: aws.String(""), MaxKeys: aws.Int32(0),
	})
	return err
}

func (s *store) head(ctx context.Context, key string) (object, error) {
	out, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &key})
	if absent(err) {
		return object{}, errAbsent
	}
	if err != nil {
		return object{}, err
	}
	return object{size: aws.ToInt64(out.ContentLength), mtime: aws.ToTime(out.LastModified), etag: aws.ToString(out.ETag)}, nil
}

// list gives the names of directories and the objects directly below a key that ends in "/" (or the empty one).
// most > 0 stops after so many.
func (s *store) list(ctx context.Context, below string, most int32) (dirs []string, objects map[string]object, err error) {
	in := &s3.ListObjectsV2Input{Bucket: s.bucket, ExpectedBucketOwner: s.owner, Prefix: &below, Delimiter: aws.String("/")}
	if most > 0 {
		in.MaxKeys = &most
	}
	objects = map[string]object{}
	for {
		out, err := s.client.ListObjectsV2(ctx, in)
		if err != nil {
			return nil, nil, err
		}
		for _, p := range out.CommonPrefixes {
			dirs = append(dirs, strings.TrimSuffix(strings.TrimPrefix(aws.ToString(p.Prefix), below), "/"))
		}
		for _, o := range out.Contents {
			name := strings.TrimPrefix(aws.ToString(o.Key), below)
			objects[name] = object{size: aws.ToInt64(o.Size), mtime: aws.ToTime(o.LastModified), etag: aws.ToString(o.ETag)}
		}
		if most > 0 || !aws.ToBool(out.IsTruncated) {
			return dirs, objects, nil
		}
		in.ContinuationToken = out.NextContinuationToken
	}
}

// read gets part of an object as it was when it was opened.
func (s *store) read(ctx context.Context, key, etag string, off, size int64) ([]byte, error) {
	out, err := s.client.GetObject(ctx, &s3.GetObjectInput{
		Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &key, IfMatch: &etag,
		Range: aws.String(fmt.Sprintf("bytes=%d-%d", off, off+size-1)),
	})
	if err != nil {
		return nil, err
	}
	defer out.Body.Close()
	return io.ReadAll(out.Body)
}

func (s *store) remove(ctx context.Context, key string) error {
	_, err := s.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &key})
	return err
}

// transfer is one object on its way: in one request if it is small, else in parts.
type transfer struct {
	store  *store
	key    string
	buffer []byte
	size   int64
	id     *string
	parts  []types.CompletedPart
}

func (t *transfer) write(ctx context.Context, data []byte) error {
	t.buffer = append(t.buffer, data...)
	t.size += int64(len(data))
	for len(t.buffer) > t.store.part {
		if err := t.send(ctx, t.buffer[:t.store.part]); err != nil {
			return err
		}
		t.buffer = append([]byte(nil), t.buffer[t.store.part:]...)
	}
	return nil
}

func (t *transfer) send(ctx context.Context, data []byte) error {
	s := t.store
	if t.id == nil {
		out, err := s.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
			Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &t.key, ChecksumAlgorithm: s.sum, StorageClass: s.class, ServerSideEncryption: s.sse, SSEKMSKeyId: s.key,
		})
		if err != nil {
			return err
		}
		t.id = out.UploadId
	}
	number := aws.Int32(int32(len(t.parts)) + 1)
	out, err := s.client.UploadPart(ctx, &s3.UploadPartInput{
		Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &t.key, UploadId: t.id, PartNumber: number, ChecksumAlgorithm: s.sum, Body: bytes.NewReader(data),
	})
	if err != nil {
		return err
	}
	t.parts = append(t.parts, types.CompletedPart{
		PartNumber: number, ETag: out.ETag, ChecksumCRC32C: out.ChecksumCRC32C, ChecksumCRC64NVME: out.ChecksumCRC64NVME,
	})
	return nil
}

// complete makes the object be there.
func (t *transfer) complete(ctx context.Context) error {
	s := t.store
	if t.id == nil {
		_, err := s.client.PutObject(ctx, &s3.PutObjectInput{
			Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &t.key, Body: bytes.NewReader(t.buffer), ChecksumAlgorithm: s.sum,
			StorageClass: s.class, ServerSideEncryption: s.sse, SSEKMSKeyId: s.key,
		})
		return err
	}
	if err := t.send(ctx, t.buffer); err != nil {
		return err
	}
	_, err := s.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
		Bucket: s.bucket, ExpectedBucketOwner: s.owner, Key: &t.key, UploadId: t.id,
		MultipartUpload: &types.CompletedMultipartUpload{Parts: t.parts},
	})
	return err
}

// abort gives up; what was sent in parts is removed.
func (t *transfer) abort(ctx context.Context) {
	if t.id != nil {
		_, _ = t.store.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{
			Bucket: t.store.bucket, ExpectedBucketOwner: t.store.owner, Key: &t.key, UploadId: t.id,
		})
	}
}

// absent tells a 404 apart from every other failure.
func absent(err error) bool {
	var status interface{ HTTPStatusCode() int }
	if errors.As(err, &status) && status.HTTPStatusCode() == http.StatusNotFound {
		return true
	}
	var api smithy.APIError
	return errors.As(err, &api) && api.ErrorCode() == "NoSuchKey"
}
