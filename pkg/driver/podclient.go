package driver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

// PodClients publishes volumes whose client runs in the user's own pod. Its errors are those of a Mounter. If refused is not nil, Publish
// fails with that error, unless the same volume is published at the target already.
type PodClients interface {
	Publish(ctx context.Context, v podvolume.Volume, refused error) error
}

// publishPodVolume publishes a volume whose client runs in the user's own pod.
func (n *Node) publishPodVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) error {
	v, refused := parsePodVolume(req)
	if v.Target == "" {
		return refused
	}
	if refused == nil && !n.podClients {
		refused = fault.Field("volume_context."+podvolume.AttributeEmptyDir, "volumes with a client in the user's own pod are not enabled in this driver: "+
			"the operator enables them (podClients.enabled: true in the chart's values, --pod-clients of the driver on the nodes)")
	}
	if n.PodClients == nil {
		return fault.Errorf(fault.Unsupported, "this driver has no volumes with a client in the user's own pod")
	}
	if err := n.PodClients.Publish(ctx, v, refused); err != nil {
		return fmt.Errorf("publish volume %q at %s: %w", v.VolumeID, v.Target, err)
	}
	return nil
}

// parsePodVolume validates and parses a request. It has no side effects. The target is set if the request has a valid one.
func parsePodVolume(req *csi.NodePublishVolumeRequest) (v podvolume.Volume, err error) {
	v.VolumeID = req.GetVolumeId()
	if v.Target, err = checkPublish(req); err != nil {
		return v, err
	}
	c, attributes := req.GetVolumeCapability(), req.GetVolumeContext()
	if v.EmptyDir, v.Socket, err = podvolume.ParseAttributes(attributes); err != nil {
		return v, err
	}
	if !isInline(v.VolumeID, attributes) {
		return v, fault.Field("volume_context."+podvolume.AttributeEmptyDir, "is for inline volumes only (csi in a pod's volumes), because it names a volume of "+
			"the pod")
	}
	if err := checkPodInfo(v.Target, attributes); err != nil {
		return v, err
	}
	var pod publication
	if err := pod.readPod(attributes); err != nil {
		return v, err
	}
	v.PodNamespace, v.PodName = pod.PodNamespace, pod.PodName
	for _, key := range slices.Sorted(maps.Keys(req.GetSecrets())) {
		if !strings.HasPrefix(key, metadataPrefix) {
			return v, fault.Field("secrets", "are not used for a client in the pod: remove nodePublishSecretRef from the pod's volume, and give its container the "+
				"secret")
		}
	}
	v.ReadOnly = req.GetReadonly() || readOnlyMode(c)
	flags, context, err := splitSELinux(c.GetMount().GetMountFlags(), flagsField)
	if err != nil {
		return v, err
	}
	if len(flags) > 0 {
		return v, fault.Field(flagsField, "are not used for a client in the pod, which has its options in its container: remove %q", flags)
	}
	v.SELinuxContext = context
	return v, nil
}
