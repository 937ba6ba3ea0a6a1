//go:build !lane || ordinary

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
)

// powerCut ends everything of the node at once and forgets what is not on a disk.
func (e *env) powerCut(target string) {
	e.t.Helper()
	e.Kill()
	e.killAll()
	if err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		e.t.Fatal(err)
	}
	for _, pattern := range []string{"mounts/*", "sources/*", "publications/*"} {
		all, err := filepath.Glob(filepath.Join(e.State, pattern))
		if err != nil {
			e.t.Fatal(err)
		}
		for _, path := range all {
			_ = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // a source
			if err := os.RemoveAll(path); err != nil {
				e.t.Fatal(err)
			}
		}
	}
}

// A node comes back after a power cut with a file that another one has stored, or removed, since. What is in S3 stays, the file is
// kept for a human, and the metric and the log tell.
func TestANodeThatComesBackReplacesNothingNewer(t *testing.T) {
	t.Parallel()
	eachService(t, comesBack)
}

func comesBack(t *testing.T, e *env) {
	e.Put(t, bucket, "back/removed", "first")
	v := static("back", rclone)
	target := e.publish(v, "t")
	if got := read(t, filepath.Join(target, "removed")); got != "first" {
		t.Fatalf("it reads %q", got)
	}
	e.proxy.Set(faultproxy.Faults{Refuse: true})
	for _, name := range []string{"file", "removed"} {
		write(t, filepath.Join(target, name), "old")
	}
	time.Sleep(300 * time.Millisecond) // the close is asynchronous where the kernel is concerned
	e.powerCut(target)
	e.Put(t, bucket, "back/file", "newer, of another node")
	key := "back/removed"
	if _, err := e.Server.S3.DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: &key}); err != nil {
		t.Fatal(err)
	}
	e.proxy.Set(faultproxy.Faults{})
	e.drive()
	var kept []string
	e.await(30*time.Second, "the files to be kept", func() bool {
		kept, _ = filepath.Glob(filepath.Join(e.Cache, "kept-*"))
		return len(kept) == 1
	})
	for _, name := range []string{"file", "removed"} {
		if got := read(t, filepath.Join(kept[0], name)); got != "old" {
			t.Errorf("kept of %s: %q", name, got)
		}
	}
	if got := e.Object(t, bucket, "back/file"); got != "newer, of another node" {
		t.Errorf("the object is %q", got)
	}
	if keys := e.Keys(t, bucket, "back/"); strings.Join(keys, " ") != "back/file" {
		t.Errorf("the objects are %q", keys)
	}
	if n := e.count("s3csi_mount_conflicts_total", rclone); n != 2 {
		t.Errorf("%v conflicts are counted, want 2", n)
	}
	if !strings.Contains(e.Logs(), "Write conflict, local copies quarantined") {
		t.Error("the log does not report the conflicts")
	}
	if err := os.RemoveAll(kept[0]); err != nil {
		t.Fatal(err)
	}
	e.awaitNothingLeft(10 * time.Second)
}
