//go:build !lane || ordinary

package credentials

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A measurement has a session of its own, whatever the credentials come from: it reads the record, which the mount's session cannot.
func TestUsageIsMeasuredWithASessionOfItsOwn(t *testing.T) {
	e := newEnv(t)
	e.Driver = e.Drive(t, "all", "--config="+e.config)
	for i, from := range e.sources() {
		for _, ownBucket := range []bool{false, true} {
			name := fmt.Sprintf("usage-%d-%t", i, ownBucket)
			t.Run(fmt.Sprintf("%s, own bucket %t", from.name, ownBucket), func(t *testing.T) {
				req := rigtest.CreateRequest(name, "usage", "6h", "client", rclone, "scope", "required")
				req.CapacityRange = &csi.CapacityRange{RequiredBytes: 1000}
				in, below := rigtest.Bucket, name+"/"
				if ownBucket {
					delete(req.GetParameters(), "bucketName")
				}
				created, err := e.CreateVolume(rigtest.Context(t, time.Minute), req)
				if err != nil {
					t.Fatal(err)
				}
				v := created.GetVolume()
				if ownBucket {
					in, below = strings.TrimPrefix(v.GetVolumeId(), "default:"), ""
				}
				e.Put(t, in, below+"file", "12345")
				before := len(e.named())
				target := e.Target(name)
				if err := e.tryPublish(v, target, from); err != nil {
					t.Fatal(err)
				}
				size := fmt.Sprintf(`s3csi_volume_size_bytes{volume=%q} 1000`, v.GetVolumeId())
				rigtest.Await(t, time.Minute, size, func() bool { return strings.Contains(e.metrics(), size) })
				resp, err := e.NodeGetVolumeStats(rigtest.Context(t, 10*time.Second), &csi.NodeGetVolumeStatsRequest{VolumeId: v.GetVolumeId(), VolumePath: target})
				if err != nil || resp.GetUsage()[0].GetUsed() != 5 || resp.GetUsage()[0].GetTotal() != 1000 {
					t.Errorf("%v, %v", resp, err)
				}
				if made := len(e.named()) - before; made < 2 {
					t.Errorf("%d sessions for a mount and a measurement", made)
				}
				e.unpublish(v, target)
			})
		}
	}
}
