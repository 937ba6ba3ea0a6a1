package controller

import (
	"net/http"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// own asks for a bucket of its own.
func (e *env) own(more ...string) []string {
	return append([]string{"bucketName", "", "bucketNamePrefix", e.bucket + "-"}, more...)
}

func TestABucketVolumeLivesAndDies(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		for _, onDelete := range []string{"delete", "purge"} {
			p, other := e.process(), e.process(cluster("other"))
			pairs := e.own("onDelete", onDelete)
			id := p.create("v", pairs...)
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
			if again := e.process().create("v", pairs...); again != id {
				t.Errorf("%v, then %v", id, again)
			}
			p.there(id)
			e.want(p.tryCreate("v", append(pairs, "uid", "7")...), fault.Exists, "other parameters")
			e.want(other.tryCreate("v", pairs...), fault.Exists, "cluster other")
			e.in(id.Bucket).put(numbered("", 20)...)
			e.want(other.tryDelete(id), fault.Precondition, "nothing is deleted")
			p.delete(id)
			e.gone(id.Bucket)
			p.delete(id)
			e.want(p.lookup(id), fault.NotFound)
		}
	})
}

func TestTagsOfOperatorsAreKept(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		pairs := e.own("onDelete", "retain")
		id := p.create("v", pairs...)
		e.retag(id.Bucket, map[string]string{"cost-centre": "42"})
		tags := e.bucketTags(id.Bucket)
		p.create("v", pairs...)
		p.delete(id)
		have := e.bucketTags(id.Bucket)
		if have["cost-centre"] != "42" || have["s3.csi/state"] != "deleted" || len(have) != len(tags) {
			t.Errorf("tags: %v", have)
		}
		e.want(p.tryCreate("v", pairs...), fault.Exists, "onDelete: retain")
		p.delete(id)
	})
}

func TestServicesThatRefuseTagsAtCreation(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.refuseFirst(1, 400, "MalformedXML", "CreateBucket")
		id := p.create("v", e.own()...)
		if e.bucketTags(id.Bucket)["s3.csi/volume"] != id.String() {
			t.Error("the bucket is not tagged")
		}
		p.delete(id)
	})
}

// A bucket that cannot be proven to be the volume's is removed if this call made it, and only then. If it stays, the error is not final.
func TestABucketWhoseTagsProveNothing(t *testing.T) {
	const stranger = "999999999999"
	type refused struct {
		status int
		code   string
	}
	denied := refused{403, "AccessDenied"}
	for name, c := range map[string]struct {
		there bool               // before the call
		owner string             // expectedBucketOwner, which the service refuses
		says  map[string]refused // by operation
		kind  fault.Kind
		words []string
		left  bool
	}{
		"adopted": {there: true, says: map[string]refused{"PutBucketTagging": denied}, kind: fault.Precondition, words: []string{"bucket tags"}, left: true},
		"secret":  {says: map[string]refused{"GetBucketTagging": denied}, kind: fault.Denied, words: []string{"reading the tags"}},
		"stuck": {says: map[string]refused{"GetBucketTagging": denied, "DeleteBucket": denied}, kind: fault.Busy,
			words: []string{"reading the tags", "left"}, left: true},
		"forgetful": {says: map[string]refused{"PutBucketTagging": {501, "NotImplemented"}, "GetBucketTagging": {404, "NoSuchTagSet"}}, kind: fault.Precondition,
			words: []string{"does not store bucket tags"}},
		"foreign": {owner: stranger, says: map[string]refused{"GetBucketTagging": denied}, kind: fault.Denied, words: []string{"reading the tags"}},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, e *env) {
				bucket, pairs, p := e.bucket+"-v", e.own(), e.process()
				if c.there {
					e.makeBucket(bucket)
					p = e.process(settings("adoptUntaggedBuckets: true"))
				}
				if c.owner != "" {
					pairs = append(pairs, "expectedBucketOwner", c.owner)
				}
				p.answers(func(operation string, h http.Header) *http.Response {
					if r, ok := c.says[operation]; ok && (c.owner == "" || h.Get("X-Amz-Expected-Bucket-Owner") == c.owner) { // as S3 does
						return refusal(r.status, r.code)
					}
					return nil
				})
				e.want(p.tryCreate("v", pairs...), c.kind, c.words...)
				if e.bucketExists(bucket) != c.left {
					t.Errorf("the bucket is there: %t, want %t", !c.left, c.left)
				}
			})
		})
	}
}

func TestAVersionedBucketVolumeNeedsPurge(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", e.own()...)
		e.setVersioning(id.Bucket, types.BucketVersioningStatusEnabled)
		e.in(id.Bucket).put("a", "b")
		e.want(p.tryDelete(id), fault.Precondition, "s3.csi/on-delete", "purge")
		// Without the tag of its state it is still a volume.
		e.retag(id.Bucket, map[string]string{"s3.csi/on-delete": "purge", "s3.csi/state": ""})
		p.delete(id)
		e.gone(id.Bucket)
	})
}

// A deletion that was held up stops where a volume of that name was made meanwhile.
func TestAHeldUpDeleterTouchesNothingOfANewVolume(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for operation, use := range map[string]func(at *env){
			"PutBucketTagging":     func(at *env) { at.upload("new") },
			"ListMultipartUploads": func(at *env) { at.put("new") },
		} {
			slow, fast := e.process(), e.process()
			id := slow.create("v", e.own()...)
			at := e.in(id.Bucket)
			at.put("old")
			held, resume := slow.holds(1, operation, true)
			result := make(chan error, 1)
			go func() { result <- slow.tryDelete(id) }()
			<-held
			fast.delete(id)
			fast.create("v", e.own()...)
			use(at)
			resume()
			e.want(<-result, fault.Busy, "another controller")
			e.same("objects and uploads", append(at.keysBelow(""), at.uploads()...), []string{"new"})
			fast.delete(id)
		}
	})
}
