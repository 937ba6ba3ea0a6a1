//go:build !lane || disrupt

package e2e

import (
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
)

// slowly is a rate, in bytes per second, at which a file takes a minute and more to be stored.
const slowly = 16 << 10

// newService starts one whose every life leaves a file start-… in the volume.
func newService(t testing.TB, ns, name, class string) *service {
	t.Helper()
	claim(t, ns, name, class, "ReadWriteOnce")
	s := &service{ns: ns, name: name, volume: bound(t, ns, name)}
	s.bucket, s.prefix = place(t, s.volume)
	apply(t, ns, fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  strategy: {type: Recreate}
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: c, image: %[2]s, command: [sh, -c, "echo started >/v/start-$(cat /proc/sys/kernel/random/uuid) && %[3]s"],
        volumeMounts: [{name: v, mountPath: /v}]}]
      volumes: [{name: v, persistentVolumeClaim: {claimName: %[1]s}}]`, name, cluster.Busybox, forever))
	kubectl(t, "rollout", "status", "-n", ns, "deployment/"+name, "--timeout="+patience.String())
	return s
}

// write writes files of random bytes and gives their sums, as sha256sum writes them.
func (s *service) write(t testing.TB, name string, count int) string {
	t.Helper()
	return s.run(t, writeScript(name, count))
}

// writeScript writes files of random bytes to /v and shows their sums.
func writeScript(name string, count int) string {
	return fmt.Sprintf("cd /v && for i in $(seq %d); do head -c 1500000 /dev/urandom >%s-$i || exit 1; done; sha256sum %s-*", count, name, name)
}

// stored waits until S3 has files of those sums.
func (s *service) stored(t testing.TB, sums string) {
	t.Helper()
	eventually(t, "the files of "+s.name+" in S3", func() error {
		all := keys(t, s.bucket, s.prefix)
		for line := range strings.Lines(sums) {
			sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
			if !slices.Contains(all, s.prefix+name) {
				return fmt.Errorf("%s is not there", name)
			}
			if got := fmt.Sprintf("%x", sha256.Sum256([]byte(content(t, s.bucket, s.prefix+name)))); got != sum {
				return fmt.Errorf("%s has the sum %s", name, got)
			}
		}
		return nil
	})
}

// lives are the ids of all containers in the namespaces.
func lives(t testing.TB, namespaces ...string) (ids []string, ready bool) {
	t.Helper()
	ready = true
	for _, ns := range namespaces {
		for _, p := range list(t, "pods", ns) {
			ready = ready && p.ready()
			for _, c := range p.Status.ContainerStatuses {
				ids = append(ids, c.ContainerID)
			}
		}
	}
	return ids, ready
}

// reboot ends the node as off does, switches it on again and waits until all pods of the namespaces and of the driver are there again,
// in new containers.
func reboot(t testing.TB, off func() error, namespaces ...string) {
	t.Helper()
	all := append(namespaces, driverNamespace, "kube-system")
	before, _ := lives(t, all...)
	if err := off(); err != nil {
		t.Fatal(err)
	}
	if err := world.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := world.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	within(t, 2*patience, "all pods to be there again", func() error {
		now, ready := lives(t, all...)
		for _, id := range now {
			if slices.Contains(before, id) || id == "" {
				return fmt.Errorf("not all are: there is container %q", id)
			}
		}
		if !ready || len(now) < len(before) {
			return fmt.Errorf("%d containers, ready: %t", len(now), ready)
		}
		return nil
	})
	if err := world.deployed(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestReboot switches the node off, once in order and once by pulling the plug, and sees that all comes back by itself.
func TestReboot(t *testing.T) {
	ns := newNamespace(t)
	b := bucket(t)
	var all []*service
	for name, parameters := range map[string]map[string]string{
		"mountpoint": {"client": "mountpoint-s3", "cache": "true"}, "rclone": {"client": "rclone"}, "slow": {"client": "rclone", "backend": "slow"},
	} {
		parameters["bucketName"] = b
		all = append(all, newService(t, ns, name, class(t, parameters)))
	}
	t.Cleanup(func() { world.slow.Set(faultproxy.Faults{}) })
	sums := map[*service]string{}
	// again sees that all services have what they had, and that the node has their mounts and nothing else.
	again := func(t *testing.T, starts int) {
		t.Helper()
		for _, s := range all {
			s.stored(t, sums[s])
			if got := s.run(t, "cd /v && sha256sum before-* cut-* 2>/dev/null; true"); got != sums[s] {
				t.Errorf("%s: the pod reads the sums\n%swant\n%s", s.name, got, sums[s])
			}
			eventually(t, fmt.Sprintf("%s to have begun %d times", s.name, starts), func() error {
				if all := keys(t, s.bucket, s.prefix+"start-"); len(all) != starts {
					return fmt.Errorf("S3 has %q", all)
				}
				return nil
			})
		}
		names := map[string]bool{}
		for _, m := range mountRecords(t) {
			names[m.Name] = true
			if n := len(m.processes()); n != 2 {
				t.Errorf("mount %s has %d processes", m.Name, n)
			}
		}
		if len(names) != len(all) || len(mountProcesses()) != 2*len(all) || len(mountTable(t, 1)) != 2*len(all) {
			t.Errorf("the node has\n%v", leftovers())
		}
		eventually(t, "the caches of mounts that are gone to be removed", func() error {
			entries, err := os.ReadDir(world.Path(nodeCacheDir))
			if err != nil {
				return err
			}
			running := map[int]bool{}
			for _, p := range nodeProcesses() {
				running[p.uid] = true
			}
			spares := spareHelpers()
			for _, e := range entries {
				if uid, spare := spares[e.Name()]; spare && running[uid] {
					continue
				}
				if e.Name() != "salt" && e.Name() != "lock" && !names[strings.TrimSuffix(e.Name(), ".json")] {
					return fmt.Errorf("there is %s", e.Name())
				}
			}
			return nil
		})
	}
	t.Run("in order", func(t *testing.T) {
		for _, s := range all {
			sums[s] = s.write(t, "before", 3)
		}
		reboot(t, world.PowerOff, ns)
		again(t, 2)
	})
	t.Run("power cut", func(t *testing.T) {
		world.slow.Set(faultproxy.Faults{Bandwidth: slowly})
		for _, s := range all {
			sums[s] += s.write(t, "cut", 3)
			if s.name != "slow" {
				s.stored(t, sums[s])
			} else if got := keys(t, s.bucket, s.prefix+"cut-"); len(got) > 0 {
				t.Fatalf("S3 has %q: the test is worth nothing", got)
			}
		}
		since := "--since-time=" + time.Now().Format(time.RFC3339)
		reboot(t, func() error {
			defer world.slow.Set(faultproxy.Faults{})
			return world.Cut()
		}, ns)
		again(t, 3)
		// The first of the node's new containers says it, and may have been restarted since.
		if log := driverLog(t, -1, since, "--previous") + driverLog(t, -1, since); !strings.Contains(log, "Restored mounts after reboot to finish uploads") {
			t.Errorf("the driver says nothing of what was left:\n%s", log)
		}
	})
	for _, s := range all {
		remove(t, "deployment", ns, s.name)
	}
	eventually(t, "the pods to be gone", func() error {
		if left := list(t, "pods", ns); len(left) > 0 {
			return fmt.Errorf("%d are left", len(left))
		}
		return nil
	})
	nothingLeft(t)
}
