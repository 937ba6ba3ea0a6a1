package driver

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

// Mounter publishes volumes at targets. It joins retries and locks targets. Its errors have fault kinds. If a failed call may have changed
// something, the kind is Busy, Timeout or Unavailable.
type Mounter interface {
	// Publish publishes the volume. If refused is not nil, it fails with that error, which is not final if a volume is published at the
	// target.
	Publish(ctx context.Context, r mount.Request, refused error) error
	Unpublish(ctx context.Context, volumeID, target string) error
	// Stats returns fault.NotFound if the volume is not published at path.
	Stats(ctx context.Context, volumeID, path string) (mount.Stats, error)
	// VolumeHealth returns the adverse conditions of a volume at one target, or ("") at all. fault.NotFound: it is not on this node.
	VolumeHealth(ctx context.Context, volumeID, target string) ([]mount.Condition, error)
	// StorageHealth returns a condition if backends cannot be reached from this node.
	StorageHealth(ctx context.Context) ([]mount.Condition, error)
}

// Node is the CSI Node service. It has no staging, because all targets of a volume share a mount anyway.
type Node struct {
	csi.UnimplementedNodeServer
	VolumeHealth bool       // offers the alpha RPCs of volume health
	MaxVolumes   int64      // how many volumes the CO may publish on this node; 0: any number
	PodClients   PodClients // publishes the volumes with the option PodClients
	mounter      Mounter
	name         string // the driver's
	id           string
	inline       bool
	podClients   bool
}

// NewNode returns the service. It uses the options NodeID, InlineVolumes and PodClients.
func NewNode(mounter Mounter, driverName string, o NodeOptions) *Node {
	return &Node{mounter: mounter, name: driverName, id: o.NodeID, inline: o.InlineVolumes, podClients: o.PodClients}
}

// NodeGetCapabilities implements csi.NodeServer.
func (n *Node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range append(n.healthCapabilities(),
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	) {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

// NodeGetInfo implements csi.NodeServer.
func (n *Node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: n.id, MaxVolumesPerNode: n.MaxVolumes}, nil
}

// NodePublishVolume implements csi.NodeServer.
func (n *Node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if podvolume.Requested(req.GetVolumeContext()) {
		if err := n.publishPodVolume(ctx, req); err != nil {
			return nil, err
		}
		return &csi.NodePublishVolumeResponse{}, nil
	}
	p, refused := parsePublish(n.name, n.inline, req)
	if p.Target == "" {
		return nil, refused
	}
	if err := n.mounter.Publish(ctx, p, refused); err != nil {
		return nil, fmt.Errorf("publish volume %q at %s: %w", p.VolumeID, p.Target, err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume implements csi.NodeServer.
func (n *Node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := checkVolumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	target, err := cleanPath("target_path", req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	if err := n.mounter.Unpublish(ctx, req.GetVolumeId(), target); err != nil {
		return nil, fmt.Errorf("unpublish volume %q from %s: %w", req.GetVolumeId(), target, err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodeGetVolumeStats implements csi.NodeServer.
func (n *Node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := checkVolumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if path := req.GetVolumePath(); path != "" && !filepath.IsAbs(path) {
		// In the specification this RPC has no code for an invalid path, only for a volume that is not published there.
		return nil, fault.Errorf(fault.NotFound, "volume %q is not published at %q: not an absolute path", req.GetVolumeId(), path)
	}
	path, err := cleanPath("volume_path", req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	s, err := n.mounter.Stats(ctx, req.GetVolumeId(), path)
	if err != nil {
		return nil, fmt.Errorf("statistics of volume %q at %s: %w", req.GetVolumeId(), path, err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: s.TotalBytes, Used: s.UsedBytes, Available: s.AvailableBytes},
		{Unit: csi.VolumeUsage_INODES, Total: s.Inodes, Used: s.InodesUsed, Available: s.InodesFree},
	}}, nil
}
