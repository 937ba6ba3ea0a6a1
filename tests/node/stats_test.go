//go:build !lane || ordinary

package node

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func TestVolumeStats(t *testing.T) {
	rigtest.ProcessOnly(t, "statistics are read from the mount")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("stats", client)
		target := e.publish(v, "t")
		got, err := e.stats(10*time.Second, v, target)
		if err != nil || len(got.GetUsage()) != 2 {
			t.Fatalf("%v, %v", got, err)
		}
		for _, u := range got.GetUsage() {
			if u.GetTotal() <= 0 || u.GetUsed() < 0 || u.GetAvailable() <= 0 || u.GetUsed() > u.GetTotal() || u.GetAvailable() > u.GetTotal() {
				t.Errorf("%s: %v", u.GetUnit(), u)
			}
		}
		for name, ask := range map[string]struct {
			v    *csi.Volume
			path string
		}{
			"another volume": {static("other", client), target}, "another path": {v, target + "-2"}, "a path in it": {v, target + "/x"},
			"the source": {v, filepath.Join(e.State, "sources")}, "a path that is not absolute": {v, "t"},
		} {
			if _, err := e.stats(10*time.Second, ask.v, ask.path); err == nil {
				t.Errorf("%s has statistics", name)
			} else {
				want(t, err, codes.NotFound)
			}
		}
		rigtest.Kill(e.t, e.client(client))
		e.await(10*time.Second, "the end of the connection", func() bool { _, err := e.stats(5*time.Second, v, target); return err != nil })
		_, err = e.stats(5*time.Second, v, target)
		want(t, err, codes.Unavailable, "stale", target)
		e.unpublish(v, target)
		_, err = e.stats(10*time.Second, v, target)
		want(t, err, codes.NotFound, target)
		e.awaitNothingLeft(time.Second)
	}, "--heal=false") // healing takes a twentieth of a second
}
