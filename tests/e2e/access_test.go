//go:build !lane || shared

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

// readOnlyError is the error of a write to a read-only file system.
const readOnlyError = "Read-only file system"

// TestAccessModes: how many pods may have a volume, and what they may do with it.
func TestAccessModes(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	c := class(t, map[string]string{"bucketName": b})
	t.Run("ReadWriteMany", func(t *testing.T) {
		claim(t, ns, "many", c, "ReadWriteMany")
		for _, pod := range []string{"many-a", "many-b"} {
			apply(t, ns, podSpec{name: pod, claims: map[string]string{"/v": "many"}, command: "echo of " + pod + " >/v/" + pod + " && " + forever}.yaml())
		}
		for _, pod := range []string{"many-a", "many-b"} {
			podReady(t, ns, pod)
		}
		for pod, other := range map[string]string{"many-a": "many-b", "many-b": "many-a"} {
			eventually(t, pod+" to see what "+other+" writes", func() error {
				out, err := tryExecute(ns, pod, "cat", "/v/"+other)
				if err == nil && out != "of "+other+"\n" {
					err = fmt.Errorf("it reads %q", out)
				}
				return err
			})
		}
	})
	t.Run("ReadOnlyMany", func(t *testing.T) {
		claim(t, ns, "readers", c, "ReadOnlyMany")
		_, prefix := place(t, bound(t, ns, "readers"))
		put(t, b, prefix+"file", "to be read")
		for _, pod := range []string{"reader-a", "reader-b"} {
			apply(t, ns, podSpec{name: pod, claims: map[string]string{"/v": "readers"}}.yaml())
		}
		for _, pod := range []string{"reader-a", "reader-b"} {
			podReady(t, ns, pod)
			if got := execute(t, ns, pod, "cat", "/v/file"); got != "to be read" {
				t.Errorf("%s reads %q", pod, got)
			}
			cannotWrite(t, ns, pod, "c", "/v/new")
		}
		if all := keys(t, b, prefix); !slices.Equal(all, []string{prefix + "file"}) {
			t.Errorf("there is %q", all)
		}
	})
	t.Run("ReadWriteOncePod", func(t *testing.T) { testOncePod(t, ns, c) })
}

// testOncePod: the scheduler keeps a second pod out, kubelet does where the scheduler was not asked, and the driver does where
// another PersistentVolume names the same place and says nothing of one pod.
func testOncePod(t *testing.T, ns, c string) {
	claim(t, ns, "once", c, "ReadWriteOncePod")
	first := podSpec{name: "once-first", claims: map[string]string{"/v": "once"}, command: "echo first >/v/file && " + forever}
	first.run(t, ns)
	apply(t, ns, podSpec{name: "once-second", claims: map[string]string{"/v": "once"}}.yaml())
	event(t, ns, "once-second", "ReadWriteOncePod")
	v := get(t, "pv", "", get(t, "pvc", ns, "once").Spec.VolumeName)
	staticClaim{name: "once-more", handle: v.Spec.CSI.VolumeHandle, mode: "ReadWriteOnce"}.make(t, ns)
	// One after the other: kubelet waits longer after each failure for a volume, whichever pod it was for.
	for _, other := range []struct {
		pod  podSpec
		says []string
	}{
		{podSpec{name: "once-placed", claims: map[string]string{"/v": "once"}, pod: "nodeName: " + cluster.Node},
			[]string{"ReadWriteOncePod", "already in use by another pod"}},
		{podSpec{name: "once-again", claims: map[string]string{"/v": "once-more"}}, []string{"the volume allows a single writer and is already published at"}},
	} {
		apply(t, ns, other.pod.yaml())
		event(t, ns, other.pod.name, other.says...)
		for _, pod := range []string{"once-second", other.pod.name} {
			if o := get(t, "pod", ns, pod); o.ready() {
				t.Errorf("pod %s has the volume too", pod)
			}
		}
		remove(t, "pod", ns, other.pod.name)
	}
	if got := execute(t, ns, "once-first", "cat", "/v/file"); got != "first\n" {
		t.Errorf("the first pod reads %q", got)
	}
	remove(t, "pod", ns, "once-first")
	podReady(t, ns, "once-second")
	if got := execute(t, ns, "once-second", "cat", "/v/file"); got != "first\n" {
		t.Errorf("the second pod reads %q when it is its turn", got)
	}
}

// TestReadOnly: what is read-only for a pod, for a container, and for everybody.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	claim(t, ns, "data", class(t, map[string]string{"bucketName": b}), "ReadWriteMany")
	claim(t, ns, "locked", class(t, map[string]string{"bucketName": b, "readOnly": "true"}), "ReadWriteMany")
	all := map[string]string{}
	for _, name := range []string{"data", "locked"} {
		_, all[name] = place(t, bound(t, ns, name))
		put(t, b, all[name]+"file", "of "+name)
	}
	apply(t, ns, `
apiVersion: v1
kind: Pod
metadata: {name: containers}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: reader, image: `+cluster.Busybox+`, command: [sleep, "1000000"], volumeMounts: [{name: v, mountPath: /v, readOnly: true}, {name: locked,
     mountPath: /locked}]}
  - {name: writer, image: `+cluster.Busybox+`, command: [sleep, "1000000"], volumeMounts: [{name: v, mountPath: /v}]}
  volumes:
  - {name: v, persistentVolumeClaim: {claimName: data}}
  - {name: locked, persistentVolumeClaim: {claimName: locked}}`)
	apply(t, ns, podSpec{name: "pod", claims: map[string]string{"/v": "data"}, source: "readOnly: true"}.yaml())
	podReady(t, ns, "containers")
	podReady(t, ns, "pod")
	for _, at := range []struct{ pod, container, dir, holds string }{
		{"containers", "reader", "/v", "of data"}, {"containers", "reader", "/locked", "of locked"}, {"pod", "c", "/v", "of data"},
	} {
		if got := inContainer(t, ns, at.pod, at.container, "cat", at.dir+"/file"); got != at.holds {
			t.Errorf("%s of pod %s reads %q in %s", at.container, at.pod, got, at.dir)
		}
		cannotWrite(t, ns, at.pod, at.container, at.dir+"/new")
		if out, err := tryInContainer(ns, at.pod, at.container, "rm", at.dir+"/file"); err == nil || !strings.Contains(err.Error(), readOnlyError) {
			t.Errorf("%s of pod %s removes a file in %s: %s %v", at.container, at.pod, at.dir, out, err)
		}
	}
	inContainer(t, ns, "containers", "writer", "sh", "-c", "echo new >/v/written")
	eventually(t, "the other pod to see what was written", func() error {
		_, err := tryExecute(ns, "pod", "cat", "/v/written")
		return err
	})
	if all := keys(t, b, all["data"]); len(all) != 2 {
		t.Errorf("there is %q", all)
	}
	// Of a volume that is read-only for everybody, the session is too.
	_, err := sessionOf(t, get(t, "pv", "", get(t, "pvc", ns, "locked").Spec.VolumeName)).put(b, all["locked"]+"new")
	if !isForbidden(err) {
		t.Errorf("the session of a read-only volume writes: %v", err)
	}
}

// TestSubPath: directories of a volume for containers, those that are there, those that are not, and those that go.
func TestSubPath(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for _, client := range clients() {
		t.Run(client, func(t *testing.T) {
			name := strings.ReplaceAll(client, "-", "")
			claim(t, ns, name, class(t, map[string]string{"bucketName": b, "client": client}), "ReadWriteMany")
			_, prefix := place(t, bound(t, ns, name))
			for _, dir := range []string{"one/", "two/deep/"} {
				put(t, b, prefix+dir+"file", "in "+dir)
			}
			container := func(name, path string) string {
				return fmt.Sprintf(`{name: %s, image: %s, command: [sleep, "1000000"], env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}], `+
					`volumeMounts: [{name: v, mountPath: /v, %s}]}`,
					name, cluster.Busybox, path)
			}
			apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers: [%s]
  volumes: [{name: v, persistentVolumeClaim: {claimName: %s}}]`, name,
				strings.Join([]string{container("one", "subPath: one"), container("two", "subPath: two/deep"), container("new", "subPath: new"),
					container("named", "subPathExpr: of-$(POD)")}, ", "), name))
			pod := podReady(t, ns, name)
			for container, want := range map[string]string{"one": "file", "two": "file", "new": "", "named": ""} {
				if got := strings.TrimSpace(inContainer(t, ns, name, container, "ls", "-A", "/v")); got != want {
					t.Errorf("%s has %q, want %q", container, got, want)
				}
			}
			if got := inContainer(t, ns, name, "two", "cat", "/v/file"); got != "in two/deep/" {
				t.Errorf("two reads %q", got)
			}
			for _, container := range []string{"one", "new", "named"} {
				inContainer(t, ns, name, container, "sh", "-c", "echo of "+container+" >/v/written")
			}
			want := []string{prefix + "new/written", prefix + "of-" + name + "/written", prefix + "one/file", prefix + "one/written", prefix + "two/deep/file"}
			eventually(t, "what was written in S3", func() error {
				if all := keys(t, b, prefix); !slices.Equal(all, want) {
					return fmt.Errorf("there is %q", all)
				}
				return nil
			})
			// A pod ends whose directories are gone meanwhile: one by the pod itself, one behind the mount.
			inContainer(t, ns, name, "new", "rm", "/v/written")
			deleteObjects(t, b, prefix+"two/")
			if all := mountsOf(t, pod); len(all) != 5 { // the volume and four directories
				t.Errorf("the pod's mounts are %q", all)
			}
			remove(t, "pod", ns, name)
			if left := mountsOf(t, pod); len(left) > 0 {
				t.Errorf("left on the node: %q", left)
			}
			if all := keys(t, b, prefix); !slices.Equal(all, slices.DeleteFunc(want, func(k string) bool {
				return strings.HasSuffix(k, "/deep/file") || strings.HasSuffix(k, "new/written")
			})) {
				t.Errorf("there is %q", all)
			}
		})
	}
	t.Run("read-only", func(t *testing.T) {
		claim(t, ns, "read-only", class(t, map[string]string{"bucketName": b}), "ReadOnlyMany")
		bound(t, ns, "read-only")
		apply(t, ns, podSpec{name: "read-only", claims: map[string]string{"/v": "read-only"}, mount: "subPath: missing"}.yaml())
		event(t, ns, "read-only", "failed to create subPath directory")
		remove(t, "pod", ns, "read-only")
	})
}

// TestSecurityContexts: pods that are not root, with a group of their own and without.
func TestSecurityContexts(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for _, client := range clients() {
		t.Run(client, func(t *testing.T) {
			name := strings.ReplaceAll(client, "-", "")
			grouped, plain := name+"-grouped", name+"-plain"
			claim(t, ns, name, class(t, map[string]string{"bucketName": b, "client": client}), "ReadWriteMany")
			_, prefix := place(t, bound(t, ns, name))
			put(t, b, prefix+"dir/there", "from elsewhere")
			volumes := map[string]string{"/v": name}
			apply(t, ns, podSpec{name: grouped, claims: volumes, pod: "securityContext: {runAsUser: 1000, runAsGroup: 3000, fsGroup: 2000, runAsNonRoot: true}"}.yaml())
			apply(t, ns, podSpec{name: plain, claims: volumes, pod: "securityContext: {runAsUser: 1001, runAsGroup: 3001, runAsNonRoot: true}"}.yaml())
			for _, tt := range []struct{ pod, dir, file string }{{grouped, "2000 770", "2000 660"}, {plain, "777", "666"}} {
				podReady(t, ns, tt.pod)
				if got := execute(t, ns, tt.pod, "cat", "/v/dir/there"); got != "from elsewhere" {
					t.Errorf("%s reads %q", tt.pod, got)
				}
				execute(t, ns, tt.pod, "sh", "-c", "echo x >/v/dir/"+tt.pod+" && mkdir /v/dir-"+tt.pod+" && echo x >/v/dir-"+tt.pod+"/file")
				for path, want := range map[string]string{
					"/v": tt.dir, "/v/dir": tt.dir, "/v/dir-" + tt.pod: tt.dir, "/v/dir/there": tt.file, "/v/dir/" + tt.pod: tt.file, "/v/dir-" + tt.pod + "/file": tt.file,
				} {
					got := strings.TrimSpace(execute(t, ns, tt.pod, "stat", "-c", "%g %a", path))
					if got != want && (strings.Contains(want, " ") || !strings.HasSuffix(got, " "+want)) {
						t.Errorf("%s: %s is %q, want %q", tt.pod, path, got, want)
					}
				}
				execute(t, ns, tt.pod, "rm", "/v/dir-"+tt.pod+"/file")
			}
			// Each has a mount of its own, and they have the same files.
			for pod, other := range map[string]string{grouped: plain, plain: grouped} {
				eventually(t, pod+" to see what "+other+" writes", func() error {
					_, err := tryExecute(ns, pod, "cat", "/v/dir/"+other)
					return err
				})
			}
		})
	}
}

// inContainer runs a command in one of a pod's containers, which must succeed, and gives what it says.
func inContainer(t testing.TB, namespace, pod, container string, argv ...string) string {
	t.Helper()
	out, err := tryInContainer(namespace, pod, container, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// tryInContainer runs a command in one of a pod's containers, which may fail.
func tryInContainer(namespace, pod, container string, argv ...string) (string, error) {
	return try(append([]string{"exec", "-n", namespace, pod, "-c", container, "--"}, argv...)...)
}

// cannotWrite checks that a container's writes fail as on a read-only file system.
func cannotWrite(t testing.TB, namespace, pod, container, path string) {
	t.Helper()
	out, err := tryInContainer(namespace, pod, container, "sh", "-c", "echo x >"+path)
	if err == nil || !strings.Contains(err.Error(), readOnlyError) {
		t.Errorf("%s of pod %s writes %s: %s %v", container, pod, path, out, err)
	}
}

// mountsOf are the places on the node where a pod has volumes of the driver.
func mountsOf(t testing.TB, pod object) (paths []string) {
	t.Helper()
	for _, m := range mountTable(t, 1) {
		if strings.Contains(m.Mountpoint, "/"+pod.Metadata.UID+"/") {
			paths = append(paths, m.Mountpoint)
		}
	}
	return paths
}
