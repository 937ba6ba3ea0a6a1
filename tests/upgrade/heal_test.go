package upgrade

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// healed has one version make a mount whose client dies while the other one looks on: nobody publishes it again.
func (e *env) healed(from, to string) {
	e.drive(from)
	a := e.publish("a")
	e.write(filepath.Join(a, "file"), "x")
	e.await("the upload", func() bool { return len(e.Keys(e.t, rigtest.Bucket, "kept/file")) > 0 })
	e.Kill()
	e.drive(to)
	for range 2 {
		e.killClient()
		e.await("the mount's recovery", func() bool {
			content, err := os.ReadFile(filepath.Join(a, "file"))
			return err == nil && string(content) == "x"
		})
	}
	e.write(filepath.Join(a, "after"), "y")
	e.unpublish(a)
	e.awaitNothingLeft()
	e.stored("after", "y")
}

func TestADeadClientOfAnOlderDriverIsHealed(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) { e.healed(e.older, e.newer) })
}
