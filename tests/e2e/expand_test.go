//go:build !lane || shared

package e2e

import (
	"fmt"
	"testing"
)

// attributesClass makes a VolumeAttributesClass of the test's own.
func attributesClass(t *testing.T, parameters string) string {
	t.Helper()
	name := fmt.Sprintf("e2e-%d", namespaces.Add(1))
	apply(t, "", fmt.Sprintf("apiVersion: storage.k8s.io/v1\nkind: VolumeAttributesClass\nmetadata: {name: %s}\ndriverName: %s\nparameters: {%s}\n", name,
		csiName, parameters))
	t.Cleanup(func() { remove(t, "volumeattributesclass", "", name) })
	return name
}

// TestExpansionAndModification: a claim that asks for more has it, a claim that names a VolumeAttributesClass has its values, and both
// are in the volume's record. A class that the driver refuses changes nothing and says what is wrong.
func TestExpansionAndModification(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	claim(t, ns, "data", class(t, map[string]string{"bucketName": b, "client": "rclone"}, `"allowVolumeExpansion": true`), "ReadWriteMany")
	v := bound(t, ns, "data")
	_, prefix := place(t, v)
	if r := recordOf(t, v); r.CapacityBytes != 1<<30 || r.OnDelete != "delete" {
		t.Errorf("the record of the new volume is %+v", r)
	}
	put(t, b, prefix+"file", "kept")
	patch := func(spec string) {
		kubectl(t, "patch", "pvc", "-n", ns, "data", "--type=merge", "-p", `{"spec":`+spec+`}`)
	}
	status := func(path, want string) {
		t.Helper()
		eventually(t, "the claim's "+path+" to be "+want, func() error {
			if got := kubectl(t, "get", "pvc", "-n", ns, "data", "-o", "jsonpath={.status."+path+"}"); got != want {
				return fmt.Errorf("it is %q; %s", got, lastEvent(t, ns, "data"))
			}
			return nil
		})
	}

	patch(`{"resources":{"requests":{"storage":"3Gi"}}}`)
	status("capacity.storage", "3Gi")
	if r := recordOf(t, v); r.CapacityBytes != 3<<30 {
		t.Errorf("after the expansion, the record is %+v", r)
	}

	patch(fmt.Sprintf(`{"volumeAttributesClassName":%q}`, attributesClass(t, "client: rclone, onDelete: retain")))
	t.Log(event(t, ns, "data", "InvalidArgument", "client"))
	if r := recordOf(t, v); r.OnDelete != "delete" {
		t.Errorf("after a class that is refused, the record is %+v", r)
	}
	keep := attributesClass(t, "onDelete: retain")
	patch(fmt.Sprintf(`{"volumeAttributesClassName":%q}`, keep))
	status("currentVolumeAttributesClassName", keep)
	if r := recordOf(t, v); r.OnDelete != "retain" || r.CapacityBytes != 3<<30 {
		t.Errorf("after the modification, the record is %+v", r)
	}

	remove(t, "pvc", ns, "data")
	volumeGone(t, v.Metadata.Name)
	if c := content(t, b, prefix+"file"); c != "kept" {
		t.Errorf("the file of a volume that keeps its data holds %q", c)
	}
}
