//go:build !lane || shared

package e2e

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// BenchmarkManyPods measures the same, and how long as many pods with an emptyDir take: the ratio is what the volumes cost.
func BenchmarkManyPods(b *testing.B) {
	for b.Loop() {
		ns := newNamespace(b)
		clients := slices.Sorted(maps.Keys(rig.Programs()))
		total := eachMany * len(clients)
		began := time.Now()
		apply(b, ns, manyPods("plain", total, "volumes: [{name: v, emptyDir: {}}]", ""))
		plain := allAre(b, "pods ready, with an emptyDir each", "pods", ns, total, began, object.ready)
		endAll(b, ns)
		ready := manyReady(b, ns, bucket(b), clients)
		endAll(b, ns)
		b.ReportMetric(float64(ready)/float64(plain), "ready/emptyDir")
	}
}
