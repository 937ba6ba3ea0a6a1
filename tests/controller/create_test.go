package controller

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
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
