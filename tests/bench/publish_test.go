package bench

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// BenchmarkColdPublish compares NodePublishVolume of a volume that is not mounted on the node with the bare client.
//
// Both are timed until a directory of the volume has been read through the path that a pod would use, so both have made
// their first request to S3. What the driver does beyond that is in its time: the call over gRPC, the check of the
// credentials, the helper's start, the records, the bind mount.
//
// publish-ms and bare-ms are medians; publish/bare is their quotient. unpublish-ms and bare-stop-ms are medians of the ends.
//
// Declared clients are measured as well: Debian's rclone with the descriptor as a path and by fusermount, and s3fs with static keys.
func BenchmarkColdPublish(b *testing.B) {
	eachClient(b, func(b *testing.B, client string) {
		n, d := setup(b, client)
		measureColdPublish(b, n, d, nil)
	})
	for _, c := range declaredClients() {
		b.Run(c.name, func(b *testing.B) {
			n, d := c.setup(b)
			measureColdPublish(b, n, d, c.secret(n))
		})
	}
}

func measureColdPublish(b *testing.B, n *rigtest.Node, d *rig.Driver, secret map[string]string) {
	b.Helper()
	const rounds = 41
	published, byHand := waysWith(b, n, d, volume(b, n, "cold"), n.Target("pod"), secret)
	measure := func(w way) func(int) {
		return func(int) {
			w.note("start", took(b, w.start))
			w.note("stop", took(b, w.stop))
		}
	}
	inTurns(rounds, measure(published), measure(byHand))
	n.NothingLeft(b)
	publish, bare := published.measured["start"], byHand.measured["start"]
	unpublish, stop := published.measured["stop"], byHand.measured["stop"]
	b.Logf("publish %s ms, bare %s ms; unpublish %s ms, bare %s ms", span(publish), span(bare), span(unpublish), span(stop))
	b.ReportMetric(median(unpublish), "unpublish-ms")
	b.ReportMetric(median(stop), "bare-stop-ms")
	b.ReportMetric(median(publish), "publish-ms")
	b.ReportMetric(median(bare), "bare-ms")
	b.ReportMetric(median(publish)/median(bare), "publish/bare")
}

// BenchmarkSharedPublish times NodePublishVolume of a volume that is mounted on the node already, for one more pod. read-ms is
// the first read of its directory there, for which Mountpoint asks S3.
func BenchmarkSharedPublish(b *testing.B) { eachClient(b, measureSharedPublish) }

func measureSharedPublish(b *testing.B, client string) {
	const rounds = 51
	n, d := setup(b, client)
	v := volume(b, n, "shared")
	first := n.Target("first")
	rigtest.Publish(b, d, v, first)
	var published, read []float64
	for i := range rounds {
		target := n.Target(fmt.Sprintf("pod-%d", i))
		published = append(published, took(b, func() error {
			rigtest.Publish(b, d, v, target)
			return nil
		}))
		read = append(read, took(b, func() error { return readRoot(target) }))
		rigtest.Unpublish(b, d, v, target)
	}
	if mounts, err := filepath.Glob(filepath.Join(n.State, "mounts", "*")); err != nil || len(mounts) != 1 {
		b.Errorf("the mount was not shared: %v, %v", mounts, err)
	}
	rigtest.Unpublish(b, d, v, first)
	n.NothingLeft(b)
	b.Logf("shared publish %s ms, read %s ms", span(published), span(read))
	b.ReportMetric(median(published), "publish-ms")
	b.ReportMetric(median(read), "read-ms")
}

// BenchmarkLingeringPublish times NodePublishVolume of a volume whose mount lingers on the node, until its directory has been read.
// unpublish-ms is the median of the ends after which it lingers.
func BenchmarkLingeringPublish(b *testing.B) { eachClient(b, measureLingeringPublish) }

func measureLingeringPublish(b *testing.B, client string) {
	const rounds = 51
	n, d := setup(b, client)
	v := volume(b, n, "lingering")
	v.VolumeContext["linger"] = "1h"
	target := n.Target("pod")
	rigtest.Publish(b, d, v, target)
	must(b, readRoot(target))
	var published, read, unpublished []float64
	for range rounds {
		unpublished = append(unpublished, took(b, func() error {
			rigtest.Unpublish(b, d, v, target)
			return nil
		}))
		published = append(published, took(b, func() error {
			rigtest.Publish(b, d, v, target)
			return nil
		}))
		read = append(read, took(b, func() error { return readRoot(target) }))
	}
	rigtest.Unpublish(b, d, v, target)
	if mounts, err := filepath.Glob(filepath.Join(n.State, "mounts", "*")); err != nil || len(mounts) != 1 {
		b.Errorf("the mount did not linger: %v, %v", mounts, err)
	}
	d.Kill()
	drive(b, n, client, "--linger-max-mounts=0")
	n.AwaitNothingLeft(b, 20*time.Second)
	b.Logf("publish %s ms, read %s ms, unpublish %s ms", span(published), span(read), span(unpublished))
	b.ReportMetric(median(published), "publish-ms")
	b.ReportMetric(median(read), "read-ms")
	b.ReportMetric(median(unpublished), "unpublish-ms")
}
