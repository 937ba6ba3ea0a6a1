package containers

import (
	"fmt"
	"strings"
)

// CgroupStyle is how the cgroup of a pod is named.
type CgroupStyle int

// The styles of the kubelet's cgroup drivers.
const (
	CgroupFS      CgroupStyle = iota // /kubepods/burstable/pod<uid>/<id>
	CgroupSystemd                    // …/kubepods-burstable-pod<uid, with _ for ->.slice/cri-containerd-<id>.scope
)

// path is a container's cgroup. What is above the kubelet's part of it, as with the kubelet's --cgroup-root, is the
// container's own: it can be made and removed while other containers, of the same pod even, come and go.
func (s CgroupStyle) path(podUID, id string) string {
	if s == CgroupSystemd {
		return fmt.Sprintf("/%[1]s/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod%[2]s.slice/cri-containerd-%[1]s.scope", id, strings.ReplaceAll(podUID, "-", "_"))
	}
	return fmt.Sprintf("/%[1]s/kubepods/burstable/pod%[2]s/%[1]s", id, podUID)
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

// The parts of an OCI runtime's config.json that are used here (opencontainers/runtime-spec, config.md and config-linux.md).
type (
	ociSpec struct {
		Version  string     `json:"ociVersion"`
		Process  ociProcess `json:"process"`
		Root     ociRoot    `json:"root"`
		Hostname string     `json:"hostname"`
		Mounts   []ociMount `json:"mounts"`
		Linux    ociLinux   `json:"linux"`
	}
	ociProcess struct {
		User            struct{} `json:"user"` // 0:0
		Args            []string `json:"args"`
		Env             []string `json:"env"`
		Cwd             string   `json:"cwd"`
		NoNewPrivileges bool     `json:"noNewPrivileges"`

		Capabilities *ociCapabilities `json:"capabilities,omitempty"`
	}
	ociCapabilities struct {
		Bounding  []string `json:"bounding"`
		Effective []string `json:"effective"`
		Permitted []string `json:"permitted"`
	}
	ociRoot struct {
		Path     string `json:"path"`
		ReadOnly bool   `json:"readonly,omitempty"`
	}
	ociMount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source"`
		Options     []string `json:"options"`
	}
	ociLinux struct {
		Namespaces  []ociNamespace `json:"namespaces"`
		UIDs        []ociIDs       `json:"uidMappings,omitempty"`
		GIDs        []ociIDs       `json:"gidMappings,omitempty"`
		CgroupsPath string         `json:"cgroupsPath"`
		Devices     []ociDevice    `json:"devices,omitempty"`
		Resources   *ociResources  `json:"resources,omitempty"`
		// Propagation of the root: containerd makes it rslave for containers with a mount that is not private.
		Propagation string `json:"rootfsPropagation,omitempty"`
	}
	ociDevice struct {
		Type  string `json:"type"`
		Path  string `json:"path"`
		Major int64  `json:"major"`
		Minor int64  `json:"minor"`
		Mode  uint32 `json:"fileMode"`
	}
	ociResources struct {
		Devices []ociAccess `json:"devices"`
	}
	ociAccess struct {
		Allow  bool   `json:"allow"`
		Type   string `json:"type,omitempty"`
		Major  *int64 `json:"major,omitempty"`
		Minor  *int64 `json:"minor,omitempty"`
		Access string `json:"access"`
	}
	ociNamespace struct {
		Type string `json:"type"`
	}
	ociIDs struct {
		ContainerID uint32 `json:"containerID"`
		HostID      uint32 `json:"hostID"`
		Size        uint32 `json:"size"`
	}
)

// defaultCapabilities are those of containerd's and CRI-O's default, which a container has that asks for none.
var defaultCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP",
	"CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// The numbers of /dev/fuse, Documentation/admin-guide/devices.txt of the kernel.
const fuseMajor, fuseMinor = int64(10), int64(229)

func (o Options) spec(id, rootfs string) ociSpec {
	s := ociSpec{
		Version: "1.0.2", Root: ociRoot{Path: rootfs}, Hostname: "container",
		Process: ociProcess{Args: []string{"/agent"}, Env: []string{"PATH=/"}, Cwd: "/", NoNewPrivileges: true},
		Mounts: []ociMount{
			{"/proc", "proc", "proc", []string{"nosuid", "noexec", "nodev"}},
			{"/dev", "tmpfs", "tmpfs", []string{"nosuid", "mode=755", "size=64k"}}, // the root's file system may allow no devices
		},
		Linux: ociLinux{CgroupsPath: o.Cgroup.path(o.PodUID, id)},
	}
	for _, ns := range []string{"pid", "mount", "ipc", "uts"} {
		s.Linux.Namespaces = append(s.Linux.Namespaces, ociNamespace{ns})
	}
	s.Root.ReadOnly = o.ReadOnlyRoot
	if o.Capabilities {
		s.Process.Capabilities = &ociCapabilities{defaultCapabilities, defaultCapabilities, defaultCapabilities}
	}
	if o.Fuse {
		major, minor := fuseMajor, fuseMinor
		s.Linux.Devices = []ociDevice{{"c", "/dev/fuse", major, minor, 0o666}}
		s.Linux.Resources = &ociResources{[]ociAccess{{Allow: true, Type: "c", Major: &major, Minor: &minor, Access: "rwm"}}}
	}
	if o.UserNamespace {
		s.Linux.Namespaces = append(s.Linux.Namespaces, ociNamespace{"user"})
		s.Linux.UIDs = []ociIDs{{0, userNamespaceBase, userNamespaceSize}}
		s.Linux.GIDs = s.Linux.UIDs
	}
	for _, m := range o.Mounts {
		access, propagation := "rw", m.Propagation
		if m.ReadOnly {
			access = "ro"
		}
		switch propagation {
		case "":
			propagation = "rprivate"
		case "rslave", "rshared":
			s.Linux.Propagation = max(s.Linux.Propagation, propagation)
		}
		options := []string{"rbind", propagation, access}
		if o.UserNamespace {
			options = append(options, "nosuid", "nodev") // what the source has must be kept, which older runtimes do not do
		}
		s.Mounts = append(s.Mounts, ociMount{m.Target, "bind", m.Source, options})
	}
	return s
}
