package controller

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestWarmCreateIsTwoRequests(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("first", "prefix", "team/a/")
		p.hooks.reset()
		id := p.create("second", "prefix", "team/a/")
		e.same("requests", p.hooks.sent(), []string{"ListObjectsV2", "PutObject"})
		if want := "lab:" + e.bucket + "/team/a/second/"; id.String() != want {
			t.Errorf("volume id %s, want %s", id, want)
		}
		p.hooks.reset()
		p.create("third", "onDelete", "requireEmpty")
		e.same("requests", p.hooks.sent(), []string{"ListObjectsV2", "PutObject"})
	})
}

func TestWarmCreateForPurgeIsTwoRequests(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("first", "onDelete", "purge")
		p.hooks.reset()
		p.create("second", "onDelete", "purge")
		e.same("requests", p.hooks.sent(), []string{"ListObjectsV2", "PutObject"})
	})
}

func TestNothingIsLeftOfTheTests(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, "Enabled")
		p := e.process()
		id := p.create("v")
		p.delete(id) // tests uploads, too
		e.same("versions of test objects", e.versionsIn(e.bucket, ".s3-csi/probe/"), nil)
		e.same("uploads", e.uploads(), []string{})
	})
}

func TestCreateIsIdempotentAcrossProcesses(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id := e.process().create("v", "uid", "1000")
		e.put(id.Prefix + "data")
		if again := e.process().create("v", "uid", "1000"); again != id {
			t.Errorf("%s, then %s", id, again)
		}
	})
}

func TestOtherParametersAreRefused(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("v")
		for _, pairs := range [][]string{{"onDelete", "retain"}, {"prefix", "elsewhere/"}, {"uid", "7"}} {
			_, err := p.Create(e.ctx(), e.createRequest("v", pairs...))
			e.want(err, fault.Exists, "other parameters")
		}
	})
}

func TestAnotherOwnersVolumeIsRefused(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id := e.process().create("v")
		other := e.process(cluster("other"))
		_, err := other.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Exists, "cluster test", "cluster other")
		e.want(other.Lookup(e.ctx(), provision.LookupRequest{ID: id, Keys: e.keys}), fault.NotFound)
		e.put(id.Prefix + "data")
		e.want(other.tryDelete(id), fault.Precondition, "nothing is deleted")
		e.state("v", "active")
		e.same("data", e.keysBelow(id.Prefix), []string{id.Prefix + "data"})
	})
}

func TestDataWithoutARecordIsNotTakenOver(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.put("v/data")
		p := e.process()
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Exists, "no record of this driver explains")
		if r := e.record("v"); r != "" {
			t.Errorf("a record was written: %s", r)
		}
		id := e.params("v").ID("v", 1)
		e.want(p.tryDelete(id), fault.Precondition, "nothing is deleted")
		e.same("data", e.keysBelow("v/"), []string{"v/data"})
	})
}

func TestAMissingBucketIsAPrecondition(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		_, err := e.process().Create(e.ctx(), e.createRequest("v", "bucketName", "not-there-"+e.bucket))
		e.want(err, fault.Precondition, "parameters.bucketName")
	})
}

func TestABucketThatWentAwayIsNoticed(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", "prefix", "base/")
		gone := e.params("w").ID("w", 1)
		e.emptyAndRemove(e.bucket)
		_, err := p.Create(e.ctx(), e.createRequest("w", "prefix", "base/"))
		e.want(err, fault.Precondition, "parameters.bucketName")
		p.delete(id)
		p.delete(gone)
		e.makeBucket(e.bucket)
		p = e.process()
		p.create("w", "prefix", "base/")
		e.state("base", "base")
	})
}

func TestARecordThatCannotBeReadIsNotTouched(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix + "data")
		for _, text := range []string{"", "{}", "not JSON", strings.Replace(e.record("v"), `"name": "v"`, `"name": "w"`, 1), `{"version":2}`, e.record("v") + "{}", strings.Repeat(" ", 10000)} {
			e.putText(".s3-csi/volumes/v", text)
			_, err := p.Create(e.ctx(), e.createRequest("v"))
			e.want(err, fault.Precondition, "not a volume record")
			e.want(p.tryDelete(id), fault.Precondition, "not a volume record")
			if e.record("v") != text {
				t.Error("the record was changed")
			}
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
			if err := p.Lookup(e.ctx(), provision.LookupRequest{ID: id, Keys: e.keys}); err != nil {
				t.Error(err)
			}
			p.delete(id)
			e.same("data", e.keysBelow(id.Prefix), []string{})
		}
	})
}

func TestALostAnswerToTheRecordsWriteIsResolved(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for _, happened := range []bool{true, false} {
			p := e.process()
			p.create(fmt.Sprint("warm-", happened))
			lost := 0
			lose := func(n int, operation string) error {
				if operation == "PutObject" && lost == 0 {
					lost++
					return cut()
				}
				return nil
			}
			p.hooks.set(func(h *hooks) {
				if h.log = nil; happened {
					h.after = lose
				} else {
					h.before = lose
				}
			})
			name := fmt.Sprint("v-", happened)
			id := p.create(name)
			e.state(name, "active")
			if again := e.process().create(name); again != id {
				t.Errorf("%s, then %s", id, again)
			}
			want := []string{"ListObjectsV2", "PutObject", "GetObject"}
			if !happened {
				want = append(want, "PutObject")
			}
			e.same("requests", p.hooks.sent(), want)
		}
	})
}

func TestAnUnknownOutcomeIsNeverFinal(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("warm")
		p.hooks.set(func(h *hooks) {
			h.log = nil
			h.after = func(n int, operation string) error {
				if n >= 2 { // the record's write, and every look at what became of it
					return cut()
				}
				return nil
			}
		})
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Busy)
		e.state("v", "active")
		p.hooks.set(func(h *hooks) { h.after = nil })
		p.create("v")
	})
}

func TestAConditionalConflictIsBusy(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("warm")
		p.hooks.set(func(h *hooks) {
			h.answer = func(n int, operation string) *http.Response {
				if operation == "PutObject" {
					return refusal(409, "ConditionalRequestConflict")
				}
				return nil
			}
		})
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Busy, "another controller")
	})
}

func TestLookup(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		if err := p.Lookup(e.ctx(), provision.LookupRequest{ID: id, Keys: e.keys}); err != nil {
			t.Error(err)
		}
		for _, other := range []volume.ID{
			{Backend: "lab", Bucket: e.bucket, Prefix: "w/"},
			{Backend: "lab", Bucket: e.bucket, Prefix: "x/v/"},
			{Backend: "lab", Bucket: e.bucket, Prefix: "v@2/"},
			{Backend: "lab", Bucket: "not-there-" + e.bucket, Prefix: "v/"},
			{Backend: "lab", Bucket: e.bucket},
		} {
			e.want(p.Lookup(e.ctx(), provision.LookupRequest{ID: other, Keys: e.keys}), fault.NotFound)
		}
		p.delete(id)
		e.want(p.Lookup(e.ctx(), provision.LookupRequest{ID: id, Keys: e.keys}), fault.NotFound)
	})
}
