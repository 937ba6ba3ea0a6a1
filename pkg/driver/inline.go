package driver

import (
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const podUIDKey = metadataPrefix + "pod.uid"

// isInline tells the volumes that pods define themselves: by kubelet's word, or by the handles that it makes for them, which are
// "csi-" and the hash of pod and volume. Its word is missing without podInfoOnMount, and then an author's may stand in its place.
func isInline(handle string, context map[string]string) bool {
	if context[ephemeralKey] == "true" {
		return true
	}
	hash, ok := strings.CutPrefix(handle, "csi-")
	return ok && len(hash) == 64 && strings.Trim(hash, "0123456789abcdef") == ""
}

// errInlineOff is for inline volumes where the operator has not allowed them.
func errInlineOff() error {
	return fault.Errorf(fault.Precondition, "inline volumes of pods (csi in a pod's volumes) are not enabled in this driver: use a PersistentVolumeClaim, "+
		"or have its operator turn them on (inlineVolumes: true in the chart's values, --inline-volumes of the driver on the nodes)")
}

// checkInline refuses an inline volume that does not tell for certain whose it is, or where.
//
// All of the context is the pod's author's, but for what kubelet writes over it with podInfoOnMount. An author could write just the
// same without that. What nobody can write into a pod is the UID that it is going to get, which kubelet's target path holds: who
// knows it is kubelet, and so namespace and service account beside it are true.
func checkInline(target string, context map[string]string) error {
	if uid := context[podUIDKey]; context[ephemeralKey] != "true" || uid == "" || uid != podOf(target) {
		return fault.Errorf(fault.Precondition, "an inline volume of a pod is published only where kubelet says whose it is: set podInfoOnMount: true in the CSIDriver object")
	}
	if context["bucketName"] == "" {
		return fault.Field("volume_context.bucketName", "is missing: an inline volume names its bucket (volumeAttributes in the pod's volume)")
	}
	return nil
}

// podOf reads the pod's UID from a target path of kubelet's for a volume: <root>/pods/<uid>/volumes/<plugin>/<volume>/mount.
func podOf(target string) string {
	parts := strings.Split(target, "/")
	if n := len(parts); n >= 7 && parts[n-6] == "pods" && parts[n-4] == "volumes" && parts[n-1] == "mount" {
		return parts[n-5]
	}
	return ""
}

// inlineSource is where an inline volume's credentials come from: never from the driver, whose own are not for whoever may run a pod.
func inlineSource(wanted string, hasKeys bool) (string, error) {
	switch {
	case wanted == credentials.SourceDriver:
		return "", fault.Errorf(fault.Denied, "volume_context.credentials: inline volumes of pods never use the driver's own credentials: say credentials: workload, or secret and name one with keys in the volume's nodePublishSecretRef")
	case wanted == "" && hasKeys:
		return credentials.SourceSecret, nil
	case wanted == "":
		return credentials.SourceWorkload, nil
	}
	return wanted, nil
}
