package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// revived waits for the client that replaces one that exited. TestTimedRestartOfACrashedClient holds the driver to a time.
func (m mountRecord) revived(t testing.TB, died process) {
	t.Helper()
	eventually(t, "another client", func() error {
		all := m.processes()
		if !slices.ContainsFunc(all, func(p process) bool { return p.name == died.name && p != died }) {
			return fmt.Errorf("there are %v", all)
		}
		return nil
	})
}

// patient is a pod that has a volume as a whole and a directory of it, both of which must heal after its client exits.
type patient struct {
	ns, name, client string
	volume           object
	mount            mountRecord
	container        string
	propagation      string // mountPropagation of its volumeMounts
}

// newPatient makes a volume and starts its pod.
func newPatient(t testing.TB, ns, name, client, class string) *patient {
	t.Helper()
	return newPatientWith(t, ns, name, client, class, "None")
}

// newPatientWith is newPatient with a mount propagation.
func newPatientWith(t testing.TB, ns, name, client, class, propagation string) *patient {
	t.Helper()
	claim(t, ns, name, class, "ReadWriteMany")
	p := &patient{ns: ns, name: name, client: client, volume: bound(t, ns, name), propagation: propagation}
	b, prefix := place(t, p.volume)
	put(t, b, prefix+"file", "of the volume")
	put(t, b, prefix+"dir/file", "of the directory")
	apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: %[2]s, command: [sleep, "1000000"], volumeMounts: [{name: v, mountPath: /v, mountPropagation: %[3]s}, {name: v,
     mountPath: /s, subPath: dir, mountPropagation: %[3]s}]}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: %[1]s}}]`, name, cluster.Busybox, propagation))
	p.container = podReady(t, ns, name).Status.ContainerStatuses[0].ContainerID
	p.mount = mountOf(t, p.volume)
	p.well(t)
	return p
}

// well sees that the pod reads and writes its volume in both places.
func (p *patient) well(t testing.TB) {
	t.Helper()
	file := fmt.Sprintf("new-%d", time.Now().UnixNano())
	script := "cat /v/file /s/file && echo written >/v/" + file + " && echo written >/s/" + file + " && cat /v/" + file + " /v/dir/" + file
	if got := execute(t, p.ns, p.name, "sh", "-c", script); got != "of the volumeof the directorywritten\nwritten\n" {
		t.Errorf("%s reads %q", p.name, got)
	}
}

// die kills the client, and waits until the pod sees a healthy mount in both places.
func (p *patient) die(t testing.TB) {
	t.Helper()
	died := p.mount.process(t, rig.Programs()[p.client])
	died.kill(t)
	began := time.Now()
	p.mount.revived(t, died)
	eventually(t, p.name+" to be well again", func() error {
		_, err := tryExecute(p.ns, p.name, "cat", "/v/file", "/s/file")
		return err
	})
	t.Logf("%s: files can be opened %s after the client exited", p.mount.Client, time.Since(began).Round(time.Millisecond))
	p.well(t)
	if c := get(t, "pod", p.ns, p.name).Status.ContainerStatuses[0]; c.RestartCount != 0 || c.ContainerID != p.container {
		t.Errorf("the container was %s and is %s, restarted %d times", p.container, c.ContainerID, c.RestartCount)
	}
	eventually(t, p.name+" to have the healthy mount in both places, as before", func() error { // a place can be used before all is set
		table := containerTable(t, p.ns, p.name)
		if len(table) != 2 {
			return fmt.Errorf("there are %d mounts of the volume", len(table))
		}
		device := p.mount.device(t)
		for _, m := range table {
			if d := deviceOf(m); d != device {
				return fmt.Errorf("%s is of device %s, want %s", m.Mountpoint, d, device)
			}
			if slave := strings.HasPrefix(m.Optional, "master:"); slave != (p.propagation == "HostToContainer") || !slave && m.Optional != "" {
				return fmt.Errorf("%s propagates as %q, with mountPropagation %s", m.Mountpoint, m.Optional, p.propagation)
			}
		}
		return nil
	})
}

func deviceOf(m *mountinfo.Info) string { return fmt.Sprintf("%d:%d", m.Major, m.Minor) }
