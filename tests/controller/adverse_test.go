package controller

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// refuse answers some operations for the service: status and code by operation.
func (p *process) refuse(status int, code string, operations ...string) {
	p.hooks.set(func(h *hooks) {
		h.answer = func(_ int, operation string) *http.Response {
			if slices.Contains(operations, operation) {
				return refusal(status, code)
			}
			return nil
		}
	})
}

// says is an answer of 200 with that body.
func says(body string) *http.Response {
	r := refusal(http.StatusOK, "")
	r.Body, r.ContentLength = readCloser(body), -1
	return r
}

func TestABucketThatCannotBeAdoptedStays(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		bucket := e.bucket + "-v"
		e.makeBucket(bucket)
		p := e.process(settings("adoptUntaggedBuckets: true"))
		p.refuse(403, "AccessDenied", "PutBucketTagging")
		_, err := p.Create(e.ctx(), e.createRequest("v", e.own()...))
		e.want(err, fault.Precondition, "bucket tags")
		if !e.bucketExists(bucket) {
			t.Error("somebody else's bucket was removed")
		}
	})
}

func TestANewBucketThatCannotBeProvenIsNotLeftBehindByAFinalError(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		bucket := e.bucket + "-v"
		p := e.process()
		p.refuse(403, "AccessDenied", "GetBucketTagging")
		_, err := p.Create(e.ctx(), e.createRequest("v", e.own()...))
		e.want(err, fault.Denied, "reading the tags")
		if e.bucketExists(bucket) {
			t.Error("a bucket is left behind, and the error is final")
		}
		p.refuse(403, "AccessDenied", "GetBucketTagging", "DeleteBucket")
		_, err = p.Create(e.ctx(), e.createRequest("v", e.own()...))
		e.want(err, fault.Busy, "reading the tags", "left")
		if !e.bucketExists(bucket) {
			t.Error("the bucket is gone after all")
		}
	})
}

func TestOldVersionsOfSomebodyElseAreNotPurged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		e.put("v/data")
		e.remove("v/data") // it can be brought back, as long as its version is there
		before := e.versionsIn(e.bucket, "v/")
		_, err := e.process().Create(e.ctx(), e.createRequest("v", "onDelete", "purge"))
		e.want(err, fault.Exists, "no record of this driver explains")
		p := e.process()
		p.delete(p.create("v")) // which leaves versions alone
		e.same("versions", e.versionsIn(e.bucket, "v/"), before)
	})
}

func TestAnEmptyPageOfALongListingIsNotAnEmptyPlace(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		page := 0
		p := e.process()
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				if operation != "ListObjectsV2" {
					return nil
				}
				if page++; page%2 == 1 {
					return says(`<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>`)
				}
				return says(`<ListBucketResult><Contents><Key>v/data</Key></Contents></ListBucketResult>`)
			}
		})
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Exists, "no record of this driver explains")
		e.want(p.tryDelete(e.params("v").ID("v", 1)), fault.Precondition, "nothing is deleted")
	})
}

func TestAListingThatNeverEndsIsNoProofThatNothingIsLeft(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for i, onDelete := range []string{"delete", "purge"} {
			p := e.process()
			id := p.create("v"+onDelete, "onDelete", onDelete)
			operation := []string{"ListObjectsV2", "ListObjectVersions"}[i]
			for _, next := range []string{"<NextContinuationToken>t</NextContinuationToken><NextKeyMarker>k</NextKeyMarker>", ""} {
				p.hooks.set(func(h *hooks) {
					h.answer = func(_ int, o string) *http.Response {
						if o != operation {
							return nil
						}
						return says(`<ListResult><IsTruncated>true</IsTruncated>` + next + `</ListResult>`)
					}
				})
				e.want(p.tryDelete(id), fault.Busy, "listings cannot be trusted")
				e.state("v"+onDelete, "deleting")
			}
		}
	})
}

func TestAWriteThatMayStillHappenIsNotRefusedForGood(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("warm")
		writes := 0
		p.hooks.set(func(h *hooks) {
			h.before = func(_ int, operation string) error {
				if operation == "PutObject" {
					if writes++; writes == 1 {
						return cut() // somewhere on the way; nobody knows whether it still arrives
					}
				}
				return nil
			}
			h.answer = func(_ int, operation string) *http.Response {
				if operation == "PutObject" {
					return refusal(403, "AccessDenied")
				}
				return nil
			}
		})
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Busy)
		if writes != 2 {
			t.Errorf("%d writes", writes)
		}
	})
}

func TestAVolumeIsNotGoneBecauseItsBucketWasNotThereAMomentAgo(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for _, own := range []bool{false, true} {
			pairs := []string{"bucketName", e.bucket + "-new"}
			if own {
				pairs = e.own()
			}
			p, other := e.process(), e.process()
			id := e.params("v", pairs...).ID("v", 1)
			e.want(p.Lookup(e.ctx(), provision.LookupRequest{ID: volume.ID{Backend: "lab", Bucket: id.Bucket, Prefix: "w/"}, Keys: e.keys}), fault.NotFound)
			_, err := p.Create(e.ctx(), e.createRequest("w", "bucketName", id.Bucket)) // which remembers that there is no such bucket
			e.want(err, fault.Precondition)
			if !own {
				e.makeBucket(id.Bucket)
			}
			other.create("v", pairs...)
			e.putIn(id.Bucket, id.Prefix+"data")
			p.delete(id)
			if own && e.bucketExists(id.Bucket) {
				t.Error("the bucket is there")
			}
			if !own {
				e.same("data", e.keysIn(id.Bucket, id.Prefix), []string{})
			}
		}
	})
}

func TestABucketVolumeWithoutAStateIsDeleted(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", e.own()...)
		tags := []types.Tag{}
		for k, v := range e.bucketTags(id.Bucket) {
			if k != "s3.csi/state" {
				tags = append(tags, types.Tag{Key: aws.String(k), Value: aws.String(v)})
			}
		}
		e.tagBucket(id.Bucket, tags)
		p.delete(id)
		if e.bucketExists(id.Bucket) {
			t.Error("the volume is said to be deleted, and its bucket is there")
		}
	})
}

func TestAHeldUpDeleterAbortsNoUploadsOfANewVolume(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		slow, fast := e.process(), e.process()
		id := slow.create("v", e.own()...)
		e.putIn(id.Bucket, "old")
		held, resume := make(chan struct{}), make(chan struct{})
		var once sync.Once
		slow.hooks.set(func(h *hooks) {
			h.after = func(_ int, operation string) error {
				if operation == "PutBucketTagging" {
					once.Do(func() { close(held); <-resume })
				}
				return nil
			}
		})
		result := make(chan error, 1)
		go func() { result <- slow.tryDelete(id) }()
		<-held
		fast.delete(id)
		fast.create("v", e.own()...)
		at := *e
		at.bucket = id.Bucket
		at.upload("new")
		close(resume)
		e.want(<-result, fault.Busy, "another controller")
		e.same("uploads", at.uploads(), []string{"new"})
		fast.delete(id)
	})
}

func TestAnAccessPointThatIsGoneIsNotItsBucketsEnd(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		id := volume.ID{Backend: "lab", Bucket: strings.ToLower(e.bucket) + "-s3alias", Prefix: "v/"}
		e.want(e.process().tryDelete(id), fault.Precondition, "access point", "nothing is deleted")
	})
}

func TestTagsThatOneMayNotReadAreLookedForAgain(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("own", e.own()...)
		p.refuse(403, "AccessDenied", "GetBucketTagging")
		p.create("inner", "bucketName", id.Bucket)
		p.hooks.set(func(h *hooks) { h.answer = nil }) // other keys may
		_, err := p.Create(e.ctx(), e.createRequest("v", "bucketName", id.Bucket))
		e.want(err, fault.Precondition, "cannot be nested")
	})
}

func TestANewBucketOfAnotherOwnerIsNoVolume(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		demanded := ""
		p.hooks.set(func(h *hooks) {
			h.header = func(_ string, h http.Header) { demanded = h.Get("X-Amz-Expected-Bucket-Owner") }
			h.answer = func(_ int, operation string) *http.Response { // as S3 does
				if operation == "GetBucketTagging" && demanded == "999999999999" {
					return refusal(403, "AccessDenied")
				}
				return nil
			}
		})
		_, err := p.Create(e.ctx(), e.createRequest("v", e.own("expectedBucketOwner", "999999999999")...))
		e.want(err, fault.Denied, "reading the tags")
		if e.bucketExists(e.bucket + "-v") {
			t.Error("the bucket is left behind")
		}
	})
}
