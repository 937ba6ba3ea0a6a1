package bench

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// BenchmarkDrain unpublishes a volume with 20 uploads in flight to a server that takes a second for each request, and unmounts the
// bare client with the same uploads until it exits. All 20 objects must be stored then.
//
// drain-ms and bare-ms are medians, from the moment in which the last of the uploads has begun; drain/bare is their quotient.
func BenchmarkDrain(b *testing.B) { eachClient(b, measureDrain) }

func measureDrain(b *testing.B, client string) {
	const (
		files   = 20
		rounds  = 3
		latency = time.Second
	)
	n := newNode(b, client)
	proxy := rigtest.Proxy(b, n.Process.Endpoint())
	n.Rig.S3.Endpoint = proxy.Endpoint()
	d := drive(b, n, client)
	v, target := volume(b, n, "drain"), n.Target("pod")
	// All uploads run at once: by default rclone has four, and Mountpoint as many as it has threads.
	v.VolumeContext["mountOptions"] = map[string]string{"rclone": "transfers=20", "mountpoint-s3": "max-threads=32"}[client]
	published, byHand := ways(b, n, d, v, target)

	content := strings.Repeat("content\n", 8<<10)
	measure := func(w way) func(int) {
		return func(round int) {
			name := func(i int) string { return fmt.Sprintf("%s-%d-%d", w.name, round, i) }
			must(b, w.start())
			var begun atomic.Int32
			writeElsewhere(b, files, content, func(i int) string { return filepath.Join(w.dir, name(i)) }, func() {
				proxy.Set(faultproxy.Faults{Latency: latency, Match: func(r *http.Request) bool {
					if r.Method == http.MethodPut {
						begun.Add(1)
					}
					return false
				}})
			})
			rigtest.Await(b, time.Minute, "the uploads", func() bool { return begun.Load() >= files })
			w.note("ms", took(b, w.stop))
			proxy.Set(faultproxy.Faults{})
			for i := range files {
				if n.Object(b, rigtest.Bucket, "drain/"+name(i)) != content {
					b.Errorf("%s is not what was written", name(i))
				}
			}
		}
	}
	inTurns(rounds, measure(published), measure(byHand))
	n.NothingLeft(b)
	driver, bare := published.measured["ms"], byHand.measured["ms"]
	b.Logf("drain %s ms, bare %s ms", span(driver), span(bare))
	b.ReportMetric(median(driver), "drain-ms")
	b.ReportMetric(median(bare), "bare-ms")
	b.ReportMetric(median(driver)/median(bare), "drain/bare")
}

// writeElsewhere creates files here and has other processes write and close them, after ready. A program whose own process closes a
// file waits for the upload with Mountpoint, so that none would be in flight.
func writeElsewhere(b *testing.B, files int, content string, path func(int) string, ready func()) {
	b.Helper()
	writers, pipes := make([]*exec.Cmd, files), make([]io.WriteCloser, files)
	for i := range files {
		f, err := os.Create(path(i))
		must(b, err)
		writers[i] = exec.CommandContext(b.Context(), "cat")
		writers[i].Stdout = f
		pipes[i], err = writers[i].StdinPipe()
		must(b, err)
		must(b, writers[i].Start())
		must(b, f.Close())
	}
	ready()
	for i, pipe := range pipes {
		_, err := io.WriteString(pipe, content)
		must(b, err)
		must(b, pipe.Close())
		must(b, writers[i].Wait())
	}
}
