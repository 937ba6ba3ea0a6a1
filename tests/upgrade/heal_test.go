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

// A helper that does not know how to kill its client is no obstacle to cutting off one that hangs.
func TestAHangingClientOfAnOlderDriverIsCutOff(t *testing.T) {
	eachClient(t, func(t *testing.T, e *env) {
		e.Put(t, rigtest.Bucket, "kept/file", "x")
		e.drive(e.older)
		a := e.publish("a")
		e.Kill()
		e.drive(e.newer, "--hang-timeout=5s")
		pids := e.pids(programs[e.client])
		if len(pids) != 1 {
			t.Fatalf("the clients are %v, want one", pids)
		}
		rigtest.Freeze(t, pids[0])
		freed := make(chan error, 1)
		go func() {
			_, err := os.ReadFile(filepath.Join(a, "file"))
			freed <- err
		}()
		if err := <-freed; err == nil {
			t.Error("the read through the hanging client succeeded")
		}
		e.await("the mount's recovery", func() bool {
			content, err := os.ReadFile(filepath.Join(a, "file"))
			return err == nil && string(content) == "x"
		})
		e.unpublish(a)
		e.awaitNothingLeft()
	})
}
