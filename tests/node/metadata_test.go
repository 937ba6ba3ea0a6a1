//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const manyFiles = 150

// fill stores manyFiles objects below a prefix, whose content is their name, and returns the names.
func (e *env) fill(prefix string) []string {
	e.t.Helper()
	var names []string
	var puts errgroup.Group
	puts.SetLimit(8)
	for i := range manyFiles {
		name := fmt.Sprintf("file-%04d", i)
		names = append(names, name)
		puts.Go(func() error {
			_, err := e.Server.S3.PutObject(e.t.Context(), &s3.PutObjectInput{Bucket: aws.String(bucket), Key: aws.String(prefix + name), Body: strings.NewReader(name)})
			return err
		})
	}
	if err := puts.Wait(); err != nil {
		e.t.Fatal(err)
	}
	return names
}

// requestsOfStats lists a directory, and returns how many requests the stats of all its files take after that.
func (e *env) requestsOfStats(dir string, names []string) int {
	e.t.Helper()
	if got := list(e.t, dir); len(got) != len(names) {
		e.t.Fatalf("%d files are listed, want %d", len(got), len(names))
	}
	time.Sleep(1500 * time.Millisecond) // longer than what is kept of a file in any case
	before := e.proxy.Requests()
	for _, name := range names {
		fi, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			e.t.Fatal(err)
		}
		if fi.Size() != int64(len(name)) {
			e.t.Errorf("%s has %d bytes", name, fi.Size())
		}
	}
	return e.proxy.Requests() - before
}

// After a listing, the attributes of its files take no requests, where the volume keeps what a listing showed.
func TestStatsAfterAListing(t *testing.T) {
	rigtest.ProcessOnly(t, "what is kept of a listing is the client's own doing")
	t.Parallel()
	e := start(t)
	names := e.fill("listed/")
	for _, tt := range []struct {
		what        string
		v           *csi.Volume
		least, most int
	}{
		{"rclone, relaxed", static("listed", rclone, "consistency", "relaxed"), 0, 2},
		{"rclone, with the times of uploads", static("listed", rclone, "mountOptions", "server-mtime"), 0, 2},
		{"rclone, which reads modification times", static("listed", rclone), manyFiles, manyFiles + 4},
		{"mountpoint-s3, relaxed", static("listed", mountpoint, "consistency", "relaxed"), 0, 4},
		{"mountpoint-s3, read-only", static("listed", mountpoint, "readOnly", "true"), 0, 4},
		{"mountpoint-s3, read-only and close-to-open", static("listed", mountpoint, "readOnly", "true", "consistency", "close-to-open"), manyFiles, 3 * manyFiles},
		{"mountpoint-s3", static("listed", mountpoint), manyFiles, 3 * manyFiles},
	} {
		target := e.publish(tt.v, "t")
		if n := e.requestsOfStats(target, names); n < tt.least || n > tt.most {
			t.Errorf("%s: %d requests for the attributes of %d files, want from %d to %d", tt.what, n, manyFiles, tt.least, tt.most)
		}
		e.unpublish(tt.v, target)
	}
	e.awaitNothingLeft(5 * time.Second)
}

// What a mount keeps of a listing hides no change of its own, and no file that another writer adds. By default it hides no change of
// other writers.
func TestChangesAfterAListing(t *testing.T) {
	rigtest.ProcessOnly(t, "what is kept of a listing is the client's own doing")
	t.Parallel()
	e := start(t)
	for i, tt := range []struct {
		what   string
		client string
		pairs  []string
		sees   bool // changes of other writers, soon
	}{
		{"rclone", rclone, nil, true},
		{"rclone, relaxed", rclone, []string{"consistency", "relaxed"}, false},
		{"mountpoint-s3", mountpoint, nil, true},
		{"mountpoint-s3, relaxed", mountpoint, []string{"consistency", "relaxed"}, false},
		{"mountpoint-s3, relaxed for two seconds", mountpoint, []string{"consistency", "relaxed", "mountOptions", "metadata-ttl=2"}, true},
		{"mountpoint-s3, close-to-open with a cache", mountpoint, []string{"consistency", "close-to-open", "cache", "true"}, true},
	} {
		name := fmt.Sprintf("changes-%d", i)
		for _, file := range []string{"replaced", "removed", "mine"} {
			e.Put(t, bucket, name+"/"+file, "old")
		}
		v := static(name, tt.client, tt.pairs...)
		target := e.publish(v, "t")
		at := func(file string) string { return filepath.Join(target, file) }
		if got := len(list(t, target)); got != 3 {
			t.Errorf("%s: %d files are listed", tt.what, got)
		}
		for _, file := range []string{"replaced", "removed", "mine"} {
			if _, err := os.Stat(at(file)); err != nil {
				t.Error(err)
			}
		}

		write(t, at("mine"), "changed here")
		if fi, err := os.Stat(at("mine")); err != nil || fi.Size() != int64(len("changed here")) {
			t.Errorf("%s: the mount's own change: %v, %v", tt.what, fi, err)
		}
		if err := os.Remove(at("removed")); err != nil {
			t.Errorf("%s: %v", tt.what, err)
		}
		if _, err := os.Stat(at("removed")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: a file that was removed here: %v", tt.what, err)
		}
		if _, err := os.Stat(at("later")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: a missing file: %v", tt.what, err)
		}

		e.Put(t, bucket, name+"/later", "added elsewhere")
		e.Put(t, bucket, name+"/replaced", "replaced elsewhere")
		if tt.sees || tt.client == mountpoint { // rclone knows names from listings alone
			e.awaitRead(30*time.Second, at("later"), "added elsewhere")
		}
		if tt.sees {
			e.awaitRead(30*time.Second, at("replaced"), "replaced elsewhere")
			if fi, err := os.Stat(at("replaced")); err != nil || fi.Size() != int64(len("replaced elsewhere")) {
				t.Errorf("%s: a change by another writer: %v, %v", tt.what, fi, err)
			}
		}
		e.unpublish(v, target)
	}
	e.awaitNothingLeft(5 * time.Second)
}

func TestConsistencyThatAnOptionContradicts(t *testing.T) {
	rigtest.ProcessOnly(t, "what is asked for a file is the client's own doing")
	t.Parallel()
	e := start(t)
	for _, v := range []*csi.Volume{
		static("refused", mountpoint, "consistency", "relaxed", "mountOptions", "metadata-ttl=minimal"),
		static("refused", mountpoint, "consistency", "close-to-open", "mountOptions", "metadata-ttl=60"),
		static("refused", rclone, "consistency", "close-to-open", "mountOptions", "dir-cache-time=1h"),
		static("refused", rclone, "consistency", "strict"),
	} {
		target := e.Target("t")
		want(t, e.tryPublish(time.Minute, v, target), codes.InvalidArgument, "consistency")
		e.undone(target)
	}
}

// The requests of a small file are those that docs/reference/clients.md lists.
func TestRequestsOfASmallFile(t *testing.T) {
	rigtest.ProcessOnly(t, "what is asked for a file is the client's own doing")
	t.Parallel()
	e := start(t)
	for _, tt := range []struct {
		consistency string
		most        int
	}{{"close-to-open", 7}, {"relaxed", 5}} {
		v := static("small-"+tt.consistency, mountpoint, "consistency", tt.consistency)
		target := e.publish(v, "t")
		_ = list(t, target)
		fewest := 0
		for i := range 5 { // a busy machine can take so long that a lookup is repeated
			before := e.proxy.Requests()
			write(t, filepath.Join(target, fmt.Sprint(i)), "small")
			if n := e.proxy.Requests() - before; fewest == 0 || n < fewest {
				fewest = n
			}
		}
		if fewest > tt.most {
			t.Errorf("%s: a small file takes %d requests, want at most %d", tt.consistency, fewest, tt.most)
		}
		t.Logf("%s: a small file takes %d requests", tt.consistency, fewest)
		e.unpublish(v, target)
	}
}
