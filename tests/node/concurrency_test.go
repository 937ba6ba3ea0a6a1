//go:build !lane || ordinary

package node

import (
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A volume whose S3 does not answer delays no other volume.
func TestUnresponsiveVolume_DelaysNoOther(t *testing.T) {
	e := start(t)
	v := static("hang", rclone)
	e.proxy.Set(faultproxy.Faults{Blackhole: true})
	want(t, e.tryPublish(300*time.Millisecond, v, e.Target("t")), codes.DeadlineExceeded)
	info, err := e.NodeGetInfo(rigtest.Context(t, 10*time.Second), nil) // the publication waits longer
	if err != nil || info.GetNodeId() != "node-1" {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	e.proxy.Set(faultproxy.Faults{})
	other := static("free", rclone)
	e.unpublish(other, e.publish(other, "other"))
	e.publish(v, "t")
	e.unpublish(v, e.Target("t"))
	e.NothingLeft(t)
}

// Publications and unpublications of one target, whatever their order, leave it published or not, and nothing else.
func TestPublishAndUnpublishInAnyOrder(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("churn", rclone)
	var wg sync.WaitGroup
	for i := range 3 {
		target := e.Target(string(rune('a' + i%2)))
		wg.Go(func() {
			for range 8 {
				_ = e.tryPublish(30*time.Second, v, target)
			}
		})
		wg.Go(func() {
			for range 8 {
				_ = e.tryUnpublish(30*time.Second, v, target)
			}
		})
	}
	wg.Wait()
	a, b := e.publish(v, "a"), e.publish(v, "b")
	write(t, filepath.Join(a, "file"), "x")
	if got := read(t, filepath.Join(b, "file")); got != "x" {
		t.Errorf("the file reads %q", got)
	}
	for _, target := range []string{a, b} {
		if n := len(mountsAt(t, target)); n != 1 {
			t.Errorf("%d mounts on %s", n, target)
		}
		e.unpublish(v, target)
	}
	e.NothingLeft(t)
}
