//go:build !lane || ordinary

package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Helpers, clients, mounts and open files outlive a driver that is killed; the next one shares the mount and ends it.
func TestMountsSurviveTheDriver(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("survive", client)
		a := e.publish(v, "a")
		write(t, filepath.Join(a, "before"), "1")
		held, err := os.Open(filepath.Join(a, "before"))
		if err != nil {
			t.Fatal(err)
		}
		defer held.Close()
		before := e.Running("")

		e.Kill()
		write(t, filepath.Join(a, "without"), "2")
		if got := read(t, filepath.Join(a, "before")); got != "1" {
			t.Errorf("without a driver the file reads %q", got)
		}
		e.drive()
		if b := make([]byte, 1); func() error { _, err := held.ReadAt(b, 0); return err }() != nil || b[0] != '1' {
			t.Error("the file that was open while the driver was killed cannot be read")
		}
		held.Close()
		b := e.publish(v, "b")
		if got := read(t, filepath.Join(b, "without")); got != "2" {
			t.Errorf("the new publication reads %q", got)
		}
		if after := e.Running(""); !slices.Equal(before, after) {
			t.Errorf("before the crash %v ran, after it %v: the mount is not shared", before, after)
		}
		e.unpublish(v, a)
		write(t, filepath.Join(b, "after"), "3")
		e.unpublish(v, b)
		e.NothingLeft(t)
		if got := e.Keys(t, bucket, "survive/"); len(got) != 3 {
			t.Errorf("the bucket holds %v", got)
		}
	})
}

// Where the driver is not to heal by itself, a mount whose client exited comes back with the next publication of its target,
// and can be taken away without that.
func TestExitedClient_IsReplacedByThePublication(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("dead", client)
		a, b := e.publish(v, "a"), e.publish(v, "b")
		write(t, filepath.Join(a, "file"), "x")
		e.await(20*time.Second, "the upload", func() bool { return len(e.Keys(t, bucket, "dead/file")) > 0 })
		rigtest.Kill(e.t, e.client(client))
		e.await(5*time.Second, "ENOTCONN: the driver must hold no copy of the FUSE descriptor", func() bool {
			_, err := os.Stat(filepath.Join(a, "file"))
			return errors.Is(err, unix.ENOTCONN)
		})
		e.publish(v, "a")
		if got := read(t, filepath.Join(a, "file")); got != "x" {
			t.Errorf("after the republication the file reads %q", got)
		}
		if n := len(mountsAt(t, a)); n != 1 {
			t.Errorf("%d mounts are stacked on the target", n)
		}
		if _, err := os.Stat(filepath.Join(b, "file")); !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("the other target: %v", err)
		}
		e.publish(v, "b")
		if got := read(t, filepath.Join(b, "file")); got != "x" {
			t.Errorf("the other target reads %q", got)
		}
		e.client(client) // the two share one again
		rigtest.Kill(e.t, e.client(client))
		e.unpublish(v, a)
		e.unpublish(v, b)
		e.awaitNothingLeft(time.Second)
	}, "--heal=false")
}

// A helper that exited with its client is no obstacle either.
func TestExitedHelper_IsReplacedByThePublication(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("helperless", rclone)
	target := e.publish(v, "a")
	for _, p := range e.Running("") {
		rigtest.Kill(e.t, p)
	}
	e.publish(v, "a")
	write(t, filepath.Join(target, "file"), "x")
	for _, p := range e.Running("") {
		if p.Name != programs[rclone] {
			rigtest.Kill(e.t, p)
		}
	}
	// The client lives on without its helper; what it was given is stored all the same.
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "helperless/file"); got != "x" {
		t.Errorf("the object is %q", got)
	}
	e.awaitNothingLeft(time.Second)
}
