package containers

import (
	"cmp"
	"fmt"
	"strings"
)

// CgroupStyle is how the cgroup of a pod is named.
type CgroupStyle int

// The styles of the kubelet's cgroup drivers, and of Docker.
const (
	CgroupFS      CgroupStyle = iota // /kubepods/burstable/pod<uid>/<id>
	CgroupSystemd                    // …/kubepods-burstable-pod<uid, with _ for ->.slice/cri-containerd-<id>.scope
	CgroupDocker                     // /docker/<id>
)

// path is a container's cgroup. What is above the kubelet's part of it, as with the kubelet's --cgroup-root, is the
// container's own: it can be made and removed while other containers, of the same pod even, come and go.
func (s CgroupStyle) path(podUID, id string) string {
	switch s {
	case CgroupDocker:
		return fmt.Sprintf("/%[1]s/docker/%[1]s", id)
	case CgroupSystemd:
		return fmt.Sprintf("/%[1]s/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod%[2]s.slice/cri-containerd-%[1]s.scope", id,
			strings.ReplaceAll(podUID, "-", "_"))
	default:
		return fmt.Sprintf("/%[1]s/kubepods/burstable/pod%[2]s/%[1]s", id, podUID)
	}
}

// Mount is a bind mount, with all mounts below, as the kubelet asks for.
type Mount struct {
	Source string // on the host: a directory or a file
	Target string // in the container; it is made
	// ReadOnly is volumeMounts.readOnly.
	ReadOnly bool
	// Propagation is "rprivate" (""), "rslave" (HostToContainer) or "rshared" (Bidirectional).
	Propagation string
}

// The first id on the host and the number of ids of containers with a user namespace.
const (
	userNamespaceBase = 300_000
	userNamespaceSize = 65_536
)

// object is a part of an OCI runtime's config.json (opencontainers/runtime-spec, config.md and config-linux.md).
type object map[string]any

func (o Options) spec(id, rootfs string) object {
	process := object{"user": object{}, "args": []string{"/agent"}, "env": []string{"PATH=/"}, "cwd": "/", "noNewPrivileges": true}
	if o.Capabilities { // those of containerd and CRI-O for a container that asks for none
		set := []string{
			"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP",
			"CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
		}
		process["capabilities"] = object{"bounding": set, "effective": set, "permitted": set}
	}
	namespaces := []object{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}}
	linux := object{"cgroupsPath": o.Cgroup.path(o.PodUID, id)}
	if o.Fuse { // its numbers are in Documentation/admin-guide/devices.txt of the kernel
		linux["devices"] = []object{{"type": "c", "path": "/dev/fuse", "major": 10, "minor": 229, "fileMode": 0o666}}
		linux["resources"] = object{"devices": []object{{"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"}}}
	}
	if o.UserNamespace {
		namespaces = append(namespaces, object{"type": "user"})
		ids := []object{{"containerID": 0, "hostID": userNamespaceBase, "size": userNamespaceSize}}
		linux["uidMappings"], linux["gidMappings"] = ids, ids
	}
	linux["namespaces"] = namespaces
	mounts := []object{
		{"destination": "/proc", "type": "proc", "source": "proc", "options": []string{"nosuid", "noexec", "nodev"}},
		// the root's file system may allow no devices
		{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755", "size=64k"}},
	}
	root := "" // its propagation: containerd makes it rslave for containers with a mount that is not private
	for _, m := range o.Mounts {
		options := []string{"rbind", cmp.Or(m.Propagation, "rprivate"), "rw"}
		if m.ReadOnly {
			options[2] = "ro"
		}
		if m.Propagation == "rslave" || m.Propagation == "rshared" {
			root = max(root, m.Propagation)
		}
		if o.UserNamespace {
			options = append(options, "nosuid", "nodev") // what the source has must be kept, which older runtimes do not do
		}
		mounts = append(mounts, object{"destination": m.Target, "type": "bind", "source": m.Source, "options": options})
	}
	if root != "" {
		linux["rootfsPropagation"] = root
	}
	return object{
		"ociVersion": "1.0.2", "hostname": "container", "root": object{"path": rootfs, "readonly": o.ReadOnlyRoot},
		"process": process, "mounts": mounts, "linux": linux,
	}
}
