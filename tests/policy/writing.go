package policy

import (
	"context"
	"errors"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"
)

func writers() []Scope { return []Scope{Writing, Keeping, Whole} }

func put(key string, change ...func(*s3.PutObjectInput)) call {
	return func(ctx context.Context, c *s3.Client, p Place) error { return store(ctx, c, p.Bucket, key, change...) }
}

func store(ctx context.Context, c *s3.Client, bucket, key string, change ...func(*s3.PutObjectInput)) error {
	in := &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader("written")}
	for _, f := range change {
		f(in)
	}
	_, err := c.PutObject(ctx, in)
	return err
}

// upload makes an object of one part, and takes an upload back.
func upload(key string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		begun, err := c.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: &p.Bucket, Key: &key})
		if err != nil {
			return err
		}
		part, err := c.UploadPart(ctx, &s3.UploadPartInput{Bucket: &p.Bucket, Key: &key, UploadId: begun.UploadId, PartNumber: aws.Int32(1),
			Body: strings.NewReader("part")})
		if err != nil {
			return err
		}
		_, err = c.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{Bucket: &p.Bucket, Key: &key, UploadId: begun.UploadId,
			MultipartUpload: &types.CompletedMultipartUpload{Parts: []types.CompletedPart{{ETag: part.ETag, PartNumber: aws.Int32(1)}}}})
		if err != nil {
			return err
		}
		if begun, err = c.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: &p.Bucket, Key: &key}); err != nil {
			return err
		}
		_, err = c.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &p.Bucket, Key: &key, UploadId: begun.UploadId})
		return err
	}
}

// uploadOf does something with an upload that another user has begun.
func uploadOf(key string, do func(ctx context.Context, c *s3.Client, p Place, id *string) error) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		begun, err := p.root.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: &p.Bucket, Key: &key})
		if err != nil {
			return errors.New("the tests' own upload: " + err.Error())
		}
		return do(ctx, c, p, begun.UploadId)
	}
}

func writes() []row {
	abort := func(key string) call {
		return uploadOf(key, func(ctx context.Context, c *s3.Client, p Place, id *string) error {
			_, err := c.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &p.Bucket, Key: &key, UploadId: id})
			return err
		})
	}
	tagged := func(in *s3.PutObjectInput) { in.Tagging = aws.String("a=b") }
	public := func(in *s3.PutObjectInput) { in.ACL = types.ObjectCannedACLPublicRead }
	return []row{
		{"write", writers(), put(prefix + "new"), nil},
		{"write in a directory", writers(), put(prefix + "new-dir/new"), nil},
		{"write over", writers(), put(prefix + "a"), nil},
		{"write what is not there yet", writers(), put(prefix+"once", func(in *s3.PutObjectInput) { in.IfNoneMatch = aws.String("*") }), nil},
		{"write a directory", writers(), put(prefix+"empty/", func(in *s3.PutObjectInput) { in.Body = strings.NewReader("") }), nil},
		{"upload in parts", writers(), upload(prefix + "parts"), nil},
		{"upload to the neighbour in parts", []Scope{Whole}, upload(beside + "parts"), nil},
		{"add a part to the neighbour's upload", []Scope{Whole}, uploadOf(beside+"upload", func(ctx context.Context, c *s3.Client, p Place, id *string) error {
			_, err := c.UploadPart(ctx, &s3.UploadPartInput{Bucket: &p.Bucket, Key: aws.String(beside + "upload"), UploadId: id, PartNumber: aws.Int32(1),
				Body: strings.NewReader("part")})
			return err
		}), nil},
		{"abort an upload", []Scope{Writing, Keeping, Whole, Deleting}, abort(prefix + "upload"), nil},
		{"abort the neighbour's upload", []Scope{Whole}, abort(beside + "upload2"), nil},
		{"write to the neighbour", []Scope{Whole}, put(beside + "new"), nil},
		{"write beside, alike", []Scope{Whole}, put(parent + "vol-1y"), nil},
		{"write at the top", []Scope{Whole}, put("top2"), nil},
		{"write the volume's record", []Scope{Deleting}, put(record), nil},
		{"write another's record", nil, put(".s3-csi/volumes/vol-10"), nil},
		{"write to another bucket", nil, func(ctx context.Context, c *s3.Client, p Place) error { return store(ctx, c, p.other, prefix+"new") }, nil},
		{"write out of the volume by ..", []Scope{Whole}, put(prefix + "../vol-10/a"), map[string]oddity{MinIO: {nil, absurd}}},
		// MinIO asks for no other action than that of writing where an object comes with tags.
		{"write with tags", nil, put(prefix+"tagged", tagged), map[string]oddity{MinIO: {writers(), refused}}},
		// Neither has ACLs of objects: they are ignored.
		{"write for everybody", nil, put(prefix+"public", public), map[string]oddity{Versitygw: {writers(), refused}, MinIO: {writers(), refused}}},
	}
}

// cp copies between buckets, which are "own" or "other".
func cp(fromBucket, from, toBucket, to string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		_, err := c.CopyObject(ctx, &s3.CopyObjectInput{Bucket: p.named(toBucket), Key: &to, CopySource: aws.String(*p.named(fromBucket) + "/" + from)})
		return err
	}
}

func (p Place) named(bucket string) *string {
	if bucket == "own" {
		return &p.Bucket
	}
	return &p.other
}

func copies() []row {
	return []row{
		{"copy within", writers(), cp("own", prefix+"a", "own", prefix+"copy"), nil},
		{"copy from the neighbour", []Scope{Whole}, cp("own", beside+"a", "own", prefix+"stolen"), nil},
		{"copy to the neighbour", []Scope{Whole}, cp("own", prefix+"a", "own", beside+"planted"), nil},
		{"copy from another bucket", nil, cp("other", prefix+"a", "own", prefix+"stolen"), nil},
		{"copy to another bucket", nil, cp("own", prefix+"a", "other", prefix+"planted"), nil},
		{"copy a record", nil, cp("own", ".s3-csi/volumes/vol-10", "own", prefix+"stolen"), nil},
		{"copy over a record", nil, cp("own", prefix+"a", "own", ".s3-csi/volumes/vol-10"), nil},
		{"copy a part within", writers(), copyPart("own", prefix+"a"), nil},
		{"copy a part from the neighbour", []Scope{Whole}, copyPart("own", beside+"a"), nil},
		{"copy a part from another bucket", nil, copyPart("other", prefix+"a"), nil},
	}
}

func copyPart(bucket, from string) call {
	return uploadOf(prefix+"part-copy", func(ctx context.Context, c *s3.Client, p Place, id *string) error {
		_, err := c.UploadPartCopy(ctx, &s3.UploadPartCopyInput{Bucket: &p.Bucket, Key: aws.String(prefix + "part-copy"), UploadId: id, PartNumber: aws.Int32(1),
			CopySource: aws.String(*p.named(bucket) + "/" + from)})
		return err
	})
}

func remove(bucket, key string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		_, err := c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: p.named(bucket), Key: &key})
		return err
	}
}

// removeAll deletes several objects in one call. A call that is answered with denials of all keys, and only these, was refused;
// one with a denial of some is reported as such.
func removeAll(bucket string, keys ...string) call {
	return func(ctx context.Context, c *s3.Client, p Place) error {
		var objects []types.ObjectIdentifier
		for _, k := range keys {
			objects = append(objects, types.ObjectIdentifier{Key: &k})
		}
		out, err := c.DeleteObjects(ctx, &s3.DeleteObjectsInput{Bucket: p.named(bucket), Delete: &types.Delete{Objects: objects}})
		switch {
		case err != nil || len(out.Errors) == 0:
			return err
		case len(out.Errors) == len(keys):
			return &smithy.GenericAPIError{Code: aws.ToString(out.Errors[0].Code), Message: aws.ToString(out.Errors[0].Message)}
		default:
			return errors.New("some keys: " + aws.ToString(out.Errors[0].Key) + ": " + aws.ToString(out.Errors[0].Code))
		}
	}
}

func removals() []row {
	removers := []Scope{Writing, Whole, Deleting}
	return []row{
		{"delete", removers, remove("own", prefix+"doomed"), nil},
		{"delete what is not there", removers, remove("own", prefix+"missing"), nil},
		{"delete many", removers, removeAll("own", prefix+"doomed2", prefix+"new"), nil},
		{"delete the neighbour's", []Scope{Whole}, remove("own", beside+"doomed"), nil},
		{"delete many of the neighbour's", []Scope{Whole}, removeAll("own", beside+"doomed", beside+"new"), nil},
		{"delete the volume's record", nil, remove("own", record), nil},
		{"delete another's record", nil, remove("own", ".s3-csi/volumes/vol-10"), nil},
		{"delete many records", nil, removeAll("own", record, ".s3-csi/volumes/vol-10"), nil},
		{"delete another bucket's", nil, remove("other", prefix+"a"), nil},
		{"delete many of another bucket's", nil, removeAll("other", prefix+"a", prefix+"dir/b"), nil},
	}
}
