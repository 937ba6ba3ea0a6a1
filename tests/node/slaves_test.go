//go:build !lane || ordinary

package node

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Container runtimes refuse a HostToContainer mount unless the target is shared or a slave. Such a container starts, sees what is
// mounted in the volume on the host, also after its client exited, and keeps nothing when it is gone.
func TestContainersWithHostToContainerPropagation(t *testing.T) {
	rigtest.ProcessOnly(t, "propagation is of the mounts")
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		for key, content := range map[string]string{"file": "content", "sub/file": "in sub"} {
			e.Put(t, bucket, "slave/"+key, content)
		}
		v := static("slave", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		subpath := e.subpath(podUID, "pv", "sub")
		groups := map[string]bool{}
		for _, place := range []string{filepath.Join(e.State, "sources"), target, subpath} {
			// As containerd's ensureSharedOrSlave and CRI-O's ensureShared look at it.
			m := mountsAt(t, place)
			if len(m) != 1 || !strings.HasPrefix(m[0].Optional, "shared:") {
				t.Fatalf("%s is neither shared nor a slave: %+v", place, m)
			}
			groups[m[0].Optional] = true
		}
		if len(groups) != 2 {
			t.Errorf("the groups of sources, target and subpath are %v", groups)
		}
		c := containers.Start(t, containers.Options{
			PodUID: podUID, Own: map[string]string{"data/file": "its own"},
			Mounts: []containers.Mount{
				{Source: target, Target: "/data", Propagation: "rslave"}, {Source: target, Target: "/ro", ReadOnly: true, Propagation: "rslave"},
				{Source: subpath, Target: "/sub", Propagation: "rslave"}, {Source: target, Target: "/private"},
			},
		})
		propagates := func(when string) {
			t.Helper()
			if err := unix.Mount("tmpfs", filepath.Join(target, "sub"), "tmpfs", 0, ""); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(target, "sub", "below"), "mounted on the host")
			for path, seen := range map[string]bool{"/data/sub/below": true, "/ro/sub/below": true, "/private/sub/below": false} {
				if got, err := c.Read(t.Context(), path); (err == nil) != seen {
					t.Errorf("%s: %s reads %q, %v", when, path, got, err)
				}
			}
			if err := unix.Unmount(filepath.Join(target, "sub"), 0); err != nil {
				t.Error(err)
			}
			for _, path := range []string{"/data/sub/file", "/ro/sub/file", "/sub/file", "/private/sub/file"} {
				reads(t, c, eventually, path, "in sub")
			}
		}
		propagates("before")
		watch := c.Watch("/data/file")
		if _, ok := watch.Await(time.Time{}, eventually, containers.Reads("content")); !ok {
			t.Fatal("the file was never read")
		}
		for range 2 {
			died := time.Now()
			rigtest.Kill(e.t, e.client(client))
			if _, ok := watch.Await(died, eventually, containers.Fails); !ok {
				t.Fatal("the exit of the client was not noticed")
			}
			for path, content := range map[string]string{"/data/file": "content", "/ro/file": "content", "/sub/file": "in sub", "/private/file": "content"} {
				reads(t, c, eventually, path, content)
			}
			e.await(eventually, "the target to be healed", func() bool {
				return len(mountsAt(t, target)) == 1 && strings.HasPrefix(mountsAt(t, target)[0].Optional, "shared:")
			})
		}
		if bad := watch.Unwanted("content"); len(bad) > 0 {
			t.Errorf("the container saw %+v", bad[0])
		}
		watch.Stop()
		propagates("after")
		if err := c.Write(t.Context(), "/ro/new", "x"); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to the read-only mount: %v", err)
		}
		if n := len(ours(t, c.PID, "slave")); n != 4 {
			t.Errorf("the container has %d mounts of the volume", n)
		}
		stop(t, c)
		if err := unix.Unmount(subpath, 0); err != nil {
			t.Error(err)
		}
		e.unpublish(v, target)
		e.awaitNothingLeft(eventually)
	})
}
