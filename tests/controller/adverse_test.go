package controller

import (
	"fmt"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestOldVersionsOfSomebodyElseAreNotPurged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		e.put("v/data")
		e.remove("v/data") // it can be brought back, as long as its version is there
		before := e.versions("v/")
		e.want(e.process().tryCreate("v", "onDelete", "purge"), fault.Exists, "without a record of this driver")
		p := e.process()
		p.delete(p.create("v")) // which leaves versions alone
		e.same("versions", e.versions("v/"), before)
	})
}

func TestAnEmptyPageOfALongListingIsNotAnEmptyPlace(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		p.says("ListObjectsV2", `<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>`,
			`<ListBucketResult><Contents><Key>v/data</Key></Contents></ListBucketResult>`)
		e.want(p.tryCreate("v"), fault.Exists, "without a record of this driver")
		e.want(p.tryDelete(e.params("v").ID("v", 1)), fault.Precondition, "nothing is deleted")
	})
}

// What a service says does not end a deletion where it makes no sense, and takes nothing away from others.
func TestAnswersThatDoNotProveThatNothingIsLeft(t *testing.T) {
	const (
		more            = `<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>`
		moreVersions    = `<ListVersionsResult><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker></ListVersionsResult>`
		nowhere         = `<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>`
		nowhereVersions = `<ListVersionsResult><IsTruncated>true</IsTruncated></ListVersionsResult>`
		astray          = `<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Contents><Key>%[1]s/a</Key></Contents><Contents><Key>%[1]s0/a</Key></Contents></ListBucketResult>`
		none            = `<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>%[1]s/a</Key><Code>AccessDenied</Code><Message>no</Message></Error>` +
			`<Error><Key>%[1]s/b</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>`
	)
	one(t, func(t *testing.T, e *env) {
		for name, c := range map[string]struct {
			onDelete, operation, answer string
			kind                        fault.Kind
			words                       []string
		}{
			"endless":          {"delete", "ListObjectsV2", more, fault.Busy, []string{"listings are unreliable"}},
			"endless-versions": {"purge", "ListObjectVersions", moreVersions, fault.Busy, []string{"listings are unreliable"}},
			"nowhere":          {"delete", "ListObjectsV2", nowhere, fault.Busy, []string{"listings are unreliable"}},
			"nowhere-versions": {"purge", "ListObjectVersions", nowhereVersions, fault.Busy, []string{"listings are unreliable"}},
			"astray":           {"delete", "ListObjectsV2", fmt.Sprintf(astray, "astray"), fault.Unavailable, []string{"astray0/a", "nothing more is deleted"}},
			"refused":          {"delete", "DeleteObjects", fmt.Sprintf(none, "refused"), fault.Denied, []string{"2 objects of", `"refused/a"`, "AccessDenied"}},
		} {
			p := e.process()
			id := p.create(name, "onDelete", c.onDelete)
			data := []string{id.Prefix + "a", id.Prefix + "b", name + "0/a"}
			e.put(data...)
			p.says(c.operation, c.answer)
			e.want(p.tryDelete(id), c.kind, c.words...)
			e.state(name, "deleting")
			e.same("data", append(e.keysBelow(id.Prefix), e.keysBelow(name+"0/")...), data)
			p.answers(nil)
			p.delete(id)
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
			e.want(p.lookup(volume.ID{Backend: "lab", Bucket: id.Bucket, Prefix: "w/"}), fault.NotFound)
			// This remembers that there is no such bucket.
			e.want(p.tryCreate("w", "bucketName", id.Bucket), fault.Precondition, "parameters.bucketName")
			at := e.in(id.Bucket)
			if !own {
				e.makeBucket(id.Bucket)
			}
			other.create("v", pairs...)
			at.put(id.Prefix + "data")
			p.delete(id)
			if own {
				e.gone(id.Bucket)
			} else {
				e.same("data", at.keysBelow(id.Prefix), nil)
			}
		}
	})
}

func TestABucketVolumeHoldsNoPrefixVolumes(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("own", e.own()...)
		p.refuse(403, "AccessDenied", "GetBucketTagging")
		p.create("inner", "bucketName", id.Bucket) // with keys that may not read tags
		p.answers(nil)                             // other keys may
		e.want(p.tryCreate("v", "bucketName", id.Bucket), fault.Precondition, "cannot be nested")
		p.delete(id)
	})
}
