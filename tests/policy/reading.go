package policy

import (
	"context"
	"io"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

// mounts see the volume; wholes see all of the bucket; wide lists all of it.
func mounts() []Scope { return []Scope{Writing, Keeping, Reading, Whole, WholeRead} }
func wholes() []Scope { return []Scope{Whole, WholeRead} }
func wide() []Scope   { return append(wholes(), MeasuringWhole) }

type call = func(ctx context.Context, c *s3.Client, p Place) error

func list(prefix *string, delimiter string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		in := &s3.ListObjectsV2Input{Bucket: &p.Bucket, Prefix: prefix}
		if delimiter != "" {
			in.Delimiter = &delimiter
		}
		_, err := c.ListObjectsV2(ctx, in)
		return err
	}
}

func listings() []row {
	at := func(s string) *string { return &s }
	return []row{
		{"list the volume", AllScopes(), list(at(prefix), ""), nil},
		{"list the volume's root", AllScopes(), list(at(prefix), "/"), nil},
		{"list a directory", AllScopes(), list(at(prefix+"dir/"), "/"), nil},
		{"list as Mountpoint does at its start", AllScopes(), func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &p.Bucket, Prefix: at(prefix), Delimiter: at(""), MaxKeys: aws.Int32(0)})
			return err
		}, nil},
		{"list with the first version of the call", AllScopes(), func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.ListObjects(ctx, &s3.ListObjectsInput{Bucket: &p.Bucket, Prefix: at(prefix)})
			return err
		}, nil},
		{"list the volume without its slash", wide(), list(at(prefix[:len(prefix)-1]), ""), nil},
		{"list the neighbour", wide(), list(at(beside), ""), nil},
		{"list the parent", wide(), list(at(parent), ""), nil},
		{"list the parent's directories", wide(), list(at(parent), "/"), nil},
		{"list an empty prefix", wide(), list(at(""), ""), nil},
		{"list without a prefix", wide(), list(nil, ""), nil},
		{"list the top", wide(), list(nil, "/"), nil},
		{"list the records", nil, list(at(".s3-csi/"), ""), nil},
		{"list below the records", nil, list(at(".s3-csi/volumes/"), "/"), nil},
		{"list another bucket", nil, func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &p.other, Prefix: at(prefix)})
			return err
		}, nil},
		{"list the volume's versions", []Scope{Deleting}, func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: &p.Bucket, Prefix: at(prefix)})
			return err
		}, map[string]oddity{MinIO: {AllScopes(), refused}}}, // there who may list may list versions
		{"list all versions", nil, func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: &p.Bucket})
			return err
		}, map[string]oddity{MinIO: {wide(), refused}}},
		{"list unfinished uploads", []Scope{Deleting}, func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.ListMultipartUploads(ctx, &s3.ListMultipartUploadsInput{Bucket: &p.Bucket, Prefix: at(prefix)})
			return err
		}, nil},
		{"ask for the bucket", wide(), func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &p.Bucket})
			return err
		}, nil},
		{"ask for another bucket", nil, func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &p.other})
			return err
		}, nil},
	}
}

func get(key string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error { return fetch(ctx, c, p.Bucket, key) }
}

func fetch(ctx context.Context, c *s3.Client, bucket, key string) error {
	out, err := c.GetObject(ctx, &s3.GetObjectInput{Bucket: &bucket, Key: &key})
	if err != nil {
		return err
	}
	defer out.Body.Close()
	_, err = io.Copy(io.Discard, out.Body)
	return err
}

func head(key string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		_, err := c.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &p.Bucket, Key: &key})
		return err
	}
}

func reads() []row {
	return []row{
		{"read", mounts(), get(prefix + "a"), nil},
		{"read in a directory", mounts(), get(prefix + "dir/b"), nil},
		{"ask for an object", mounts(), head(prefix + "a"), nil},
		{"ask for a missing object", mounts(), head(prefix + "missing"), nil},
		{"read a part", mounts(), func(ctx context.Context, c *s3.Client, p Place) error {
			out, err := c.GetObject(ctx, &s3.GetObjectInput{Bucket: &p.Bucket, Key: aws.String(prefix + "a"), Range: aws.String("bytes=0-1")})
			if err != nil {
				return err
			}
			return out.Body.Close()
		}, nil},
		{"read the neighbour's", wholes(), get(beside + "a"), nil},
		{"ask for the neighbour's", wholes(), head(beside + "a"), nil},
		{"ask for the neighbour's missing one", wholes(), head(beside + "missing"), nil},
		{"read what begins alike", wholes(), get(parent + "vol-1x"), nil},
		{"read at the top", wholes(), get("top"), nil},
		{"read the volume's record", []Scope{Deleting, Measuring}, get(record), nil},
		{"read another's record", nil, get(".s3-csi/volumes/vol-10"), nil},
		{"read another bucket's", nil, func(ctx context.Context, c *s3.Client, p Place) error { return fetch(ctx, c, p.other, prefix+"a") }, nil},
		// versitygw takes such a key for the one that it leads to, before it judges; MinIO takes none. On AWS it is a name like
		// another, below the volume's prefix.
		{"read out of the volume by ..", wholes(), get(prefix + "../vol-10/a"), map[string]oddity{MinIO: {nil, absurd}}},
		{"read out of the bucket by ..", nil, func(ctx context.Context, c *s3.Client, p Place) error {
			return fetch(ctx, c, p.Bucket, prefix+"../../../"+p.other+"/top")
		}, map[string]oddity{Versitygw: {nil, absurd}, MinIO: {nil, absurd}}},
	}
}
