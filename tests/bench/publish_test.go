package bench

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// BenchmarkColdPublish compares NodePublishVolume of a volume that is not mounted on the node with the bare client.
//
// Both are timed until a directory of the volume has been read through the path that a pod would use, so both have made
// their first request to S3. What the driver does beyond that is in its time: the call over gRPC, the check of the
// credentials, the helper's start, the records, the bind mount.
//
// publish-ms and bare-ms are medians; publish/bare is their quotient. unpublish-ms and bare-stop-ms are medians of the ends.
func BenchmarkColdPublish(b *testing.B) {
	const rounds = 61
	n, d := setup(b)
	v := volume(b, n, "cold")
	target := n.Target("pod")
	rigtest.Publish(b, d, v, target)
	byHand := newBare(b, n)
	rigtest.Unpublish(b, d, v, target)

	var published, bare, unpublished, stopped []float64
	inTurns(rounds, func(int) {
		published = append(published, took(b, func() error {
			rigtest.Publish(b, d, v, target)
			return readRoot(target)
		}))
		unpublished = append(unpublished, took(b, func() error { rigtest.Unpublish(b, d, v, target); return nil }))
	}, func(int) {
		bare = append(bare, took(b, byHand.start))
		stopped = append(stopped, took(b, byHand.stop))
	})
	n.NothingLeft(b)
	b.Logf("publish %s ms, bare %s ms; unpublish %s ms, bare %s ms", span(published), span(bare), span(unpublished), span(stopped))
	b.ReportMetric(median(unpublished), "unpublish-ms")
	b.ReportMetric(median(stopped), "bare-stop-ms")
	b.ReportMetric(median(published), "publish-ms")
	b.ReportMetric(median(bare), "bare-ms")
	b.ReportMetric(median(published)/median(bare), "publish/bare")
}

// BenchmarkSharedPublish times NodePublishVolume of a volume that is mounted on the node already, for one more pod, until
// its directory has been read there.
func BenchmarkSharedPublish(b *testing.B) {
	const rounds = 51
	n, d := setup(b)
	v := volume(b, n, "shared")
	first := n.Target("first")
	rigtest.Publish(b, d, v, first)
	var times []float64
	for i := range rounds {
		target := n.Target(fmt.Sprintf("pod-%d", i))
		times = append(times, took(b, func() error {
			rigtest.Publish(b, d, v, target)
			return readRoot(target)
		}))
		rigtest.Unpublish(b, d, v, target)
	}
	if mounts, err := filepath.Glob(filepath.Join(n.State, "mounts", "*")); err != nil || len(mounts) != 1 {
		b.Errorf("the mount was not shared: %v, %v", mounts, err)
	}
	rigtest.Unpublish(b, d, v, first)
	n.NothingLeft(b)
	b.Logf("shared publish %s ms", span(times))
	b.ReportMetric(median(times), "publish-ms")
}
