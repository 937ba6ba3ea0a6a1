//go:build !lane || ordinary

package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// However often the driver is killed, wherever it is in a publication or its end: what was written through a volume that
// was published is stored, and in the end nothing is left.
func TestKilledAnywhere(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("chaos", rclone)
	wrote := map[string]string{}
	// call makes calls of a CO until one succeeds, while the driver is killed under it.
	call := func(what string, kill bool, try func(ctx context.Context, d csi.NodeClient) error) {
		t.Helper()
		for attempt := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			driver, done := e.Driver, make(chan error, 1)
			go func() { done <- try(ctx, driver) }()
			if kill && attempt < 2 {
				time.Sleep(time.Duration(rand.IntN(120)) * time.Millisecond)
				e.restart()
			}
			err := <-done
			cancel()
			if err == nil {
				return
			}
			if attempt >= 2 {
				t.Logf("%s, attempt %d: %v", what, attempt, err)
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Fatalf("%s did not succeed", what)
	}
	target := e.Target("t")
	for round := range 6 {
		call("publish", true, func(ctx context.Context, d csi.NodeClient) error {
			_, err := d.NodePublishVolume(ctx, rigtest.PublishRequest(v, target))
			return err
		})
		name := fmt.Sprint("file-", round)
		wrote[name] = random(100 << 10)
		write(t, filepath.Join(target, name), wrote[name])
		call("unpublish", true, func(ctx context.Context, d csi.NodeClient) error {
			_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
			return err
		})
		if got := e.Object(t, bucket, "chaos/"+name); got != wrote[name] {
			t.Errorf("round %d: the object has %d bytes, equal: %t", round, len(got), got == wrote[name])
		}
	}
	e.awaitNothingLeft(20 * time.Second)
}
