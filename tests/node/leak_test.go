//go:build !lane || ordinary

package node

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// metric reads a metric without labels from the driver.
func (e *env) metric(name string) (value float64) {
	e.t.Helper()
	for line := range strings.Lines(rigtest.Get(e.t, e.Driver, "/metrics")) {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			if _, err := fmt.Sscan(rest, &value); err != nil {
				e.t.Fatal(err)
			}
			return value
		}
	}
	e.t.Fatalf("there is no metric %s", name)
	return 0
}

// Publications, successful or not, cost the driver no descriptors, goroutines or threads for good.
func TestTheDriverLeaksNothing(t *testing.T) {
	e := start(t)
	cycle := func(n int) {
		for i := range n {
			v := static("leak", clients[i%len(clients)])
			target := e.publish(v, "t")
			write(t, filepath.Join(target, fmt.Sprint(i)), "x")
			e.unpublish(v, target)
			if err := e.tryPublish(0, v, target); err == nil {
				t.Error("a call without time succeeded")
			}
			if err := e.tryPublish(1e10, static("leak", clients[i%len(clients)], "bucketName", "no-such-bucket"), e.Target("u")); err == nil {
				t.Error("a missing bucket was published")
			}
			e.unpublish(v, target)
		}
		e.NothingLeft(t)
	}
	count := func() (descriptorsOpen, goroutines, threads int) {
		return len(descriptors(t, e.PID())), int(e.metric("go_goroutines")), len(statusOf(t, e.PID())["Threads"])
	}
	cycle(4)
	fds, goroutines, threads := count()
	cycle(20)
	e.await(20e9, fmt.Sprintf("no more than %d descriptors and %d goroutines (and %d digits of threads)", fds, goroutines, threads), func() bool {
		f, g, th := count()
		// Idle connections to the S3 server, of which one may have few at first, come and go; each has two goroutines. What
		// twenty cycles leave behind is more.
		return f <= fds+4 && g <= goroutines+8 && th <= threads+1
	})
}
