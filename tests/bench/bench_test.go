package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// setup is a node with a driver and its S3 server. Whatever the benchmark mounted must be gone at its end.
func setup(b *testing.B) (*rigtest.Node, *rig.Driver) {
	b.Helper()
	n := rigtest.New(b)
	// As verbose as a driver is by default; the rig's own default is for tests.
	d := n.Drive(b, "node", "--v=2")
	b.ReportMetric(0, "ns/op") // of no meaning here
	return n, d
}

// volume is a volume that exists already, with one object so that its root is not empty.
func volume(b *testing.B, n *rigtest.Node, name string) *csi.Volume {
	b.Helper()
	n.Put(b, rigtest.Bucket, name+"/object", "content")
	return &csi.Volume{VolumeId: name, VolumeContext: map[string]string{"bucketName": rigtest.Bucket, "prefix": name + "/"}}
}

// inTurns runs two things rounds times, first one first, then the other.
func inTurns(rounds int, one, other func(round int)) {
	for i := range rounds {
		if i%2 == 0 {
			one(i)
			other(i)
		} else {
			other(i)
			one(i)
		}
	}
}

// took is how long fn takes, in milliseconds.
func took(b *testing.B, fn func() error) float64 {
	b.Helper()
	began := time.Now()
	if err := fn(); err != nil {
		b.Fatal(err)
	}
	return milliseconds(time.Since(began))
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	if len(s)%2 == 1 {
		return s[len(s)/2]
	}
	return (s[len(s)/2-1] + s[len(s)/2]) / 2
}

// span shows how far measurements are apart.
func span(values []float64) string {
	return fmt.Sprintf("%.4g [%.4g, %.4g]", median(values), slices.Min(values), slices.Max(values))
}
