package controller

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// own asks for a bucket of its own.
func (e *env) own(more ...string) []string {
	return append([]string{"bucketName", "", "bucketNamePrefix", e.bucket + "-"}, more...)
}

func TestABucketVolumeLivesAndDies(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		for _, onDelete := range []string{"delete", "purge"} {
			p := e.process()
			id := p.create("v", e.own("onDelete", onDelete)...)
			if want := (volume.ID{Backend: "lab", Bucket: e.bucket + "-v"}); id != want {
				t.Fatalf("%v, want %v", id, want)
			}
			tags := e.bucketTags(id.Bucket)
			for key, want := range map[string]string{
				"s3.csi/driver": "s3.csi.driver", "s3.csi/cluster": "test", "s3.csi/volume": id.String(), "s3.csi/name": "v",
				"s3.csi/on-delete": onDelete, "s3.csi/state": "active",
			} {
				if tags[key] != want {
					t.Errorf("tag %s is %q, want %q", key, tags[key], want)
				}
			}
			if again := e.process().create("v", e.own("onDelete", onDelete)...); again != id {
				t.Errorf("%v, then %v", id, again)
			}
			if err := p.Lookup(e.ctx(), provision.LookupRequest{ID: id, Keys: e.keys}); err != nil {
				t.Error(err)
			}
			_, err := p.Create(e.ctx(), e.createRequest("v", e.own("onDelete", onDelete, "uid", "7")...))
			e.want(err, fault.Exists, "other parameters")
			_, err = e.process(cluster("other")).Create(e.ctx(), e.createRequest("v", e.own("onDelete", onDelete)...))
			e.want(err, fault.Exists, "cluster other")
			e.putIn(id.Bucket, numbered("", 20)...)
			e.want(e.process(cluster("other")).tryDelete(id), fault.Precondition, "nothing is deleted")
			p.delete(id)
			if e.bucketExists(id.Bucket) {
				t.Error("the bucket is there")
			}
			p.delete(id)
			e.want(p.Lookup(e.ctx(), provision.LookupRequest{ID: id, Keys: e.keys}), fault.NotFound)
		}
	})
}

func TestTagsOfOperatorsAreKept(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", e.own("onDelete", "retain")...)
		tags := []types.Tag{{Key: aws.String("cost-centre"), Value: aws.String("42")}}
		for k, v := range e.bucketTags(id.Bucket) {
			tags = append(tags, types.Tag{Key: aws.String(k), Value: aws.String(v)})
		}
		e.tagBucket(id.Bucket, tags)
		p.create("v", e.own("onDelete", "retain")...)
		p.delete(id)
		have := e.bucketTags(id.Bucket)
		if have["cost-centre"] != "42" || have["s3.csi/state"] != "deleted" || len(have) != len(tags) {
			t.Errorf("tags: %v", have)
		}
		_, err := p.Create(e.ctx(), e.createRequest("v", e.own("onDelete", "retain")...))
		e.want(err, fault.Exists, "onDelete: retain")
		p.delete(id)
	})
}

func (e *env) tagBucket(bucket string, tags []types.Tag) {
	e.t.Helper()
	if _, err := e.s3.PutBucketTagging(e.ctx(), &s3.PutBucketTaggingInput{Bucket: &bucket, Tagging: &types.Tagging{TagSet: tags}}); err != nil {
		e.t.Fatal(err)
	}
}

func TestAForeignBucketIsNeverTouched(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		untagged, tagged := e.bucket+"-untagged", e.bucket+"-tagged"
		e.makeBucket(untagged)
		e.makeBucket(tagged)
		e.tagBucket(tagged, []types.Tag{{Key: aws.String("team"), Value: aws.String("a")}})
		e.putIn(untagged, "data")
		p := e.process()
		for _, name := range []string{"untagged", "tagged"} {
			_, err := p.Create(e.ctx(), e.createRequest(name, e.own()...))
			e.want(err, fault.Exists, "bucketNamePrefix")
		}
		if tags := e.bucketTags(untagged); len(tags) != 0 {
			t.Errorf("tags %v", tags)
		}
		e.want(p.tryDelete(volume.ID{Backend: "lab", Bucket: untagged}), fault.Precondition, "nothing is deleted")
		p.delete(volume.ID{Backend: "lab", Bucket: tagged}) // empty: there is no such volume
		if !e.bucketExists(tagged) {
			t.Error("a foreign bucket is gone")
		}
		e.same("data", e.keysIn(untagged, ""), []string{"data"})
	})
}

func TestAnUntaggedEmptyBucketIsAdoptedOnRequest(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.makeBucket(e.bucket + "-empty")
		e.makeBucket(e.bucket + "-full")
		e.putIn(e.bucket+"-full", "data")
		e.makeBucket(e.bucket + "-tagged")
		e.tagBucket(e.bucket+"-tagged", []types.Tag{{Key: aws.String("team"), Value: aws.String("a")}})
		p := e.process(settings("adoptUntaggedBuckets: true"))
		id := p.create("empty", e.own()...)
		for _, name := range []string{"full", "tagged"} {
			_, err := p.Create(e.ctx(), e.createRequest(name, e.own()...))
			e.want(err, fault.Exists)
		}
		p.delete(id)
		if e.bucketExists(id.Bucket) {
			t.Error("the bucket is there")
		}
	})
}

func TestRacingControllersMakeOneBucket(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for round := range 4 {
			processes := []*process{e.process(), e.process(), e.process()}
			var wg sync.WaitGroup
			errs := make([]error, 6)
			for i := range errs {
				wg.Go(func() {
					_, errs[i] = processes[i%3].settled(fmt.Sprint("v", round), e.own()...)
				})
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			processes[0].delete(volume.ID{Backend: "lab", Bucket: fmt.Sprint(e.bucket, "-v", round)})
		}
	})
}

func TestServicesThatRefuseTagsAtCreation(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		refused := false
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				if operation == "CreateBucket" && !refused {
					refused = true
					return refusal(400, "MalformedXML")
				}
				return nil
			}
		})
		id := p.create("v", e.own()...)
		if e.bucketTags(id.Bucket)["s3.csi/volume"] != id.String() {
			t.Error("the bucket is not tagged")
		}
		p.delete(id)
	})
}

func TestServicesWithoutTags(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				switch operation {
				case "PutBucketTagging":
					return refusal(501, "NotImplemented")
				case "GetBucketTagging":
					return refusal(404, "NoSuchTagSet")
				}
				return nil
			}
		})
		_, err := p.Create(e.ctx(), e.createRequest("v", e.own()...))
		e.want(err, fault.Precondition, "keeps no bucket tags")
		if e.bucketExists(e.bucket + "-v") {
			t.Error("the bucket is left behind")
		}
	})
}

func TestAVersionedBucketVolumeNeedsPurge(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", e.own()...)
		e.setVersioning(id.Bucket, types.BucketVersioningStatusEnabled)
		e.putIn(id.Bucket, "a", "b")
		e.want(p.tryDelete(id), fault.Precondition, "s3.csi/on-delete", "purge")
		tags := []types.Tag{}
		for k, v := range e.bucketTags(id.Bucket) {
			if k == "s3.csi/on-delete" {
				v = "purge"
			}
			tags = append(tags, types.Tag{Key: aws.String(k), Value: aws.String(v)})
		}
		e.tagBucket(id.Bucket, tags)
		p.delete(id)
		if e.bucketExists(id.Bucket) {
			t.Error("the bucket is there")
		}
	})
}

func TestABucketVolumeThatMustBeEmpty(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", e.own("onDelete", "requireEmpty")...)
		e.putIn(id.Bucket, "data")
		e.want(p.tryDelete(id), fault.Precondition, "not empty")
		if s := e.bucketTags(id.Bucket)["s3.csi/state"]; s != "active" {
			t.Errorf("state %q", s)
		}
		e.same("data", e.keysIn(id.Bucket, ""), []string{"data"})
		if _, err := e.s3.DeleteObject(e.ctx(), &s3.DeleteObjectInput{Bucket: &id.Bucket, Key: aws.String("data")}); err != nil {
			t.Fatal(err)
		}
		p.delete(id)
		if e.bucketExists(id.Bucket) {
			t.Error("the bucket is there")
		}
	})
}

func TestABucketDeletionKilledAnywhereIsFinishedByAnother(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		var id volume.ID
		other := e.process()
		work := func(p *process, round string) error {
			id = other.create(round, e.own()...)
			e.putIn(id.Bucket, numbered("", 5)...)
			return p.tryDelete(id)
		}
		deaths(t, e, work, func(round string, err error) {
			if fault.Is(err, fault.Precondition) || fault.Is(err, fault.Exists) || fault.Is(err, fault.NotFound) {
				t.Errorf("%s: a final error: %v", round, err)
			}
			other.delete(id)
			if e.bucketExists(id.Bucket) {
				t.Errorf("%s: the bucket is there", round)
			}
		})
	})
}

func TestABucketCreationWhoseAnswerIsLost(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.hooks.set(func(h *hooks) {
			h.after = func(_ int, operation string) error {
				if operation == "CreateBucket" {
					return cut()
				}
				return nil
			}
		})
		id, err := p.Create(e.ctx(), e.createRequest("v", e.own()...))
		if e.name == "minio" { // it has dropped the tags, so that nobody can tell whose it is
			e.want(err, fault.Busy)
			_, err = e.process().Create(e.ctx(), e.createRequest("v", e.own()...))
			e.want(err, fault.Exists, "adoptUntaggedBuckets")
			id = e.process(settings("adoptUntaggedBuckets: true")).create("v", e.own()...)
		} else if err != nil {
			t.Fatal(err)
		}
		e.process().delete(id)
	})
}

func TestAHeldUpDeleterStopsAtANewVolumeOfThatName(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		slow, fast := e.process(), e.process()
		id := slow.create("v", e.own()...)
		e.putIn(id.Bucket, "old")
		listed, resume := make(chan struct{}), make(chan struct{})
		var once sync.Once
		slow.hooks.set(func(h *hooks) {
			h.after = func(_ int, operation string) error {
				if operation == "ListMultipartUploads" {
					once.Do(func() { close(listed); <-resume })
				}
				return nil
			}
		})
		result := make(chan error, 1)
		go func() { result <- slow.tryDelete(id) }()
		<-listed
		fast.delete(id)
		fast.create("v", e.own()...)
		e.putIn(id.Bucket, "new")
		close(resume)
		e.want(<-result, fault.Busy, "another controller")
		e.same("data", e.keysIn(id.Bucket, ""), []string{"new"})
		fast.delete(id)
	})
}
