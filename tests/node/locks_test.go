//go:build !lane || ordinary

package node

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/containers/agent"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// nameTTL is longer than clients let the kernel keep names.
const nameTTL = 1500 * time.Millisecond

// A process of a container that makes user and mount namespaces of its own cannot write to what the container has read-only,
// because the kernel has locked the flag there. It binds that below the volume, whose client exits: when the volume has healed
// it still cannot. What it may write to heals with the volume.
func TestHealingTakesNoLockOffWhatIsMountedBelow(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	rigtest.ProcessOnly(t, "the tests' host with a systemd has no whole /proc, without which the kernel refuses to mount one in a user namespace")
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "locked/file", "content")
		v, other := static("locked", client), static("other", client)
		target, claim := e.podTarget(podUID, "pv"), e.podTarget(podUID, "claim")
		e.publishAt(v, target)
		served := e.client(client)
		e.publishAt(other, claim, readOnly)
		hostPath, configMap := t.TempDir(), t.TempDir()
		if err := unix.Mount("tmpfs", configMap, "tmpfs", 0, "mode=755"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(configMap, unix.MNT_DETACH) })
		if err := os.Mkdir(filepath.Join(hostPath, "inner"), 0o755); err != nil {
			t.Fatal(err)
		}
		type victim struct {
			*containers.Container
			place   string // where the attacker has the read-only mount
			refused bool
		}
		pods := map[string]victim{}
		for name, tc := range map[string]struct {
			mounts []containers.Mount
			root   bool // readOnlyRootFilesystem
			binds  [][2]string
			place  string
			free   bool // nothing is locked
		}{
			"hostPath":       {[]containers.Mount{{Source: hostPath, Target: "/given", ReadOnly: true}}, false, [][2]string{{"/given", "/data/x"}}, "/data/x", false},
			"read-only PVC":  {[]containers.Mount{{Source: claim, Target: "/given", ReadOnly: true}}, false, [][2]string{{"/given", "/data/x"}}, "/data/x", false},
			"ConfigMap":      {[]containers.Mount{{Source: configMap, Target: "/given", ReadOnly: true}}, false, [][2]string{{"/given", "/data/x"}}, "/data/x", false},
			"read-only root": {nil, true, [][2]string{{"/own", "/data/x"}}, "/data/x", false},
			"two levels deep": {
				[]containers.Mount{{Source: hostPath, Target: "/outer"}, {Source: configMap, Target: "/given", ReadOnly: true}}, false,
				[][2]string{{"/outer", "/data/x"}, {"/given", "/data/x/inner"}}, "/data/x/inner", false,
			},
			"writable": {[]containers.Mount{{Source: hostPath, Target: "/given"}}, false, [][2]string{{"/given", "/data/x"}}, "/data/x", true},
		} {
			c := containers.Start(t, containers.Options{
				PodUID: podUID, Capabilities: true, ReadOnlyRoot: tc.root, Own: map[string]string{"own/file": "its own"},
				Mounts: append([]containers.Mount{{Source: target, Target: "/data"}}, tc.mounts...),
			})
			if err := c.Nest(t.Context()); err != nil {
				t.Skipf("needs user namespaces in containers: %v", err)
			}
			for _, bind := range tc.binds {
				if _, err := c.Nested(t.Context(), agent.OpBind, bind[1], bind[0]); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			if _, err := c.Nested(t.Context(), agent.OpRemount, tc.place, ""); (err == nil) != tc.free {
				t.Fatalf("%s: before, remounting it writable: %v", name, err)
			}
			pods[name] = victim{c, tc.place, !tc.free}
		}
		time.Sleep(nameTTL) // until then the kernel moves what is mounted below as it is
		rigtest.Kill(e.t, served)
		outcomes := func() float64 { return e.count("s3csi_mount_heals_total", "container") }
		e.await(eventually, "the containers to be healed", func() bool { return outcomes() >= float64(2*len(pods)) })
		// At the end of the heal. Until then nothing may look a stale mount up: the kernel takes the failure for a removed directory and
		// detaches what is mounted on it.
		e.logged("Stale mount not replaced", "mounted below it in a user namespace", "restart the container")
		for name, pod := range pods {
			_, err := pod.Nested(t.Context(), agent.OpRemount, pod.place, "")
			if pod.refused && err == nil {
				t.Errorf("%s: its container has made it writable", name)
			}
			_, err = pod.Nested(t.Context(), agent.OpWrite, pod.place+"/owned", "by the container")
			if (err != nil) != pod.refused {
				t.Errorf("%s: writing into it: %v", name, err)
			}
			if got, err := pod.Nested(t.Context(), agent.OpRead, "/data/file", ""); !pod.refused && got.Content != "content" {
				t.Errorf("%s: the volume reads %q, %v", name, got.Content, err)
			}
			reads(t, pod.Container, eventually, "/data/file", "content") // in the container's own namespace nothing is locked
			stop(t, pod.Container)
		}
		e.unpublish(other, claim)
		e.unpublish(v, target)
		e.awaitNothingLeft(eventually)
	})
}
