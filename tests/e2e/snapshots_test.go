//go:build !lane || shared

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// snapshotClass makes a VolumeSnapshotClass of the test's own.
func snapshotClass(t *testing.T, parameters string) string {
	t.Helper()
	name := fmt.Sprintf("e2e-%d", namespaces.Add(1))
	apply(t, "", fmt.Sprintf("apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotClass\nmetadata: {name: %s}\ndriver: %s\ndeletionPolicy: "+
		"Delete\nparameters: {%s}\n", name, csiName, parameters))
	t.Cleanup(func() { remove(t, "volumesnapshotclass", "", name) })
	return name
}

// snapshot asks for a snapshot of a claim.
func snapshot(t *testing.T, namespace, name, class, claim string) {
	t.Helper()
	apply(t, namespace, fmt.Sprintf("apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: %s}\nspec: {volumeSnapshotClassName: %s, "+
		"source: {persistentVolumeClaimName: %s}}\n", name, class, claim))
}

// usable waits until a snapshot is ready, and gives its content.
func usable(t *testing.T, namespace, name string) object {
	t.Helper()
	var o object
	eventually(t, "snapshot "+name+" to be ready", func() error {
		if o = get(t, "volumesnapshot", namespace, name); o.Status.ReadyToUse {
			return nil
		}
		return fmt.Errorf("it is not; %s", lastEvent(t, namespace, name))
	})
	return get(t, "volumesnapshotcontent", "", o.Status.Content)
}

// claimFrom makes a claim with a source: "{kind: …, name: …}".
func claimFrom(t *testing.T, namespace, name, class, mode, source string) {
	t.Helper()
	apply(t, namespace, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec:
  storageClassName: %s
  accessModes: [%s]
  resources: {requests: {storage: 1Gi}}
  dataSource: %s`, name, class, mode, source))
}

// TestSnapshots: a snapshot, and volumes that are restored from it, cloned from its source, and the snapshot itself.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	parameters := map[string]string{"bucketName": b, "client": "rclone"}
	c := class(t, parameters)
	direct := class(t, map[string]string{"bucketName": b, "client": "rclone", "snapshotAccess": "direct"})
	taken := snapshotClass(t, "consistency: object")
	claim(t, ns, "data", c, "ReadWriteMany")
	bound(t, ns, "data")
	podSpec{name: "writer", claims: map[string]string{"/v": "data"}, command: "echo before >/v/file && mkdir /v/dir && echo x >/v/dir/x && " + forever}.run(t, ns)
	remove(t, "pod", ns, "writer") // which waits for what it wrote
	snapshot(t, ns, "taken", taken, "data")
	handle := usable(t, ns, "taken").Status.Handle
	if !strings.HasPrefix(handle, "default:"+b+"/") {
		t.Errorf("the snapshot's handle is %q", handle)
	}
	podSpec{name: "writer", claims: map[string]string{"/v": "data"}, command: "echo after >/v/file && rm /v/dir/x && " + forever}.run(t, ns)
	remove(t, "pod", ns, "writer")

	const ofSnapshot = "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: taken}"
	claimFrom(t, ns, "restored", c, "ReadWriteMany", ofSnapshot)
	claimFrom(t, ns, "cloned", c, "ReadWriteMany", "{kind: PersistentVolumeClaim, name: data}")
	claimFrom(t, ns, "shown", direct, "ReadOnlyMany", ofSnapshot)
	volumes := []object{bound(t, ns, "restored"), bound(t, ns, "cloned"), bound(t, ns, "shown"), bound(t, ns, "data")}
	podSpec{name: "reader", claims: map[string]string{"/restored": "restored", "/cloned": "cloned"}}.run(t, ns)
	podSpec{name: "viewer", claims: map[string]string{"/shown": "shown"}, source: "readOnly: true"}.run(t, ns)
	for pod, want := range map[string]string{"reader /restored": "before\nx\n", "reader /cloned": "after\n", "viewer /shown": "before\nx\n"} {
		name, path, _ := strings.Cut(pod, " ")
		if got := execute(t, ns, name, "sh", "-c", "cat "+path+"/file; cat "+path+"/dir/x 2>/dev/null; true"); got != want {
			t.Errorf("%s holds %q, want %q", pod, got, want)
		}
	}
	for _, pod := range []string{"reader", "viewer"} {
		remove(t, "pod", ns, pod)
	}
	for _, pvc := range []string{"restored", "cloned", "shown", "data"} {
		remove(t, "pvc", ns, pvc)
	}
	for _, v := range volumes {
		volumeGone(t, v.Metadata.Name)
	}
	remove(t, "volumesnapshot", ns, "taken")
	eventually(t, "the snapshot's objects to be gone", func() error {
		name := strings.TrimPrefix(handle, "default:"+b+"/")
		if left := keys(t, b, ".s3-csi/snapshots/"+name+"/"); len(left) > 0 {
			return errors.New(strings.Join(left, ", "))
		}
		return nil
	})
}

// TestASnapshotThatCannotBe says why, where users look.
func TestASnapshotThatCannotBe(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	claim(t, ns, "data", class(t, map[string]string{"bucketName": bucket(t), "client": "rclone"}), "ReadWriteMany")
	v := bound(t, ns, "data")
	snapshot(t, ns, "late", snapshotClass(t, "consistency: time"), "data")
	eventually(t, "the snapshot to say why it cannot be", func() error {
		out, err := try("get", "volumesnapshot", "-n", ns, "late", "-o", "jsonpath={.status.error.message}")
		if err == nil && (!strings.Contains(out, "versioning") || !strings.Contains(out, "is off")) {
			err = fmt.Errorf("it says %q; %s", out, lastEvent(t, ns, "late"))
		}
		return err
	})
	remove(t, "volumesnapshot", ns, "late")
	remove(t, "pvc", ns, "data")
	volumeGone(t, v.Metadata.Name)
}
