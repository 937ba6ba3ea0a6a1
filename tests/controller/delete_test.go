package controller

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestDeleteTakesTheVolumeAndNothingElse(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		neighbours := []string{"vol-10/data", "vol-1x", "vol-1", "vol-", "a", "z/vol-1/data"}
		if e.name == "versitygw" || e.name == "minio" { // both keep objects as files: no object where a directory is
			neighbours = slices.DeleteFunc(neighbours, func(k string) bool { return k == "vol-1" })
		}
		id := p.create("vol-1")
		ten := p.create("vol-10")
		e.put(neighbours...)
		e.put(id.Prefix+"data", id.Prefix+"dir/", id.Prefix+"dir/sub/", id.Prefix+"dir/sub/file", id.Prefix+"empty/", id.Prefix+"a b+c&<ä>%41\n")
		e.upload(id.Prefix + "unfinished")
		e.upload(id.Prefix + "deep/er/unfinished")
		e.upload("vol-10/unfinished")
		p.delete(id)
		e.want(p.lookup(id), fault.NotFound)
		e.same("of the volume", e.keysBelow(id.Prefix), nil)
		e.same("uploads", e.uploads(), []string{"vol-10/unfinished"})
		e.state("vol-1", "deleted")
		e.state("vol-10", "active")
		left := append(slices.Clone(neighbours), ".s3-csi/volumes/vol-1", ".s3-csi/volumes/vol-10")
		slices.Sort(left)
		e.same("objects", e.keysBelow(""), left)
		p.delete(id) // a retry
		p.delete(ten)
	})
}

func TestKeysThatXMLCannotHoldAreDeleted(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix+"a\x01b", id.Prefix+"c\uFFFEd", id.Prefix+"plain")
		if e.name == "versitygw" {
			// It lists such keys with replacement characters, so what it lists cannot be deleted, and the error must say so.
			e.want(p.tryDelete(id), fault.Busy, "3 objects removed", `"v/a\ufffdb"`, `"v/c\ufffdd"`, "no such objects")
			e.state("v", "deleting")
			return
		}
		p.delete(id)
		e.same("of the volume", e.keysBelow(id.Prefix), nil)
	})
}

func TestDeleteKeepsVersionsAndPurgeDoesNot(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		p := e.process()
		kept, purged := p.create("kept"), p.create("purged", "onDelete", "purge")
		for range 3 {
			for _, id := range []volume.ID{kept, purged} {
				e.put(id.Prefix+"data", id.Prefix+"sub/data")
			}
		}
		e.put("purged-not/data")
		e.remove(purged.Prefix + "data")
		p.delete(kept)
		p.delete(purged)
		e.same("current", e.keysBelow("kept/"), nil)
		if n := len(e.versions("kept/")); n != 8 { // 6 versions, 2 delete markers
			t.Errorf("%d versions of the kept volume, want 8", n)
		}
		e.same("versions of the purged volume", e.versions("purged/"), nil)
		if n := len(e.versions("purged-not/")); n != 1 {
			t.Errorf("%d versions of a neighbour, want 1", n)
		}
		e.same("versions of test objects", e.versions(".s3-csi/probe/"), nil)
		e.same("uploads", e.uploads(), nil)
	})
}

// locked makes a bucket with an object lock.
func (e *env) locked() *env {
	e.t.Helper()
	at := e.in(e.bucket + "-locked")
	if _, err := e.s3.CreateBucket(e.ctx(), &s3.CreateBucketInput{Bucket: &at.bucket, ObjectLockEnabledForBucket: aws.Bool(true)}); err != nil {
		e.t.Fatal(err)
	}
	e.setVersioning(at.bucket, types.BucketVersioningStatusEnabled)
	return at
}

func TestPurgeIsRefusedWhereARetentionForbidsIt(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		e = e.locked()
		_, err := e.s3.PutObjectLockConfiguration(e.ctx(), &s3.PutObjectLockConfigurationInput{Bucket: &e.bucket,
			ObjectLockConfiguration: &types.ObjectLockConfiguration{
				ObjectLockEnabled: types.ObjectLockEnabledEnabled,
				Rule:              &types.ObjectLockRule{DefaultRetention: &types.DefaultRetention{Mode: types.ObjectLockRetentionModeGovernance, Days: aws.Int32(1)}},
			}})
		if err != nil {
			t.Fatal(err)
		}
		p := e.process()
		e.want(p.tryCreate("v", "onDelete", "purge"), fault.Precondition, "parameters.onDelete", "GOVERNANCE")
		id := p.create("v")
		e.put(id.Prefix + "data")
		p.delete(id)
		e.same("current", e.keysBelow(id.Prefix), nil)
	})
}

func TestALegalHoldIsReportedAndNotBypassed(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		e = e.locked()
		p := e.process()
		id := p.create("v", "onDelete", "purge")
		held := id.Prefix + "held"
		e.put(append(numbered(id.Prefix, 10), held)...)
		_, err := e.s3.PutObjectLegalHold(e.ctx(), &s3.PutObjectLegalHoldInput{Bucket: &e.bucket, Key: &held,
			LegalHold: &types.ObjectLockLegalHold{Status: types.ObjectLockLegalHoldStatusOn}})
		if err != nil {
			t.Fatal(err)
		}
		err = p.tryDelete(id)
		if err == nil {
			t.Fatal("the volume is said to be deleted")
		}
		if !strings.Contains(err.Error(), "1 object of") || !strings.Contains(err.Error(), held) {
			t.Errorf("the error does not name the object: %v", err)
		}
		e.same("current", e.keysBelow(id.Prefix), []string{held})
		e.state("v", "deleting")
	})
}

func TestManyObjects(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		keys := numbered(id.Prefix, 1100)
		if e.name == "versitygw" {
			for i := range 7 {
				keys = append(keys, fmt.Sprintf("%sd%02d/", id.Prefix, i)) // cannot go before what is in them
			}
		}
		e.put(keys...)
		e.put("v-neighbour/data")
		p.hooks.reset()
		p.delete(id)
		e.same("data", e.keysBelow("v"), []string{"v-neighbour/data"})
		if n := strings.Count(strings.Join(p.hooks.sent(), " "), "DeleteObjects"); n > 5 {
			t.Errorf("%d multi-deletes for %d objects", n, len(keys))
		}
	})
}

func TestManyVersions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		p := e.process()
		id := p.create("v", "onDelete", "purge")
		keys := numbered(id.Prefix, 350)
		for range 3 {
			e.put(keys...)
		}
		for _, key := range keys[:50] {
			e.remove(key)
		}
		p.delete(id)
		e.same("versions", e.versions("v/"), nil)
	})
}
