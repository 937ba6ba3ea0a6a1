package controller

import (
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

func (s *signers) see(operation string, h http.Header) {
	_, rest, _ := strings.Cut(h.Get("Authorization"), "Credential=")
	id, _, _ := strings.Cut(rest, "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[string][]string{}
	}
	s.by[operation] = append(s.by[operation], id)
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
		seen := &signers{}
		p.hooks.set(func(h *hooks) { h.header = seen.see })
		p.delete(id)
		p.hooks.set(func(h *hooks) { h.header = nil })
		e.same("versions of the volume", e.versionsIn(e.bucket, id.Prefix), nil)
		made := p.sessions.made()
		if len(made) != 1 {
			t.Fatalf("%d sessions were made for one deletion", len(made))
		}
		for _, operation := range []string{"DeleteObjects", "ListObjectVersions", "PutObject"} {
			if ids := seen.by[operation]; len(ids) == 0 || slices.ContainsFunc(ids, func(id string) bool { return id != made[0].AccessKeyID }) {
				t.Errorf("%s was signed by %v, and the session is %s", operation, ids, made[0].AccessKeyID)
			}
		}

		session := e.as(made[0])
		before := append(e.versionsIn(e.bucket, neighbour.Prefix), e.uploads()...)
		records := e.record("vol-10")
		for what, err := range e.attacks(session, neighbour.Prefix, "vol-10") {
			if code := backend.ErrorCode(err); code != "AccessDenied" {
				t.Errorf("%s: %v", what, err)
			}
		}
		e.same("the neighbour", append(e.versionsIn(e.bucket, neighbour.Prefix), e.uploads()...), before)
		if e.record("vol-10") != records {
			t.Error("the neighbour's record was changed")
		}

		// What it is for it can do; else what it cannot would prove nothing.
		key := id.Prefix + "late"
		e.put(key)
		if _, err := session.ListObjectVersions(e.ctx(), &s3.ListObjectVersionsInput{Bucket: &e.bucket, Prefix: &id.Prefix}); err != nil {
			t.Error(err)
		}
		if _, err := session.DeleteObject(e.ctx(), &s3.DeleteObjectInput{Bucket: &e.bucket, Key: &key}); err != nil {
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
	other := e.bucket + "-other"
	e.makeBucket(other)
	e.putIn(other, "data")
	found := map[string]error{}
	note := func(what string, err error) { found[what] = err }
	_, err = c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: bucket, Prefix: &neighbour})
	note("listing the neighbour", err)
	_, err = c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: bucket})
	note("listing the bucket", err)
	_, err = c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: bucket, Prefix: aws.String("vol-1")})
	note("listing without the slash", err)
	_, err = c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: bucket, Prefix: aws.String(".s3-csi/")})
	note("listing the records", err)
	_, err = c.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: bucket, Prefix: &neighbour})
	note("listing versions", err)
	_, err = c.GetObject(ctx, &s3.GetObjectInput{Bucket: bucket, Key: &data})
	note("reading", err)
	_, err = c.GetObject(ctx, &s3.GetObjectInput{Bucket: bucket, Key: &record})
	note("reading the record", err)
	_, err = c.PutObject(ctx, &s3.PutObjectInput{Bucket: bucket, Key: &data, Body: strings.NewReader("x")})
	note("writing", err)
	_, err = c.PutObject(ctx, &s3.PutObjectInput{Bucket: bucket, Key: &record, Body: strings.NewReader("{}")})
	note("writing the record", err)
	_, err = c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: bucket, Key: &data})
	note("deleting", err)
	_, err = c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: bucket, Key: &data, VersionId: version})
	note("deleting a version", err)
	_, err = c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: bucket, Key: &record})
	note("deleting the record", err)
	_, err = c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: bucket, Key: aws.String(".s3-csi/volumes/vol-1")})
	note("deleting its own record", err)
	_, err = c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &other, Key: aws.String("data")})
	note("deleting in another bucket", err)
	_, err = c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: bucket})
	note("deleting the bucket", err)
	_, err = c.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{Bucket: bucket, Tagging: &types.Tagging{TagSet: []types.Tag{{Key: aws.String("a"), Value: aws.String("b")}}}})
	note("tagging the bucket", err)
	_, err = c.PutBucketPolicy(ctx, &s3.PutBucketPolicyInput{Bucket: bucket, Policy: aws.String(`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":"arn:aws:s3:::` + e.bucket + `/*"}]}`)})
	note("setting a bucket policy", err)
	out, err := c.DeleteObjects(ctx, &s3.DeleteObjectsInput{Bucket: bucket, Delete: &types.Delete{Objects: []types.ObjectIdentifier{{Key: &data}, {Key: &data, VersionId: version}, {Key: &record}}}})
	if err == nil {
		for _, refused := range out.Errors {
			if aws.ToString(refused.Code) != "AccessDenied" {
				note("a multi-delete of "+aws.ToString(refused.Key), fmt.Errorf("code %s", aws.ToString(refused.Code)))
			}
		}
		if len(out.Errors) != 3 {
			note("a multi-delete", fmt.Errorf("%d of 3 were refused", len(out.Errors)))
		}
	} else {
		note("a multi-delete", err)
	}
	uploads, err := e.s3.ListMultipartUploads(ctx, &s3.ListMultipartUploadsInput{Bucket: bucket})
	if err != nil || len(uploads.Uploads) == 0 {
		e.t.Fatalf("no upload to abort: %v", err)
	}
	for _, u := range uploads.Uploads {
		_, err = c.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: bucket, Key: u.Key, UploadId: u.UploadId})
		note("aborting the upload of "+*u.Key, err)
	}
	return found
}

// The same for a bucket volume: its session can delete the bucket and nothing else.
func TestABucketDeletionsSessionCannotTouchOtherBuckets(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		p := e.process()
		name := "v-" + e.bucket
		id := p.create(name, "bucketName", "", "onDelete", "purge")
		e.putIn(id.Bucket, "data", ".s3-csi/what/somebody/wrote")
		e.put("data")
		seen := &signers{}
		p.hooks.set(func(h *hooks) { h.header = seen.see })
		p.delete(id)
		made := p.sessions.made()
		if e.bucketExists(id.Bucket) || len(made) != 1 {
			t.Fatalf("there: %t, sessions: %v", e.bucketExists(id.Bucket), made)
		}
		for _, operation := range []string{"DeleteObjects", "PutBucketTagging", "DeleteBucket"} {
			if ids := seen.by[operation]; len(ids) == 0 || slices.ContainsFunc(ids, func(id string) bool { return id != made[0].AccessKeyID }) {
				t.Errorf("%s was signed by %v, and the session is %s", operation, ids, made[0].AccessKeyID)
			}
		}
		c, ctx := e.as(made[0]), e.ctx()
		_, list := c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &e.bucket})
		_, remove := c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &e.bucket, Key: aws.String("data")})
		_, drop := c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &e.bucket})
		_, tag := c.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &e.bucket})
		for what, err := range map[string]error{"listing": list, "deleting": remove, "deleting the bucket": drop, "reading tags": tag} {
			if code := backend.ErrorCode(err); code != "AccessDenied" {
				t.Errorf("%s: %v", what, err)
			}
		}
		e.same("the other bucket", e.keysBelow(""), []string{"data"})
	})
}
