package bench

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// eachClient runs a benchmark once for each client.
func eachClient(b *testing.B, measure func(b *testing.B, client string)) {
	for _, client := range slices.Sorted(maps.Keys(rig.Programs())) {
		b.Run(client, func(b *testing.B) { measure(b, client) })
	}
}

// setup returns a node and its driver, which mounts with the client. A benchmark must unmount everything that it mounted.
func setup(b *testing.B, client string) (*rigtest.Node, *rig.Driver) {
	b.Helper()
	n := newNode(b, client)
	return n, drive(b, n, client)
}

// newNode returns a node with an S3 server and without a driver. The benchmark is skipped if the node lacks the client's program.
func newNode(b *testing.B, client string) *rigtest.Node {
	b.Helper()
	must(b, mountRun())
	n := rigtest.New(b)
	program := rig.Programs()[client]
	if _, err := os.Stat(filepath.Join(n.Clients, program)); err != nil {
		b.Skipf("needs the client program %s, which is not built", program)
	}
	b.ReportMetric(0, "ns/op") // has no meaning here
	return n
}

// mountRun mounts a tmpfs on /run, as hosts do, where the state directory is, if this machine has none there. The mount ends with the
// benchmarks' mount namespace.
func mountRun() error {
	const run = "/run"
	var fs unix.Statfs_t
	if err := unix.Statfs(run, &fs); err != nil || fs.Type == unix.TMPFS_MAGIC || !isolate.Inside() {
		return err
	}
	return unix.Mount("tmpfs", run, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755")
}

// drive starts a driver that is as verbose as by default; the default of the rig is for tests.
func drive(b *testing.B, n *rigtest.Node, client string, flags ...string) *rig.Driver {
	b.Helper()
	return n.Drive(b, "node", append([]string{"--v=2", "--default-client=" + client}, flags...)...)
}

// volume is a volume that exists already, with one object so that its root is not empty.
func volume(b *testing.B, n *rigtest.Node, name string) *csi.Volume {
	b.Helper()
	n.Put(b, rigtest.Bucket, name+"/object", "content")
	return &csi.Volume{VolumeId: name, VolumeContext: map[string]string{"bucketName": rigtest.Bucket, "prefix": name + "/"}}
}

// way is one of the two ways to a mount. start returns when the root of the volume has been read.
type way struct {
	name, dir   string
	start, stop func() error
	measured    map[string][]float64
}

// note adds a measurement.
func (w way) note(what string, value float64) { w.measured[what] = append(w.measured[what], value) }

// ways returns both ways to a volume: published by the driver at the target, and with the bare client.
func ways(b *testing.B, n *rigtest.Node, d *rig.Driver, v *csi.Volume, target string) (published, byHand way) {
	b.Helper()
	return waysWith(b, n, d, v, target, nil)
}

// waysWith is ways for a volume that is published with a secret; nil: without one.
func waysWith(b *testing.B, n *rigtest.Node, d *rig.Driver, v *csi.Volume, target string, secret map[string]string) (published, byHand way) {
	b.Helper()
	published = way{name: "published", dir: target, measured: map[string][]float64{}, start: func() error {
		return publishWith(b, d, v, target, secret, nil)
	}, stop: func() error {
		rigtest.Unpublish(b, d, v, target)
		return nil
	}}
	must(b, published.start())
	c := newBare(b, n)
	must(b, published.stop())
	return published, way{name: "bare", dir: c.dir, start: c.start, stop: c.stop, measured: map[string][]float64{}}
}

// inTurns runs two functions in each round and swaps their order from round to round. With -short there are two rounds at most.
func inTurns(rounds int, one, other func(round int)) {
	if testing.Short() {
		rounds = min(rounds, 2)
	}
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

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
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
