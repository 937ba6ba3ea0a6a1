package lifecycle_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Whatever id a CO made up, and whatever backend the config has lost: unpublishing what is not published succeeds and touches nothing.
func TestUnpublishingWhatIsNotPublishedSucceedsAndTouchesNothing(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	target, empty := n.Target("a"), n.Target("empty")
	rigtest.Publish(t, d, v, target)
	unpublish := func(id, path string) error {
		_, err := d.NodeUnpublishVolume(rigtest.Context(t, time.Minute), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: path})
		return err
	}
	for _, id := range []string{"default:" + rigtest.Bucket + "/never-made/", "pvc-of-another-driver", "nowhere:" + rigtest.Bucket, v.GetVolumeId()} {
		if err := os.Mkdir(empty, 0o750); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{n.Target("never"), filepath.Join(n.Dir, "no", "such", "parent"), empty} {
			if err := unpublish(id, path); err != nil || exists(path) {
				t.Errorf("volume %s at %s: %v, there: %t", id, path, err, exists(path))
			}
		}
	}
	hasCode(t, unpublish("default:"+rigtest.Bucket+"/never-made/", target), codes.FailedPrecondition, target)
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600); err != nil {
		t.Errorf("the published volume: %v", err)
	}
	for range 3 {
		rigtest.Unpublish(t, d, v, target)
	}
	n.NothingLeft(t)
}
