//go:build !lane || shared

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// kernel reports whether the kernel is of that version or a later one.
func kernel(t testing.TB, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	var its, minors int
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &its, &minors); err != nil {
		t.Fatal(err)
	}
	return its > major || its == major && minors >= minor
}

// refusal is what the container runtime says of a volume that it cannot id-map.
const refusal = "failed to set MOUNT_ATTR_IDMAP on"

// TestUserNamespaces runs pods with hostUsers: false, whose volumes the container runtime id-maps. The ids of such a pod are 0 to 65535.
func TestUserNamespaces(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	volume := func(t *testing.T, name string, parameters map[string]string) object {
		t.Helper()
		parameters["bucketName"] = b
		claim(t, ns, name, class(t, parameters), "ReadWriteMany")
		v := bound(t, ns, name)
		_, prefix := place(t, v)
		put(t, b, prefix+"file", "of the volume")
		return v
	}
	pod := func(name, claim, more string) podSpec {
		return podSpec{
			name: name, claims: map[string]string{"/v": claim}, pod: join("hostUsers: false", more),
		}
	}
	idMaps := kernel(t, 6, 12)
	mapped := func(t *testing.T, name string) {
		t.Helper()
		if f := strings.Fields(execute(t, ns, name, "cat", "/proc/self/uid_map")); len(f) != 3 || f[0] != "0" || f[1] == "0" || f[2] != "65536" {
			t.Errorf("the pod has the ids %q: it has no user namespace", f)
		}
	}
	t.Run("no id-mapping without the client", func(t *testing.T) {
		clients := []string{"mountpoint-s3"}
		if !idMaps {
			clients = append(clients, "rclone")
		}
		for _, client := range clients {
			name := "refused-" + strings.ReplaceAll(client, "-", "")
			v := volume(t, name, map[string]string{"client": client})
			apply(t, ns, pod(name, name, "").yaml())
			event(t, ns, name, refusal, "invalid argument")
			m := mountOf(t, v)
			if len(m.processes()) != 2 {
				t.Errorf("the volume is not published: mount %s has the processes %v", m.Name, m.processes())
			}
			if o := get(t, "pod", ns, name); o.ready() {
				t.Error("the pod is ready")
			}
			remove(t, "pod", ns, name)
			m.gone(t)
		}
	})
	if !idMaps {
		t.Log("rclone's mounts cannot be id-mapped before Linux 6.12")
		return
	}
	t.Run("owner of the container's", func(t *testing.T) {
		v := volume(t, "owned", map[string]string{"client": "rclone", "uid": "0", "gid": "0"})
		pod("root", "owned", "").run(t, ns)
		pod("user", "owned", "securityContext: {runAsUser: 1000, runAsGroup: 1000}").run(t, ns)
		podSpec{name: "host", claims: map[string]string{"/v": "owned"}}.run(t, ns)
		for _, name := range []string{"root", "user", "host"} {
			if name != "host" {
				mapped(t, name)
			}
			script := "stat -c %u:%g /v /v/file && cat /v/file && mkdir -p /v/dir && echo written >/v/dir/" + name + " &&" +
				" mv /v/dir/" + name + " /v/" + name + " && cat /v/" + name
			if got := execute(t, ns, name, "sh", "-c", script); got != "0:0\n0:0\nof the volumewritten\n" {
				t.Errorf("%s sees %q", name, got)
			}
		}
		// They share a mount, though no two of them have the same ids.
		m := mountOf(t, v)
		died := m.process(t, "s3-csi-rclone")
		died.kill(t)
		m.revived(t, died)
		well := []string{"host"}
		if kernel(t, 6, 15) { // it tells how a mount is mapped
			well = append(well, "root", "user")
		}
		for _, name := range well {
			eventually(t, "pod "+name+" to be well", func() error {
				if p := m.processes(); len(p) != 2 || p[0] == died || p[1] == died {
					return fmt.Errorf("there are %v", p)
				}
				_, err := tryExecute(ns, name, "cat", "/v/file")
				return err
			})
			script := "stat -c %u:%g /v/file && echo again >/v/" + name + " && cat /v/" + name
			if got := execute(t, ns, name, "sh", "-c", script); got != "0:0\nagain\n" {
				t.Errorf("%s sees %q after the client exited", name, got)
			}
			if c := get(t, "pod", ns, name).Status.ContainerStatuses[0]; c.RestartCount != 0 {
				t.Errorf("the container of %s was started again", name)
			}
		}
		for _, name := range []string{"root", "user", "host"} {
			remove(t, "pod", ns, name)
		}
		_, prefix := place(t, v)
		for _, name := range []string{"root", "user", "host"} {
			want := "written\n"
			if slices.Contains(well, name) {
				want = "again\n"
			}
			if got := content(t, b, prefix+name); got != want {
				t.Errorf("S3 has %q of pod %s", got, name)
			}
		}
		m.gone(t)
	})
	t.Run("owner and fsGroup", func(t *testing.T) {
		volume(t, "grouped", map[string]string{"client": "rclone", "uid": "0"})
		pod("grouped", "grouped", "securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}").run(t, ns)
		mapped(t, "grouped")
		if got := execute(t, ns, "grouped", "sh", "-c", "stat -c %u:%g:%a /v && echo written >/v/new && cat /v/file"); got != "0:2000:770\nof the volume" {
			t.Errorf("the pod sees %q", got)
		}
		remove(t, "pod", ns, "grouped")
	})
	t.Run("owner that the container does not have", func(t *testing.T) {
		volume(t, "foreign", map[string]string{"client": "rclone"})
		pod("foreign", "foreign", "").run(t, ns)
		mapped(t, "foreign")
		if got := execute(t, ns, "foreign", "sh", "-c", "stat -c %u:%g /v && cat /v/file"); got != "65534:65534\nof the volume" {
			t.Errorf("the pod sees %q", got)
		}
		if _, err := tryExecute(ns, "foreign", "sh", "-c", "echo written >/v/new"); err == nil || !strings.Contains(err.Error(), "Permission denied") {
			t.Errorf("writing: %v, want it refused", err)
		}
		remove(t, "pod", ns, "foreign")
	})
}
