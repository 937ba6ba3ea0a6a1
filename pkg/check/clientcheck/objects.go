package clientcheck

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// Below implements Objects for a prefix of a bucket.
type Below struct {
	Bucket buckets.Bucket
	Opener *buckets.Opener
	Prefix string
}

// maxObject bounds what Get reads: no file of the check that is read whole is as large.
const maxObject = 16 << 20

// Get implements Objects.
func (b Below) Get(ctx context.Context, key string) ([]byte, error) {
	key = b.Prefix + key
	out, err := b.Bucket.Client.GetObject(ctx, &s3.GetObjectInput{Bucket: b.Bucket.Name(), Key: &key})
	if backend.IsNotFound(err) {
		return nil, fmt.Errorf("there is no object %s: %w", key, fs.ErrNotExist)
	}
	if err != nil {
		return nil, backend.Classify(err, "read "+key)
	}
	defer out.Body.Close()
	return io.ReadAll(io.LimitReader(out.Body, maxObject))
}

// Size implements Objects.
func (b Below) Size(ctx context.Context, key string) (int64, error) {
	key = b.Prefix + key
	out, err := b.Bucket.Client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: b.Bucket.Name(), Key: &key})
	if err != nil {
		return 0, backend.Classify(err, "head "+key)
	}
	return aws.ToInt64(out.ContentLength), nil
}

// Put implements Objects.
func (b Below) Put(ctx context.Context, key string, data []byte) error {
	key = b.Prefix + key
	_, err := b.Bucket.Client.PutObject(ctx, &s3.PutObjectInput{Bucket: b.Bucket.Name(), Key: &key, Body: bytes.NewReader(data)})
	if err != nil {
		return backend.Classify(err, "write "+key)
	}
	return nil
}

// Remove implements Objects.
func (b Below) Remove(ctx context.Context) error {
	var errs []error
	err := b.Opener.UploadsBelow(ctx, b.Bucket, b.Prefix, func(key, id string) error {
		_, err := b.Bucket.Client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: b.Bucket.Name(), Key: &key, UploadId: &id})
		if err != nil && !backend.IsNotFound(err) {
			errs = append(errs, backend.Classify(err, "abort the upload of "+key))
		}
		return nil
	})
	if err != nil && !backend.IsNotImplemented(err) {
		errs = append(errs, backend.Classify(err, "list unfinished uploads below "+b.Prefix))
	}
	if err := check.RemoveBelow(ctx, b.Bucket, b.Prefix); err != nil {
		errs = append(errs, backend.Classify(err, "delete the objects below "+b.Prefix+" in bucket "+*b.Bucket.Name()))
	}
	return errors.Join(errs...)
}
