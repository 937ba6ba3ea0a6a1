package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

// The images of pods with clients of their own. Both of clients have all programs; without a command they run sshfs, in one of the ways.
const (
	starterImage    = "cluster.local/pod-client-starter:1"
	fusermountImage = "cluster.local/pod-client-fusermount:1"
	minioImage      = "cluster.local/pod-client-minio:1"
)

// orderedPod is a pod whose client is sshfs, for a volume that it may write to, with an fsGroup. What is in sub/ outlives the client's
// container.
func orderedPod(containers string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: own-client}
spec:
  terminationGracePeriodSeconds: 1
  securityContext: {fsGroup: 2000}
%s
  volumes:
  - {name: fuse-fd-passing, emptyDir: {}}
  - {name: store, emptyDir: {}}
  - {name: data, csi: {driver: %s, volumeAttributes: {fdPassingEmptyDirName: fuse-fd-passing, fdPassingSocketName: fuse-csi-ephemeral.sock}}}
`, containers, csiName)
}

// subPathUser is a container that has a directory of the volume alone, which kubelet makes, beside the whole volume.
const subPathUser = `{name: busybox, image: "` + cluster.Busybox + `", command: [sleep, infinity], volumeMounts: [{name: data, mountPath: /data}, ` +
	`{name: data, mountPath: /sub, subPath: sub/dir}]}`

// sidecar has the client as a sidecar that is started when it serves.
func sidecar() string {
	return orderedPod(`
  initContainers:
  - name: starter
    image: ` + starterImage + `
    restartPolicy: Always
    startupProbe: {exec: {command: [sh, -c, mount | grep /data | grep fuse]}, periodSeconds: 1, failureThreshold: 300}
    volumeMounts: [{name: fuse-fd-passing, mountPath: /fuse-fd-passing}, {name: store, mountPath: /root/sshfs-example/sub}, {name: data, mountPath: /data}]
  containers:
  - ` + subPathUser)
}

// podClient is a pod with a client in the container "starter", and a container "busybox" that uses the volume.
type podClient struct {
	ns, program string
	pod         object
	clientID    string // of the container in which the client runs
}

const ownClient = "own-client"

// id is that of a container as it runs now.
func (c *podClient) id(t *testing.T, container string) string {
	t.Helper()
	c.pod = get(t, "pod", c.ns, ownClient)
	for _, s := range append(c.pod.Status.ContainerStatuses, c.pod.Status.InitContainerStatuses...) {
		if s.Name == container {
			return strings.TrimPrefix(s.ContainerID, "containerd://")
		}
	}
	return ""
}

// processesOf are those of a container.
func processesOf(id string) []process {
	return slices.DeleteFunc(nodeProcesses(), func(p process) bool {
		cgroup, _ := os.ReadFile(world.Path(fmt.Sprintf("/proc/%d/cgroup", p.pid)))
		return id == "" || !strings.Contains(string(cgroup), id)
	})
}

// user is a process of the container that uses the volume.
func (c *podClient) user(t *testing.T) process {
	t.Helper()
	all := processesOf(c.id(t, "busybox"))
	if len(all) == 0 {
		t.Fatalf("the container has no process: %+v", c.pod.Status)
	}
	return all[0]
}

// podClientMounts are the mounts of volumes with clients in pods that a process of the node sees at a path; "": at any.
func podClientMounts(pid int, path string) ([]*mountinfo.Info, error) {
	f, err := os.Open(world.Path(fmt.Sprintf("/proc/%d/mountinfo", pid)))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return mountinfo.GetMountsFromReader(f, func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Source, "s3csi-pod:") || path != "" && i.Mountpoint != path, false
	})
}

// device is the number of the client's file system that the container that uses the volume has there.
func (c *podClient) device(t *testing.T, path string) (string, error) {
	t.Helper()
	table, err := podClientMounts(c.user(t).pid, path)
	if err != nil {
		return "", err
	}
	if len(table) == 0 || table[len(table)-1].FSType != "fuse" {
		return "", fmt.Errorf("%s shows no client's file system, but %d mounts of the volume", path, len(table))
	}
	return deviceOf(table[len(table)-1]), nil
}
