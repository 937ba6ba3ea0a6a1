//go:build !lane || shared

package e2e

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/inventory"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

// The plugin of kubectl shows a pod with its mount, the mount's log, and the volume.
func TestKubectlPlugin(t *testing.T) {
	t.Parallel()
	need(t)
	script, err := filepath.Abs("../../deploy/kubectl-s3csi")
	if err != nil {
		t.Fatal(err)
	}
	plugin := func(args string) string {
		t.Helper()
		out, errs, err := shell(t.Context(), t, "", "S3CSI_NAMESPACE="+driverNamespace+" "+script+" "+args)
		if err != nil || errs != "" {
			t.Fatalf("%v: %s\n%s", err, errs, out)
		}
		return out
	}
	namespace := newNamespace(t)
	claim(t, namespace, "data", class(t, map[string]string{"bucketName": bucket(t)}), "ReadWriteMany")
	podSpec{name: "plugin", claims: map[string]string{"/data": "data"}}.run(t, namespace)
	volume := bound(t, namespace, "data")

	var nodes []struct {
		Node   string
		Status status.Document
	}
	if out := plugin("mounts -o json"); json.Unmarshal([]byte(out), &nodes) != nil || len(nodes) != 1 || nodes[0].Node != cluster.Node {
		t.Fatal(out)
	}
	found := slices.IndexFunc(nodes[0].Status.Mounts, func(m status.Mount) bool { return m.VolumeID == volume.Spec.CSI.VolumeHandle })
	if found < 0 {
		t.Fatalf("%+v", nodes[0].Status)
	}
	m := nodes[0].Status.Mounts[found]
	if len(m.Publications) != 1 || m.Publications[0].Pod.String() != namespace+"/plugin" || m.Publications[0].PersistentVolume != volume.Metadata.Name ||
		m.State != status.Healthy {
		t.Errorf("%+v", m)
	}
	if out := plugin("mounts"); !strings.Contains(out, namespace+"/plugin") {
		t.Errorf("mounts:\n%s", out)
	}
	if out := plugin("logs -n " + namespace + " plugin"); !strings.Contains(out, m.Name) || !strings.Contains(out, `"Published"`) {
		t.Errorf("logs:\n%s", out)
	}
	var volumes inventory.Document
	// The backends whose credentials are in secrets cannot be read.
	out, _, _ := shell(t.Context(), t, "", "S3CSI_NAMESPACE="+driverNamespace+" "+script+" volumes -o json")
	if err := json.Unmarshal([]byte(out), &volumes); err != nil || !slices.ContainsFunc(volumes.Volumes, func(v inventory.Volume) bool {
		return v.ID == volume.Spec.CSI.VolumeHandle && v.Own && v.State == "active"
	}) {
		t.Errorf("volumes: %v\n%s", err, out)
	}
	if out := plugin("bundle " + filepath.Join(t.TempDir(), "bundle.tgz")); !strings.Contains(out, "wrote") {
		t.Errorf("bundle:\n%s", out)
	}
}
