package e2e

import (
	"errors"
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

// patient is a pod that has a volume as a whole and a directory of it, both of which are to be well again after its client's death.
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
  containers: [{name: c, image: %[2]s, command: [sleep, "1000000"], volumeMounts: [{name: v, mountPath: /v, mountPropagation: %[3]s}, {name: v, mountPath: /s, subPath: dir, mountPropagation: %[3]s}]}]
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
	t.Logf("%s: files can be opened %s after the death", p.mount.Client, time.Since(began).Round(time.Millisecond))
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

// TestContainersHeal kills clients under running containers, which have mounts without propagation, as all have by default.
func TestContainersHeal(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for client := range rig.Programs() {
		t.Run(client, func(t *testing.T) {
			p := newPatient(t, ns, strings.ReplaceAll(client, "-", ""), client, class(t, map[string]string{"bucketName": b, "client": client}))
			// Another pod with the volume shares its mount, and is well with it.
			other := podSpec{name: p.name + "-other", claims: map[string]string{"/v": p.name}}
			other.run(t, ns)
			p.die(t)
			eventually(t, "the other pod to be well again", func() error { // its turn comes later
				got, err := tryExecute(ns, other.name, "cat", "/v/file")
				if err == nil && got != "of the volume" {
					err = fmt.Errorf("it reads %q", got)
				}
				return err
			})
			remove(t, "pod", ns, p.name)
			remove(t, "pod", ns, other.name)
			p.mount.gone(t)
		})
	}
}

// TestContainersWithHostToContainer starts containers whose mounts of a volume have that propagation, and kills their clients.
func TestContainersWithHostToContainer(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for client := range rig.Programs() {
		t.Run(client, func(t *testing.T) {
			name := strings.ReplaceAll(client, "-", "")
			p := newPatientWith(t, ns, name, client, class(t, map[string]string{"bucketName": b, "client": client}), "HostToContainer")
			p.die(t)
			p.die(t)
			remove(t, "pod", ns, p.name)
			p.mount.gone(t)
		})
	}
}

// agent is a pod that has the node's root, with all that is mounted there when it starts.
func agent(t testing.TB, ns, name, propagation string) {
	t.Helper()
	apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: %s, command: [sleep, "1000000"], volumeMounts: [{name: host, mountPath: /host, mountPropagation: %s}]}]
  volumes: [{name: host, hostPath: {path: /}}]`, name, cluster.Busybox, propagation))
	podReady(t, ns, name)
}

// TestAgentsWithTheNodesRoot sees that pods with copies of the node's mounts keep no client alive, and do not keep dead mounts.
func TestAgentsWithTheNodesRoot(t *testing.T) {
	ns := newNamespace(t)
	b := bucket(t)
	agents := map[string]string{"private": "None", "slave": "HostToContainer"}
	var patients []*patient
	for client := range rig.Programs() {
		c := class(t, map[string]string{"bucketName": b, "client": client})
		for _, fate := range []string{"ends", "dies"} {
			patients = append(patients, newPatient(t, ns, strings.ReplaceAll(client, "-", "")+"-"+fate, client, c))
		}
	}
	for name, propagation := range agents {
		agent(t, ns, name, propagation)
		for _, p := range patients {
			if len(p.mount.of(containerTable(t, ns, name))) < 2 { // the source and the target
				t.Fatalf("agent %s has no copy of %s's mount: the test is worth nothing", name, p.name)
			}
		}
	}
	gone := func(t *testing.T, p *patient) {
		t.Helper()
		remove(t, "pod", ns, p.name)
		eventually(t, "the mount of "+p.name+" to be gone everywhere", func() error {
			if all := p.mount.processes(); len(all) > 0 {
				return fmt.Errorf("there are %v", all)
			}
			for name := range agents {
				if left := p.mount.of(containerTable(t, ns, name)); len(left) > 0 {
					return fmt.Errorf("agent %s has %s", name, left[0].Mountpoint)
				}
			}
			return nil
		})
	}
	for _, p := range patients {
		t.Run(p.name, func(t *testing.T) {
			if strings.HasSuffix(p.name, "-dies") {
				p.die(t)
				device := p.mount.device(t)
				eventually(t, "the agents to have no dead mounts", func() error {
					for name := range agents {
						for _, m := range p.mount.of(containerTable(t, ns, name)) {
							if deviceOf(m) != device {
								return fmt.Errorf("agent %s has %s of device %s, the healthy one is %s", name, m.Mountpoint, deviceOf(m), device)
							}
						}
					}
					if len(p.mount.of(containerTable(t, ns, "slave"))) == 0 {
						return errors.New("agent slave does not have the healthy mount")
					}
					return nil
				})
			}
			gone(t, p)
		})
	}
	for name := range agents {
		remove(t, "pod", ns, name)
	}
	nothingLeft(t)
}
