//go:build !lane || shared

package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

// rounds is how often each thing is measured. The median counts.
const rounds = 5

// coldRounds is how often that is done for pods, of which a share is counted.
const coldRounds = 15

// firstLook is half of the interval at which kubelet looks whether the volumes of a pod are mounted: a pod that is ready so much later than
// one with an emptyDir had to wait for another look.
const firstLook = 150 * time.Millisecond

func watchFor(t testing.TB, path string) *watch {
	t.Helper()
	events, err := world.Watch(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	w := &watch{more: make(chan struct{})}
	go func() { // until the test ends, and its context with it
		defer events.Close()
		lines := bufio.NewReader(events)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			c := change{at: time.Now()}
			if json.Unmarshal(line, &struct {
				Type   *string
				Object *object
			}{&c.kind, &c.object}) != nil {
				return
			}
			w.mu.Lock()
			w.changes = append(w.changes, c)
			close(w.more)
			w.more = make(chan struct{})
			w.mu.Unlock()
		}
	}()
	return w
}

func (n *numbers) add(name string, d time.Duration) {
	if n.values == nil {
		n.values = map[string][]time.Duration{}
	}
	if _, known := n.values[name]; !known {
		n.names = append(n.names, name)
	}
	n.values[name] = append(n.values[name], d)
}

// within is the share of the measurements of a name that are at most by so much above the median of another.
func (n *numbers) within(name, other string, by time.Duration) float64 {
	base := slices.Sorted(slices.Values(n.values[other]))
	limit, count := base[len(base)/2]+by, 0
	for _, d := range n.values[name] {
		if d <= limit {
			count++
		}
	}
	return float64(count) / float64(len(n.values[name]))
}

// BenchmarkWaits measures what users wait for, and shows it as a table. The same pod without a volume of this driver is measured
// beside, in turn: the difference is the driver's. Of pods whose volume is not mounted on the node, it also reports the share that is
// ready at kubelet's first look (firstLook).
func BenchmarkWaits(b *testing.B) {
	for b.Loop() {
		measureWaits(b)
	}
}

func measureWaits(t testing.TB) {
	ns := newNamespace(t)
	b := bucket(t)
	claims, pods := "/api/v1/namespaces/"+ns+"/persistentvolumeclaims", "/api/v1/namespaces/"+ns+"/pods"
	claimed, started := watchFor(t, claims), watchFor(t, pods)
	n := &numbers{}
	pod := func(name, volume string) time.Duration {
		began := create(t, pods, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{name: c, image: %s, command: [sleep, "1000000"], volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, %s}]`, name, cluster.Busybox, volume))
		return started.ready(t, name, began).Sub(began)
	}
	classes := map[string]string{}
	clients := []string{"mountpoint-s3", "rclone"}
	for _, client := range clients {
		classes[client] = class(t, map[string]string{"bucketName": b, "client": client})
	}
	pod("first", "emptyDir: {}") // is not counted
	const empty, cold = "pod with an emptyDir: created to ready", ", first pod on the node: created to ready"
	for i := range coldRounds {
		n.add(empty, pod(fmt.Sprintf("empty-%d", i), "emptyDir: {}"))
		for _, client := range clients {
			name := fmt.Sprintf("%s-%d", strings.ReplaceAll(client, "-", ""), i)
			began := create(t, claims, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec: {storageClassName: %s, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}`, name, classes[client]))
			n.add("claim: created to bound", claimed.first(t, "claim "+name, began, func(c change) bool {
				return c.object.Metadata.Name == name && c.object.Status.Phase == "Bound"
			}).Sub(began))
			volume := "persistentVolumeClaim: {claimName: " + name + "}"
			n.add(client+cold, pod(name+"-cold", volume))
			n.add(client+", second pod, same mount: created to ready", pod(name+"-warm", volume))
		}
	}
	driver := watchFor(t, "/api/v1/namespaces/"+driverNamespace+"/pods")
	registered := watchFor(t, "/apis/storage.k8s.io/v1/csinodes")
	has := func(c change) bool {
		return slices.ContainsFunc(c.object.Spec.Drivers, func(d struct {
			Name string `json:"name"`
		}) bool {
			return d.Name == csiName
		})
	}
	for range rounds {
		old := driverPod(t).Metadata.Name
		began := time.Now()
		kubectl(t, "delete", "pod", "-n", driverNamespace, old, "--wait=false")
		away := registered.first(t, "the driver to be gone from the CSINode", began, func(c change) bool { return !has(c) })
		name := ""
		created := driver.first(t, "the new pod", began, func(c change) bool {
			name = c.object.Metadata.Name
			return c.kind == "ADDED" && c.object.Metadata.Labels["app.kubernetes.io/component"] == "node"
		})
		back := registered.first(t, "the driver in the CSINode", away, has)
		ready := driver.ready(t, name, created)
		n.add("driver's pod: created to registered (CSINode)", back.Sub(created))
		n.add("driver's pod: created to ready", ready.Sub(created))
		n.add("driver's pod deleted: volumes cannot be published for", back.Sub(away))
	}
	t.Logf("\n%s", n)
	for _, client := range clients {
		t.Logf("%s, first pod on the node: %.0f %% are ready at kubelet's first look", client, 100*n.within(client+cold, empty, firstLook))
	}
}
