// Package podvolume defines volumes that a FUSE client in the user's own pod serves, and parses their attributes. It is pure.
//
// The names of the attributes are those of meta-fuse-csi-plugin, so that its manifests work.
package podvolume

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// The attributes of such a volume. Both are required.
const (
	AttributeEmptyDir = "fdPassingEmptyDirName" // the pod's emptyDir volume in which the driver listens
	AttributeSocket   = "fdPassingSocketName"   // the socket's file name in it
)

const (
	attributePrefix  = "fdPassing"
	kubernetesPrefix = "csi.storage.k8s.io/"
	// maxSocket keeps the socket's path in a container, below a mount point of a usual length, within sockaddr_un's 107 bytes (unix(7)).
	maxSocket = 64
)

// Volume is a publication of such a volume.
type Volume struct {
	Target   string `json:"target"`
	VolumeID string `json:"volumeID"`
	EmptyDir string `json:"emptyDir"`
	Socket   string `json:"socket"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// SELinuxContext labels every file of the file system.
	SELinuxContext string `json:"selinuxContext,omitempty"`
	// PodNamespace and PodName are for people: the target has the pod's UID. "": unknown.
	PodNamespace string `json:"podNamespace,omitempty"`
	PodName      string `json:"podName,omitempty"`
}

// Same reports whether two publications are the same, whatever the pod is called.
func (v Volume) Same(other Volume) bool {
	v.PodNamespace, v.PodName = other.PodNamespace, other.PodName
	return v == other
}

// Requested reports whether a volume context is that of such a volume, well-formed or not.
func Requested(context map[string]string) bool {
	for key := range context {
		if strings.HasPrefix(key, attributePrefix) {
			return true
		}
	}
	return false
}

// dnsLabel is the form of a volume's name in a pod (RFC 1123).
var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// socketName is a plain file name that no shell and no tool needs to quote.
var socketName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*$`)

// ParseAttributes returns the names in a volume context. Attributes of kubelet are ignored, any other one is an error: the driver has no
// credentials and no options for such a volume.
func ParseAttributes(context map[string]string) (emptyDir, socket string, err error) {
	for _, key := range slices.Sorted(maps.Keys(context)) {
		if key != AttributeEmptyDir && key != AttributeSocket && !strings.HasPrefix(key, kubernetesPrefix) {
			return "", "", fault.Field("volume_context."+key, "is not an attribute of a volume that a client in the pod serves: "+
				"it has only %s and %s, and its client takes everything else from its own container", AttributeEmptyDir, AttributeSocket)
		}
	}
	emptyDir, socket = context[AttributeEmptyDir], context[AttributeSocket]
	switch {
	case emptyDir == "":
		return "", "", fault.Field("volume_context."+AttributeEmptyDir, "is missing: it names an emptyDir volume of the pod")
	case socket == "":
		return "", "", fault.Field("volume_context."+AttributeSocket, "is missing: it is the file name of a socket in the emptyDir volume")
	case !dnsLabel.MatchString(emptyDir):
		return "", "", fault.Field("volume_context."+AttributeEmptyDir,
			"%.80q is not the name of a volume: at most 63 lowercase letters, digits and dashes", emptyDir)
	case len(socket) > maxSocket || !socketName.MatchString(socket):
		return "", "", fault.Field("volume_context."+AttributeSocket,
			"%.80q is not a plain file name of at most %d letters, digits, dots, dashes and underscores", socket, maxSocket)
	}
	return emptyDir, socket, nil
}

// target is kubelet's target path: <root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount.
var target = regexp.MustCompile(`^(/.*/pods/([0-9a-zA-Z][0-9a-zA-Z-]{7,62}))/volumes/kubernetes\.io~csi/[^/]+/mount$`)

// Pod returns the UID of the volume's pod and kubelet's directory of it; ok is false if the target is not one of kubelet's.
func (v Volume) Pod() (dir, uid string, ok bool) {
	match := target.FindStringSubmatch(v.Target)
	if match == nil {
		return "", "", false
	}
	return match[1], match[2], true
}

// SocketDir is kubelet's directory of the emptyDir volume.
func (v Volume) SocketDir() string {
	dir, _, _ := v.Pod()
	return filepath.Join(dir, "volumes", "kubernetes.io~empty-dir", v.EmptyDir)
}

// ReadyFile is the file that kubelet makes when the emptyDir volume is ready: a tmpfs is mounted by then.
func (v Volume) ReadyFile() string {
	dir, _, _ := v.Pod()
	return filepath.Join(dir, "plugins", "kubernetes.io~empty-dir", v.EmptyDir, "ready")
}
