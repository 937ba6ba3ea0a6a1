package driver

import (
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

const podUIDKey = metadataPrefix + "pod.uid"

// isInline reports whether a volume is an inline volume: by kubelet's context key, or by the form of the handles that kubelet generates for
// inline volumes, which are "csi-" and a hash. Without podInfoOnMount kubelet does not set the key, and the pod's author could.
func isInline(handle string, context map[string]string) bool {
	if context[ephemeralKey] == "true" {
		return true
	}
	return mount.IsInlineHandle(handle)
}

// errInlineDisabled is the error for inline volumes without --inline-volumes.
func errInlineDisabled() error {
	return fault.Errorf(fault.Precondition, "inline volumes of pods (csi in a pod's volumes) are not enabled in this driver: use a PersistentVolumeClaim, "+
		"or let the operator enable them (inlineVolumes: true in the chart's values, --inline-volumes of the driver on the nodes)")
}

// checkPodInfo refuses an inline volume whose pod information is not from kubelet.
//
// The pod's author writes the context. With podInfoOnMount kubelet overwrites the pod information in it, without it an author could forge
// that information. An author cannot know the pod's UID in advance, which is in kubelet's target path. So if the context has that UID,
// kubelet wrote it, and with it the namespace and the service account.
func checkPodInfo(target string, context map[string]string) error {
	pod, _ := mount.KubeletTarget(target)
	if uid := context[podUIDKey]; context[ephemeralKey] != "true" || uid == "" || uid != pod {
		return fault.Errorf(fault.Precondition, "inline volumes need the pod information of kubelet: set podInfoOnMount: true in the CSIDriver object")
	}
	return nil
}

// checkInline refuses an inline volume without a bucket, or whose pod information is not from kubelet.
func checkInline(target string, context map[string]string) error {
	if err := checkPodInfo(target, context); err != nil {
		return err
	}
	if context["bucketName"] == "" {
		return fault.Field("volume_context.bucketName", "is missing: an inline volume must name its bucket (volumeAttributes in the pod's volume)")
	}
	if context["snapshot"] != "" {
		return fault.Errorf(fault.Denied, "volume_context.snapshot: an inline volume cannot show a snapshot: restore it to a volume, or use a PersistentVolume")
	}
	return nil
}

// inlineSource returns the credential source of an inline volume. It is never the driver, because anyone who can create pods could use it.
func inlineSource(wanted string, hasKeys bool) (string, error) {
	switch {
	case wanted == credentials.SourceDriver:
		return "", fault.Errorf(fault.Denied, "volume_context.credentials: inline volumes never use the driver's own credentials: set credentials: workload, or "+
			"credentials: secret with a nodePublishSecretRef in the volume")
	case wanted == "" && hasKeys:
		return credentials.SourceSecret, nil
	case wanted == "":
		return credentials.SourceWorkload, nil
	}
	return wanted, nil
}
