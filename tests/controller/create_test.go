package controller

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestWarmCreateIsTwoRequests(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("first", "prefix", "team/a/")
		p.create("first-to-purge", "onDelete", "purge")
		for name, pairs := range map[string][]string{"base": {"prefix", "team/a/"}, "empty": {"onDelete", "requireEmpty"}, "purge": {"onDelete", "purge"}} {
			p.hooks.reset()
			id := p.create(name, pairs...)
			e.same("requests", p.hooks.sent(), []string{"ListObjectsV2", "PutObject"})
			if want := "lab:" + e.bucket + "/team/a/base/"; name == "base" && id.String() != want {
				t.Errorf("volume id %s, want %s", id, want)
			}
		}
	})
}

// Data without a record has another owner: no volume takes it over, and no deletion removes it.
func TestUnexplainedDataIsNotTouched(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p, other := e.process(), e.process(cluster("other"))
		p.delete(p.create("next"))
		taken := p.create("taken")
		e.put("v/data", "next@2/data", "taken/data")
		before := e.keysBelow("")
		for _, name := range []string{"v", "next"} {
			e.want(p.tryCreate(name), fault.Exists, "without a record of this driver")
		}
		e.want(p.tryDelete(e.params("v").ID("v", 1)), fault.Precondition, "nothing is deleted")
		e.want(other.tryCreate("taken"), fault.Exists, "cluster test", "cluster other")
		e.want(other.lookup(taken), fault.NotFound)
		e.want(other.tryDelete(taken), fault.Precondition, "nothing is deleted")
		e.same("objects", e.keysBelow(""), before)
		e.state("next", "deleted")
		e.state("taken", "active")
	})
}

func TestABucketThatWentAwayIsNoticed(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", "prefix", "base/")
		for _, key := range e.keysBelow("") {
			e.remove(key)
		}
		e.removeBucket()
		e.want(p.tryCreate("w", "prefix", "base/"), fault.Precondition, "parameters.bucketName")
		p.delete(id)
		p.delete(e.params("w").ID("w", 1))
		e.makeBucket(e.bucket)
		e.process().create("w", "prefix", "base/")
		e.state("base", "base")
	})
}

func TestARecordThatCannotBeReadIsNotTouched(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix+"data", ".s3-csi/volumes/v") // which is "x" now
		e.want(p.tryCreate("v"), fault.Precondition, "not a record")
		e.want(p.tryDelete(id), fault.Precondition, "not a record")
		if text := e.record("v"); text != "x" {
			t.Errorf("the record was changed: %s", text)
		}
		e.same("data", e.keysBelow(id.Prefix), []string{id.Prefix + "data"})
	})
}

func TestUnicodeNamesWork(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		for _, name := range []string{"größe & <mehr>", strings.Repeat("ä", 64), "../x", "a b", "x/y"} {
			id := p.create(name, "prefix", "Straße/1/")
			e.put(id.Prefix+"data", id.Prefix+"dir/")
			p.there(id)
			p.delete(id)
			e.same("data", e.keysBelow(id.Prefix), nil)
		}
	})
}

func TestAnAbsentVolumeIsNotFoundAndIsDeleted(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process(notRunning) // no run is needed
		at := func(bucket, prefix string) volume.ID {
			return volume.ID{Backend: "lab", Bucket: bucket, Prefix: prefix}
		}
		gone := "not-there-" + e.bucket
		for _, id := range []volume.ID{at(e.bucket, "v/"), at(e.bucket, "x/y/v@3/"), at(e.bucket, "x/no segment!/"), at(gone, "v/"), at(gone, ""), at(e.bucket, "")} {
			e.want(p.lookup(id), fault.NotFound)
			p.delete(id)
		}
		e.same("objects", e.keysBelow(""), nil)
		if !e.bucketExists(e.bucket) {
			t.Error("the bucket is gone")
		}
		p.there(p.create("v"))
		for _, prefix := range []string{"w/", "x/v/", "v@2/", ""} {
			e.want(p.lookup(at(e.bucket, prefix)), fault.NotFound)
		}
	})
}
