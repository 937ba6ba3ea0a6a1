//go:build !lane || ordinary

package node

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// The operator's own directories may be symbolic links.
func TestDirectoriesBehindSymbolicLinks(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	links := filepath.Join(e.Rig.Dir, "links")
	if err := os.Mkdir(links, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"s": e.State, "c": e.Cache, "t": filepath.Join(e.Rig.Dir, "targets")} {
		if err := os.MkdirAll(to, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, filepath.Join(links, name)); err != nil {
			t.Fatal(err)
		}
	}
	short := filepath.Join("/run", filepath.Base(e.State)+"-l")
	if err := os.Symlink(e.State, short); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(short) })
	e.drive("--state-dir="+short, "--cache-dir="+filepath.Join(links, "c"), "--target-root="+filepath.Join(links, "t"))
	v := static("linked", rclone)
	e.Target("t")
	target := filepath.Join(links, "t", "t", "mount")
	for range 2 {
		if err := e.tryPublish(20*time.Second, v, target); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(target, "file"), "x")
	if n := len(mountsAt(t, e.Target("t"))); n != 1 {
		t.Errorf("%d mounts are on the target", n)
	}
	if _, err := e.stats(5*time.Second, v, target); err != nil {
		t.Error(err)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
	if got := e.Object(t, bucket, "linked/file"); got != "x" {
		t.Errorf("the object is %q", got)
	}
}

// The driver's own directories are no targets, neither to publish nor to unpublish: there are the mounts behind all targets.
func TestOwnDirectoriesAreNoTargets(t *testing.T) {
	rigtest.ProcessOnly(t, "targets are checked before anything is started")
	t.Parallel()
	e := start(t)
	v := static("own", rclone)
	target := e.publish(v, "t")
	sources, err := filepath.Glob(filepath.Join(e.State, "sources", "*"))
	if err != nil || len(sources) != 1 {
		t.Fatalf("sources: %v, %v", sources, err)
	}
	for _, own := range []string{sources[0], e.State, e.Cache} {
		want(t, e.tryUnpublish(10*time.Second, v, own), codes.InvalidArgument, "target_path", "of the driver itself")
	}
	write(t, filepath.Join(target, "file"), "x")
	e.unpublish(v, target)
	e.NothingLeft(t)
}
