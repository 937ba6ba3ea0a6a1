//go:build !lane || disrupt

package e2e

import (
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// TestLauncherProcess runs the driver with the launcher process on a node that has mounts of the launcher systemd, and goes back:
// mounts of either go on under the other, heal and end.
func TestLauncherProcess(t *testing.T) {
	ns := newNamespace(t)
	launched := func(name string) {
		t.Helper()
		if metric(t, `s3csi_launcher_info{launcher="`+name+`"`) != 1 {
			t.Errorf("the launcher is not %s", name)
		}
	}
	launched("systemd")
	units := eachClient(t, ns, "-unit")
	for _, w := range units {
		if !w.isUnit(t) {
			t.Fatalf("mount %s is no unit of systemd: the test is worth nothing", w.mount.Name)
		}
	}
	t.Cleanup(func() { deploy(t) })
	unharmed(t, units, func() { replaced(t, func() { deploy(t, "node.launcher=process") }) })
	launched("process")
	processes := eachClient(t, ns, "-process")
	for _, w := range processes {
		if w.isUnit(t) {
			t.Fatalf("mount %s is a unit of systemd", w.mount.Name)
		}
	}
	all := slices.Concat(units, processes)
	t.Run("the driver's pod is deleted", func(t *testing.T) {
		unharmed(t, all, func() { replaced(t, func() { remove(t, "pod", driverNamespace, driverPod(t).Metadata.Name) }) })
	})
	t.Run("clients die", func(t *testing.T) {
		defer func() {
			if t.Failed() { // what the next driver will not say
				t.Logf("the node's driver:\n%s", driverLog(t, 80))
			}
		}()
		for client := range rig.Programs() {
			c := class(t, map[string]string{"bucketName": bucket(t), "client": client})
			p := newPatient(t, ns, strings.ReplaceAll(client, "-", ""), client, c)
			p.die(t)
			remove(t, "pod", ns, p.name)
			if left := p.mount.processes(); len(left) > 0 {
				t.Errorf("left of mount %s: %v", p.mount.Name, left)
			}
		}
		// And those of units, which the launcher process did not start.
		for _, w := range units {
			died := w.mount.process(t, rig.Programs()[w.mount.Client])
			died.kill(t)
			w.mount.revived(t, died)
			eventually(t, w.name+" to be well again", func() error {
				_, err := tryExecute(ns, w.name, "sh", "-c", "cat /v/given >/tmp/again && cat /v/file-1")
				return err
			})
			if !w.isUnit(t) {
				t.Errorf("mount %s is no unit any more", w.mount.Name)
			}
		}
	})
	for _, w := range units {
		remove(t, "pod", ns, w.name)
		if left := w.mount.processes(); len(left) > 0 || w.isUnit(t) {
			t.Errorf("left of mount %s: %v", w.mount.Name, left)
		}
	}
	t.Run("back to systemd", func(t *testing.T) {
		unharmed(t, processes, func() { replaced(t, func() { deploy(t) }) })
		launched("systemd")
	})
	for _, w := range processes {
		w.finish(t)
	}
	nothingLeft(t)
}

// isUnit reports whether the mount's processes are a unit of systemd.
func (w *workload) isUnit(t testing.TB) bool {
	t.Helper()
	return strings.TrimSpace(onNode(t, "/bin/sh", "-c", "systemctl is-active "+w.mount.unit()+" || true")) == "active"
}
