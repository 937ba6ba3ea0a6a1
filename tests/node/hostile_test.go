//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/hostile"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// declareHostile installs this test's program as a client of each kind, and returns the driver's flag for their declarations.
func (e *env) declareHostile(kinds []string) (flag string) {
	e.t.Helper()
	program, err := os.ReadFile("/proc/self/exe") // its directory may not be on the tests' host
	if err == nil {
		err = rig.WriteProgram(filepath.Join(e.Clients, "hostile"), program)
	}
	if err != nil {
		e.t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "backends:\n  default: {endpoint: %q, region: %q, addressing: path}\nclients:\n", e.Rig.S3.Endpoint, e.Rig.S3.Region)
	for i, kind := range kinds {
		fmt.Fprintf(&b, "  hostile-%d: {program: hostile, fuse: path, args: [\"--prefix=${prefix}\", \"${mountpoint}\"], environment: {%s: %q}, memory: 128Mi, "+
			"drain: exits, cache: none}\n", i, hostile.Env, kind)
	}
	return fuseclients.WriteConfig(e.t, e.Rig, b.String())
}

// Whatever a declared client does instead of serving, and whatever it serves, its publication ends in time, looking at its target leads
// nowhere, the other volumes are not disturbed, and unpublishing leaves nothing.
func TestHostileDeclaredClients(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	never := []string{hostile.NeverAnswers, hostile.Garbage, hostile.HangsAfterInit}
	serving := []string{hostile.Links, hostile.Devices, hostile.Many, hostile.Endless}
	kinds := slices.Concat(never, []string{hostile.ExitsAfterInit, hostile.HangsOnStat, hostile.FailsThenHangs}, hostile.Serving(), hostile.Exiting())
	const mountTimeout = 15 * time.Second // a busy machine makes all of these starts at once in it
	e.drive(e.declareHostile(kinds), "--hang-timeout=3s", "--mount-timeout="+mountTimeout.String())
	e.Put(t, bucket, "control/file", "content")
	control := e.publish(static("control", rclone), "control")

	var all sync.WaitGroup
	for i, kind := range kinds {
		all.Go(func() {
			name := fmt.Sprintf("hostile-%d", i)
			v, target := static(name, name), e.Target(name)
			began := pressure.Now()
			err := e.tryPublish(time.Minute, v, target)
			for slices.Contains(serving, kind) && err != nil && began.Since() < eventually { // a slow start, which kubelet tries again
				err = e.tryPublish(time.Minute, v, target)
			}
			switch {
			case slices.Contains(serving, kind) && err != nil:
				t.Errorf("%s: %v", kind, err)
			case slices.Contains(never, kind) && err == nil:
				t.Errorf("%s: it was published", kind)
			case err == nil:
				if err := hostile.Look(target, kind); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
				_ = e.tryPublish(time.Minute, v, target) // as kubelet does every now and then
			}
			for began := pressure.Now(); ; time.Sleep(100 * time.Millisecond) {
				if err = e.tryUnpublish(time.Minute, v, target); err == nil {
					return
				}
				if began.Since() > eventually {
					t.Errorf("%s: %v", kind, err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	// No read of the other volume waits for one of those clients, which take as long as the timeout.
	for stop := false; !stop; {
		began := pressure.Now()
		if got := read(t, filepath.Join(control, "file")); got != "content" {
			t.Errorf("the other volume reads %q", got)
		}
		if took := began.Since(); took > 5*time.Second {
			t.Errorf("reading the other volume took %s", took)
		}
		select {
		case <-done:
			stop = true
		case <-time.After(200 * time.Millisecond):
		}
	}
	e.unpublish(static("control", rclone), control)
	e.awaitNothingLeft(eventually)
}
