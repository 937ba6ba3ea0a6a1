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

// Identical publications at the same time are one piece of work.
func TestConcurrentPublicationsJoin(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("join", rclone)
	target := e.Target("t")
	e.proxy.Set(faultproxy.Faults{Latency: 50 * time.Millisecond})
	errs := make([]error, 20)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = e.tryPublish(time.Minute, v, target) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("publication %d: %v", i, err)
		}
	}
	if n := len(mountsAt(t, target)); n != 1 {
		t.Errorf("%d mounts on the target", n)
	}
	if got := e.lives(); got != 1 {
		t.Errorf("%d mounts were made", got)
	}
	e.client(rclone)
	e.proxy.Set(faultproxy.Faults{})

	// Different targets of one volume share the one mount, however they come.
	for i := range errs[:8] {
		wg.Go(func() { errs[i] = e.tryPublish(time.Minute, v, e.Target(string(rune('a'+i)))) })
	}
	wg.Wait()
	for i := range errs[:8] {
		wg.Go(func() { errs[i] = e.tryUnpublish(time.Minute, v, e.Target(string(rune('a'+i)))) })
	}
	wg.Wait()
	for i, err := range errs[:8] {
		if err != nil {
			t.Errorf("target %d: %v", i, err)
		}
	}
	if got := e.lives(); got != 1 {
		t.Errorf("%d mounts were made", got)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// A publication goes on when its call times out, and the retry joins it; any other call for the target gets an error that says that
// it is busy.
func TestAPublicationOutlivesItsCall(t *testing.T) {
	e := start(t)
	v := static("slow", rclone)
	target := e.Target("t")
	e.proxy.Set(faultproxy.Faults{Blackhole: true})
	want(t, e.tryPublish(time.Second, v, target), codes.DeadlineExceeded)
	want(t, e.tryUnpublish(10*time.Second, v, target), codes.Aborted, target)
	want(t, e.tryPublish(10*time.Second, v, target, readOnly), codes.Aborted, target)
	e.proxy.Set(faultproxy.Faults{})
	e.publish(v, "t")
	if got := e.lives(); got != 1 {
		t.Errorf("%d mounts were made", got)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

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
