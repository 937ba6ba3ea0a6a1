package controller

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// as is a client that may do what the keys may.
func (e *env) as(keys credentials.Keys) *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: &e.endpoint, Region: e.region, UsePathStyle: true, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken),
	})
}

// signers notes who signed which operation.
type signers struct {
	mu sync.Mutex
	by map[string][]string // operation → access key ids
}

func (s *signers) see(operation string, h http.Header) *http.Response {
	_, rest, _ := strings.Cut(h.Get("Authorization"), "Credential=")
	id, _, _ := strings.Cut(rest, "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[string][]string{}
	}
	s.by[operation] = append(s.by[operation], id)
	return nil
}

// deleteSeen deletes a volume, with one session that signs all of these operations, and returns the session.
func (p *process) deleteSeen(id volume.ID, operations ...string) credentials.Keys {
	p.e.t.Helper()
	seen := &signers{}
	p.answers(seen.see)
	p.delete(id)
	p.answers(nil)
	made := p.sessions.made()
	if len(made) != 1 {
		p.e.t.Fatalf("%d sessions were made for one deletion", len(made))
	}
	for _, operation := range operations {
		if ids := seen.by[operation]; len(ids) == 0 || slices.ContainsFunc(ids, func(id string) bool { return id != made[0].AccessKeyID }) {
			p.e.t.Errorf("%s was signed by %v, and the session is %s", operation, ids, made[0].AccessKeyID)
		}
	}
	return made[0]
}

// only is the error of a request.
func only[R any](_ R, err error) error { return err }

// denied fails the test unless all requests were denied.
func (e *env) denied(requests map[string]error) {
	e.t.Helper()
	for what, err := range requests {
		if code := backend.ErrorCode(err); code != "AccessDenied" {
			e.t.Errorf("%s: %v", what, err)
		}
	}
}

// A deletion is done with its session, and the session can do nothing to the neighbour, whatever it is asked for.
func TestADeletionsSessionCannotTouchTheNeighbour(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		p := e.process()
		id, neighbour := p.create("vol-1", "onDelete", "purge"), p.create("vol-10", "onDelete", "purge")
		e.put(id.Prefix+"data", id.Prefix+"data", neighbour.Prefix+"data", neighbour.Prefix+"data")
		e.upload(id.Prefix + "unfinished")
		e.upload(neighbour.Prefix + "unfinished")
		session := e.as(p.deleteSeen(id, "DeleteObjects", "ListObjectVersions", "PutObject"))
		e.same("versions of the volume", e.versions(id.Prefix), nil)

		before := append(e.versions(neighbour.Prefix), e.uploads()...)
		record := e.record("vol-10")
		e.denied(e.attacks(session, neighbour.Prefix, "vol-10"))
		e.same("the neighbour", append(e.versions(neighbour.Prefix), e.uploads()...), before)
		if e.record("vol-10") != record {
			t.Error("the neighbour's record was changed")
		}

		// What it is for it can do; else what it cannot would prove nothing.
		key := id.Prefix + "late"
		e.put(key)
		listed := only(session.ListObjectVersions(e.ctx(), &s3.ListObjectVersionsInput{Bucket: &e.bucket, Prefix: &id.Prefix}))
		removed := only(session.DeleteObject(e.ctx(), &s3.DeleteObjectInput{Bucket: &e.bucket, Key: &key}))
		if err := errors.Join(listed, removed); err != nil {
			t.Error(err)
		}
		p.delete(neighbour)
	})
}

// attacks are what a deletion's session must not be able to do, by what each is.
func (e *env) attacks(c *s3.Client, neighbour, name string) map[string]error {
	e.t.Helper()
	ctx, bucket, data, record := e.ctx(), &e.bucket, neighbour+"data", ".s3-csi/volumes/"+name
	listed, err := e.s3.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: bucket, Prefix: &neighbour})
	if err != nil || len(listed.Versions) == 0 {
		e.t.Fatalf("%d versions, %v", len(listed.Versions), err)
	}
	version := listed.Versions[0].VersionId
	other := e.in(e.bucket + "-other")
	e.makeBucket(other.bucket)
	other.put("data")
	list := func(prefix *string) error {
		return only(c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: bucket, Prefix: prefix}))
	}
	get := func(key string) error { return only(c.GetObject(ctx, &s3.GetObjectInput{Bucket: bucket, Key: &key})) }
	put := func(key, text string) error {
		return only(c.PutObject(ctx, &s3.PutObjectInput{Bucket: bucket, Key: &key, Body: strings.NewReader(text)}))
	}
	remove := func(bucket, key string, version *string) error {
		return only(c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &key, VersionId: version}))
	}
	found := map[string]error{
		"listing the neighbour":      list(&neighbour),
		"listing the bucket":         list(nil),
		"listing without the slash":  list(aws.String("vol-1")),
		"listing the records":        list(aws.String(".s3-csi/")),
		"listing versions":           only(c.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: bucket, Prefix: &neighbour})),
		"reading":                    get(data),
		"reading the record":         get(record),
		"writing":                    put(data, "x"),
		"writing the record":         put(record, "{}"),
		"deleting":                   remove(*bucket, data, nil),
		"deleting a version":         remove(*bucket, data, version),
		"deleting the record":        remove(*bucket, record, nil),
		"deleting its own record":    remove(*bucket, ".s3-csi/volumes/vol-1", nil),
		"deleting in another bucket": remove(other.bucket, "data", nil),
		"deleting the bucket":        only(c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: bucket})),
		"tagging the bucket": only(c.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{
			Bucket: bucket, Tagging: &types.Tagging{TagSet: []types.Tag{{Key: aws.String("a"), Value: aws.String("b")}}}})),
		"setting a bucket policy": only(c.PutBucketPolicy(ctx, &s3.PutBucketPolicyInput{Bucket: bucket, Policy: aws.String(
			`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":"arn:aws:s3:::` + e.bucket + `/*"}]}`)})),
	}
	out, err := c.DeleteObjects(ctx, &s3.DeleteObjectsInput{Bucket: bucket, Delete: &types.Delete{Objects: []types.ObjectIdentifier{{Key: &data},
		{Key: &data, VersionId: version}, {Key: &record}}}})
	if err == nil {
		for _, refused := range out.Errors {
			if aws.ToString(refused.Code) != "AccessDenied" {
				found["a multi-delete of "+aws.ToString(refused.Key)] = fmt.Errorf("code %s", aws.ToString(refused.Code))
			}
		}
		if len(out.Errors) != 3 {
			found["a multi-delete"] = fmt.Errorf("%d of 3 were refused", len(out.Errors))
		}
	} else {
		found["a multi-delete"] = err
	}
	uploads, err := e.s3.ListMultipartUploads(ctx, &s3.ListMultipartUploadsInput{Bucket: bucket})
	if err != nil || len(uploads.Uploads) == 0 {
		e.t.Fatalf("no upload to abort: %v", err)
	}
	for _, u := range uploads.Uploads {
		found["aborting the upload of "+*u.Key] = only(c.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: bucket, Key: u.Key, UploadId: u.UploadId}))
	}
	return found
}

// The same for a bucket volume: its session can delete the bucket and nothing else.
func TestABucketDeletionsSessionCannotTouchOtherBuckets(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		p := e.process()
		name := "v-" + e.bucket
		id := p.create(name, "bucketName", "", "onDelete", "purge")
		e.in(id.Bucket).put("data", ".s3-csi/what/somebody/wrote")
		e.put("data")
		c, ctx := e.as(p.deleteSeen(id, "DeleteObjects", "PutBucketTagging", "DeleteBucket")), e.ctx()
		e.gone(id.Bucket)
		e.denied(map[string]error{
			"listing":             only(c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &e.bucket})),
			"deleting":            only(c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &e.bucket, Key: aws.String("data")})),
			"deleting the bucket": only(c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &e.bucket})),
			"reading tags":        only(c.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &e.bucket})),
		})
		e.same("the other bucket", e.keysBelow(""), []string{"data"})
	})
}
