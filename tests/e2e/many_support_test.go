package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

// eachMany is how many pods with each client start at the same moment.
const eachMany = 25

// manyReady creates the pods, waits until all are ready, and returns how long that took.
func manyReady(t testing.TB, ns, bucket string, clients []string) time.Duration {
	t.Helper()
	var sets strings.Builder
	for _, client := range clients {
		c := class(t, map[string]string{"bucketName": bucket, "prefix": client + "/", "client": client})
		sets.WriteString(manyPods(setOf(client),
			eachMany, "", "volumeClaimTemplates: [{metadata: {name: v}, spec: {storageClassName: "+c+", accessModes: [ReadWriteOnce], resources: {requests: "+
				"{storage: 1Gi}}}}]"))
	}
	total := eachMany * len(clients)
	began := time.Now()
	apply(t, ns, sets.String())
	allAre(t, "claims bound", "pvc", ns, total, began, func(c object) bool { return c.Status.Phase == "Bound" })
	return allAre(t, "pods ready, with a volume each", "pods", ns, total, began, object.ready)
}

// setOf is the name of a client's pods.
func setOf(client string) string { return strings.ReplaceAll(client, "-", "") }

// manyPods are pods that write their name into the volume v, which they, or the set, have.
func manyPods(name string, replicas int, ofPod, ofSet string) string {
	return fmt.Sprintf(`
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  podManagementPolicy: Parallel
  serviceName: none
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: c, image: %[3]s, command: [sh, -c, "hostname >/v/name && %[6]s"], volumeMounts: [{name: v, mountPath: /v}]}]
      %[4]s
  %[5]s
`, name, replicas, cluster.Busybox, ofPod, ofSet, forever)
}

// allAre waits until all of so many objects are what they are to be, and says how long that took since they were applied.
func allAre(t testing.TB, what, kind, ns string, want int, began time.Time, is func(object) bool) time.Duration {
	t.Helper()
	within(t, 2*patience, fmt.Sprintf("%d %s", want, what), func() error {
		n := 0
		for _, o := range list(t, kind, ns) {
			if is(o) {
				n++
			}
		}
		if n != want {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
	took := time.Since(began)
	t.Logf("%d %s: after %s", want, what, took.Round(100*time.Millisecond))
	return took
}

// endAll ends a namespace's pods and says how long that took.
func endAll(t testing.TB, ns string) {
	t.Helper()
	began := time.Now()
	kubectl(t, "delete", "statefulsets", "--all", "-n", ns, "--wait=false")
	within(t, 2*patience, "all pods to be gone", func() error {
		if left := list(t, "pods", ns); len(left) > 0 {
			return fmt.Errorf("%d are left", len(left))
		}
		return nil
	})
	t.Logf("all are gone after %s", time.Since(began).Round(100*time.Millisecond))
}
