//go:build !lane || shared

package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// The commands of sshfs for a server in its own container. For libfuse 3, which tries /dev/fuse before it executes fusermount3, an empty
// file will do.
const (
	starterSSHFS = "/usr/local/bin/s3-csi-fuse-starter --fd-passing-socket-path /fuse-fd-passing/fuse-csi-ephemeral.sock -- /usr/bin/sshfs " +
		"root@localhost:/root/sshfs-example /dev/fd/3 -f"
	fusermountSSHFS = "touch /dev/fuse; exec /usr/bin/sshfs root@localhost:/root/sshfs-example /tmp -f"
)

// overSSH is a script that runs a server, and a command of sshfs.
func overSSH(sshfs string) string {
	return `#!/bin/bash
set -e
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/host
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/user
/usr/sbin/sshd -D -e &
until (: </dev/tcp/localhost/22) 2>/dev/null; do sleep 0.1; done
(` + sshfs + `) &
wait -n
`
}

// importPodClients brings these images, of Debian's programs of this machine. s3-csi-fusermount has replaced fusermount3 and fusermount
// in them, as docs/reference/pod-clients.md has it.
func importPodClients(t *testing.T) {
	t.Helper()
	for program, pkg := range map[string]string{"/usr/bin/sshfs": "sshfs", "/usr/sbin/sshd": "openssh-server", "/usr/bin/ssh": "openssh-client",
		"/usr/bin/curl": "curl"} {
		if _, err := os.Stat(program); err != nil {
			t.Skipf("needs the package %s: make setup installs it: %v", pkg, err)
		}
	}
	files, err := cluster.Programs(t.Context(), "/bin/bash", "/usr/bin/sshfs", "/usr/bin/ssh", "/usr/sbin/sshd", "/usr/bin/ssh-keygen", "/usr/bin/curl")
	if err != nil {
		t.Fatal(err)
	}
	bin := os.Getenv(rig.EnvBin)
	for path, program := range map[string]string{
		"/usr/bin/mount-s3": rig.OwnMountpoint, "/usr/local/bin/s3-csi-fuse-starter": "s3-csi-fuse-starter",
		"/usr/bin/fusermount3": "s3-csi-fusermount", "/bin/fusermount": "s3-csi-fusermount",
	} {
		files[path] = filepath.Join(bin, program)
	}
	for _, path := range []string{"/bin/busybox", "/etc/ssl/certs/ca-certificates.crt"} {
		files[path] = path
	}
	client := func(name, command string) cluster.Image {
		return cluster.Image{ // of one layer for both names
			Name: name, Files: files, Dirs: []string{"tmp", "run/sshd"}, Cmd: []string{command},
			Links: map[string]string{"bin/sh": "busybox", "bin/mkdir": "busybox", "bin/sleep": "busybox", "bin/touch": "busybox", "bin/mount": "busybox",
				"bin/grep": "busybox"},
			Texts: map[string]string{
				"etc/passwd":        "root:*:0:0:root:/root:/bin/bash\nsshd:*:100:65534::/run/sshd:/bin/sh\n",
				"etc/nsswitch.conf": "hosts: files dns\n",
				"etc/ssh/sshd_config": "HostKey /etc/ssh/host\nAuthorizedKeysFile /root/.ssh/user.pub\nAuthenticationMethods publickey\nUsePAM no\nSubsystem sftp " +
					"internal-sftp\n",
				"root/.ssh/config":        "IdentityFile /root/.ssh/user\nStrictHostKeyChecking no\n",
				"root/sshfs-example/file": "content",
				"starter.sh":              overSSH(starterSSHFS),
				"fusermount.sh":           overSSH(fusermountSSHFS),
				"configure_minio.sh": `#!/bin/bash
s3() { curl --silent --fail --user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" --aws-sigv4 aws:amz:us-east-1:s3 "$@"; }
until s3 --upload-file /root/sshfs-example/file http://localhost:9000/test-bucket/file; do
	sleep 0.1
	s3 -X PUT http://localhost:9000/test-bucket
done
`,
			},
		}
	}
	server, err := minio.Binary()
	if err != nil {
		t.Fatal(err)
	}
	shell, err := cluster.Programs(t.Context(), "/bin/bash")
	if err != nil {
		t.Fatal(err)
	}
	shell["/usr/bin/minio"] = server
	err = world.Import(t.Context(), client(starterImage, "/starter.sh"), client(fusermountImage, "/fusermount.sh"),
		cluster.Image{Name: minioImage, Files: shell, Dirs: []string{"tmp"}})
	if err != nil {
		t.Fatal(err)
	}
}

// metaFuse is a manifest of meta-fuse-csi-plugin, for the containers of a client and the command of the container that uses the volume.
// The driver's name and the images alone are others.
func metaFuse(containers, command string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: own-client}
spec:
  terminationGracePeriodSeconds: 10
  containers:
%s
  - image: %s
    name: busybox
%s
    volumeMounts:
    - {name: fuse-csi-ephemeral, mountPath: /data, readOnly: true, mountPropagation: HostToContainer}
  volumes:
  - name: fuse-fd-passing
    emptyDir: {}
  - name: fuse-csi-ephemeral
    csi:
      driver: %s
      readOnly: true
      volumeAttributes:
        fdPassingEmptyDirName: fuse-fd-passing
        fdPassingSocketName: fuse-csi-ephemeral.sock
`, containers, cluster.Busybox, command, csiName)
}

const sleepForever = `
    command: ["sleep"]
    args: ["infinity"]`

// mountpointByFusermount is the pod that the article about meta-fuse-csi-plugin shows. Its client reads from a MinIO in the pod.
func mountpointByFusermount() string {
	return metaFuse(`
  - name: minio
    image: `+minioImage+`
    command: ["/bin/bash"]
    args: ["-c", "minio server /data --console-address :9090"]
  - name: starter
    image: `+fusermountImage+`
    imagePullPolicy: IfNotPresent
    command: ["/bin/bash"]
    args: ["-c",
      "./configure_minio.sh && mount-s3 test-bucket /tmp --endpoint-url \"http://localhost:9000\"
      -d --allow-other --auto-unmount --foreground --force-path-style"]
    env:
    - {name: FUSERMOUNT3PROXY_FDPASSING_SOCKPATH, value: "/fusermount3-proxy/fuse-csi-ephemeral.sock"}
    - {name: AWS_ACCESS_KEY_ID, value: "minioadmin"}
    - {name: AWS_SECRET_ACCESS_KEY, value: "minioadmin"}
    volumeMounts:
    - {name: fuse-fd-passing, mountPath: /fusermount3-proxy}`, `
    command: ["/bin/ash"]
    args: ["-c", "while [[ ! \"$(/bin/mount | grep fuse)\" ]]; do echo \"waiting for mount\" && sleep 1; done; sleep infinity"]`)
}

func sshfsByStarter() string {
	return metaFuse(`
  - name: starter
    image: `+starterImage+`
    imagePullPolicy: IfNotPresent
    volumeMounts:
    - {name: fuse-fd-passing, mountPath: /fuse-fd-passing}`, sleepForever)
}

func sshfsByFusermount() string {
	return metaFuse(`
  - name: starter
    image: `+fusermountImage+`
    imagePullPolicy: IfNotPresent
    env:
    - {name: FUSERMOUNT3PROXY_FDPASSING_SOCKPATH, value: "/fusermount3-proxy/fuse-csi-ephemeral.sock"}
    volumeMounts:
    - {name: fuse-fd-passing, mountPath: /fusermount3-proxy}`, sleepForever)
}

// mountpointByStarter is a pod without any privilege, whose client starts after the container that uses the volume.
func mountpointByStarter(bucket string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: own-client}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - {name: busybox, image: %q, command: [sh, -c, %q], volumeMounts: [{name: data, mountPath: /data}]}
    - name: starter
      image: %q
      command:
        - /usr/local/bin/s3-csi-fuse-starter
        - --fd-passing-socket-path=/fd/data.sock
        - --
        - /usr/local/bin/s3-csi-mountpoint
        - %s
        - /dev/fd/3
        - --prefix=p/
        - --region=us-east-1
        - --endpoint-url=http://s3.storage.svc:9000
        - --force-path-style
        - --allow-other
        - --allow-delete
        - --dir-mode=0777
      env:
        - {name: AWS_ACCESS_KEY_ID, valueFrom: {secretKeyRef: {name: s3-keys, key: accessKeyID}}}
        - {name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: s3-keys, key: secretAccessKey}}}
      securityContext: {runAsUser: 1000, runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      volumeMounts: [{name: fd, mountPath: /fd}]
  volumes:
    - {name: fd, emptyDir: {medium: Memory}}
    - {name: data, csi: {driver: %s, volumeAttributes: {fdPassingEmptyDirName: fd, fdPassingSocketName: data.sock}}}
`, cluster.Busybox, forever, world.images.driver, bucket, csiName)
}

// TestPodClients runs clients in pods, in both ways and in any order of containers. Each pod sees its client's files, also those of the next
// client after a crash, and nothing of it is left on the node.
func TestPodClients(t *testing.T) {
	t.Parallel()
	need(t)
	t.Run("pods", func(t *testing.T) {
		t.Run("mountpoint, starter", func(t *testing.T) {
			t.Parallel()
			ns, b := newNamespace(t), bucket(t)
			k, err := world.s3.AddUser(t.Context(), "pod-client-"+ns, everything)
			if err != nil {
				t.Fatal(err)
			}
			apply(t, ns, secret("s3-keys", k))
			put(t, b, "p/file", "content")
			c := newPodClient(t, ns, mountpointByStarter(b), rig.OwnMountpoint)
			fuseclients.Get(t, "s3-csi-mountpoint", fuseclients.InKubernetes, fuseclients.Starter).Use(t, fuseclients.Volume{
				Dir: c.inside(t, "/data"), Restart: func() { c.restart(t, "/data") },
				Stored: (&rigtest.Server{Process: world.s3, S3: storage(t)}).Stored(t, b, "p/"),
			})
			c.end(t)
		})
		t.Run("of Debian", func(t *testing.T) {
			t.Parallel()
			importPodClients(t)
			for name, p := range map[string]struct {
				fuseclients.Case
				manifest, program string
			}{
				"mountpoint, fusermount": {fuseclients.Get(t, "s3-csi-mountpoint", fuseclients.InKubernetes, fuseclients.Fusermount), mountpointByFusermount(), "mount-s3"},
				"sshfs, starter":         {fuseclients.Get(t, "sshfs", fuseclients.InKubernetes, fuseclients.Starter), sshfsByStarter(), "sshfs"},
				"sshfs, fusermount":      {fuseclients.Get(t, "sshfs", fuseclients.InKubernetes, fuseclients.Fusermount), sshfsByFusermount(), "sshfs"},
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					c := newPodClient(t, newNamespace(t), p.manifest, p.program)
					p.Use(t, fuseclients.Volume{Dir: c.inside(t, "/data"), ReadOnly: true, Restart: func() { c.restart(t, "/data") }})
					c.end(t)
				})
			}
			t.Run("sidecar", func(t *testing.T) {
				t.Parallel()
				newPodClient(t, newNamespace(t), sidecar(), "sshfs").useSubPath(t)
			})
			t.Run("client last", func(t *testing.T) {
				t.Parallel()
				newPodClient(t, newNamespace(t), clientLast(), "sshfs").useSubPath(t)
			})
		})
	})
	table, err := podClientMounts(1, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range table {
		t.Errorf("left on the node: %s", m.Mountpoint)
	}
	if left, err := os.ReadDir(world.Path(nodeStateDir + "/podclients")); err != nil && !errors.Is(err, fs.ErrNotExist) || len(left) > 1 { // mounts/
		t.Errorf("left on the node: %v, %v", left, err)
	}
}

// clientLast starts the client after an init container that looks at the volume, and after a container that cannot start without the client.
func clientLast() string {
	return orderedPod(`
  initContainers:
  - {name: first, image: "` + cluster.Busybox + `", command: [ls, /data], volumeMounts: [{name: data, mountPath: /data}]}
  containers:
  - ` + subPathUser + `
  - name: starter
    image: ` + starterImage + `
    volumeMounts: [{name: fuse-fd-passing, mountPath: /fuse-fd-passing}, {name: store, mountPath: /root/sshfs-example/sub}]`)
}

// newPodClient starts a pod and waits until its container sees the client's file system.
func newPodClient(t *testing.T, ns, manifest, program string) *podClient {
	t.Helper()
	apply(t, ns, manifest)
	c := &podClient{ns: ns, program: program}
	c.pod = podReady(t, ns, ownClient)
	c.clientID = c.id(t, "starter")
	eventually(t, "the container to see the client's file system", func() error {
		_, err := c.device(t, "/data")
		return err
	})
	return c
}

// inside is a path of that container, from outside.
func (c *podClient) inside(t *testing.T, path string) string {
	t.Helper()
	return world.Path(fmt.Sprintf("/proc/%d/root%s", c.user(t).pid, path))
}

// restart kills the client, and waits until its container runs again and the other one sees the new client's file system at the paths.
func (c *podClient) restart(t *testing.T, paths ...string) {
	t.Helper()
	before := map[string]string{}
	for _, path := range paths {
		device, err := c.device(t, path)
		if err != nil {
			t.Fatal(err)
		}
		before[path] = device
	}
	user := c.id(t, "busybox")
	for _, p := range processesOf(c.clientID) {
		if p.name == c.program {
			p.kill(t)
		}
	}
	former := c.clientID
	eventually(t, "another container of the client", func() error {
		if c.clientID = c.id(t, "starter"); c.clientID == former || c.clientID == "" {
			return fmt.Errorf("its container is %q", c.clientID)
		}
		return nil
	})
	for _, path := range paths {
		eventually(t, "the next client's file system at "+path, func() error {
			device, err := c.device(t, path)
			if err == nil && device == before[path] {
				err = fmt.Errorf("it has device %s, as before", device)
			}
			if err == nil {
				_, err = os.ReadDir(c.inside(t, path))
			}
			return err
		})
	}
	if now := c.id(t, "busybox"); now != user {
		t.Errorf("the container that uses the volume was started again: %s", now)
	}
}

// useSubPath uses the pod's volume and its subPath, before and after a restart of the client, and ends the pod.
func (c *podClient) useSubPath(t *testing.T) {
	t.Helper()
	reads := func(path, want string) {
		t.Helper()
		if got, err := os.ReadFile(c.inside(t, path)); err != nil || string(got) != want {
			t.Errorf("%s reads %q, %v", path, got, err)
		}
	}
	reads("/data/file", "content")
	if err := os.WriteFile(c.inside(t, "/sub/new"), []byte("written"), 0o644); err != nil {
		t.Fatal(err)
	}
	reads("/data/sub/dir/new", "written")
	c.restart(t, "/data", "/sub")
	reads("/data/file", "content")
	reads("/sub/new", "written")
	c.end(t)
}

// end deletes the pod, and waits until the node has nothing of it.
func (c *podClient) end(t *testing.T) {
	t.Helper()
	kubectl(t, "delete", "pod", "-n", c.ns, ownClient, "--grace-period=1", "--timeout="+patience.String())
	eventually(t, "the node to have nothing of the pod", func() error {
		if left := inlineMounts(t, c.pod); len(left) > 0 {
			return errors.New(strings.Join(left, ""))
		}
		return nil
	})
}
