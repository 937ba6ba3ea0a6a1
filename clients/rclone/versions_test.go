package main

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/rclone/rclone/vfs/vfscache/writeback"
)

func TestVersionsAreRecognised(t *testing.T) {
	at := time.Date(2026, 11, 22, 10, 20, 30, 0, time.UTC)
	const sum, other = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"
	whole := stateOf(&awss3.HeadObjectOutput{ETag: aws.String(`"` + sum + `"`), ContentLength: aws.Int64(7), LastModified: &at})
	parts := stateOf(&awss3.HeadObjectOutput{ETag: aws.String(`"` + other + `-2"`), ContentLength: aws.Int64(7), LastModified: &at})
	ours := stateOf(&awss3.HeadObjectOutput{
		ETag: aws.String(`"` + other + `-2"`), ContentLength: aws.Int64(7), LastModified: &at,
		Metadata: map[string]string{"md5chksum": "ASNFZ4mrze8BI0VniavN7w==", "mtime": "1600000000.123456789"},
	})
	mtime := time.Unix(1600000000, 123456789).UTC().String()
	none := remoteState{}
	for _, c := range []struct {
		what  string
		state remoteState
		v     objectVersion
		is    bool
	}{
		{"no object", none, "", true},
		{"no object, as it is kept", none, noObject, true},
		{"an object, and there was none", whole, "", false},
		{"an object, and there was none, as it is kept", whole, noObject, false},
		{"the content", whole, contentVersion(7, sum), true},
		{"rclone's form", whole, objectVersion("7," + at.String() + "," + sum), true},
		{"another content", whole, contentVersion(7, other), false},
		{"another size", whole, contentVersion(8, sum), false},
		{"removed", none, contentVersion(7, sum), false},
		{"in parts, by its metadata", ours, objectVersion("7," + mtime + "," + sum), true},
		{"in parts, another content", ours, objectVersion("7," + mtime + "," + other), false},
		{"in parts, by its time in the metadata", ours, objectVersion("7," + mtime + ","), true},
		{"in parts, by its time", parts, objectVersion("7," + at.Add(123*time.Millisecond).String() + ","), true},
		{"in parts, at another time", parts, objectVersion("7," + at.Add(time.Second).String() + ","), false},
		{"in parts, with an MD5 that it has not", parts, contentVersion(7, sum), false},
		{"before a rename", whole, storedBefore(at.Add(time.Second)), true},
		{"in the second of a rename", whole, storedBefore(at.Add(999 * time.Millisecond)), false},
		{"after a rename", whole, storedBefore(at.Add(-time.Second)), false},
		{"none before a rename", none, storedBefore(at), true},
		{"after a conflict", whole, objectVersion("7," + at.String() + ",conflict"), false},
		{"nonsense", whole, "7", false},
	} {
		if is := c.state.is(c.v); is != c.is {
			t.Errorf("%s: %q of %+v: %t", c.what, c.v, c.state, is)
		}
	}
}

// The time of the last close counts, not the number of attempts or the file's modification time.
func TestAnUploadIsLateTenSecondsAfterTheClose(t *testing.T) {
	c := newCache(config{bucket: "b", prefix: "p/", cacheDir: t.TempDir()})
	check(t, os.MkdirAll(c.meta, 0o700))
	check(t, os.WriteFile(filepath.Join(c.meta, "file"), []byte(`{"Dirty":true,"Fingerprint":"5,x,y"}`), 0o600))
	synctest.Test(t, func(t *testing.T) {
		u := newUnsentFiles(c)
		old := time.Now().Add(-time.Hour)
		queue := []writeback.QueueInfo{{Name: "file", ID: 1}}
		late := func(want bool) {
			t.Helper()
			if known, _, late := u.late("file", old); late != want || late && known[0] != "5,x,y" {
				t.Errorf("late: %t, known %q; want %t", late, known, want)
			}
		}
		late(false) // not seen yet
		u.observe(queue)
		late(false)
		time.Sleep(lateAfter)
		u.observe(queue)
		late(true)
		u.observe(nil) // it is written to again
		u.observe(queue)
		late(false)
		time.Sleep(lateAfter)
		late(true)
		u.observe([]writeback.QueueInfo{{Name: "renamed", ID: 1}})
		if _, _, late := u.late("renamed", old); late {
			t.Error("a file that was just renamed is late")
		}
		time.Sleep(2 * rememberStored)
		u.observe(nil)
		if len(u.of) != 0 {
			t.Errorf("what has left the queue is not forgotten: %v", u.of)
		}
	})
}
