package driver

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// The RPCs of volume health are alpha in CSI 1.13, and offered with --volume-health only.

// healthCapabilities returns the node's capabilities for volume health.
func (n *Node) healthCapabilities() []csi.NodeServiceCapability_RPC_Type {
	if !n.VolumeHealth {
		return nil
	}
	return []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH, csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH}
}

// healthCapabilities returns the controller's capabilities for volume health. It cannot list the health of all volumes: what it knows of
// one follows from a request for that one.
func (c *Controller) healthCapabilities() []csi.ControllerServiceCapability_RPC_Type {
	if !c.VolumeHealth {
		return nil
	}
	return []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH}
}

// NodeGetVolumeHealth implements csi.NodeServer.
func (n *Node) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if !n.VolumeHealth {
		return n.UnimplementedNodeServer.NodeGetVolumeHealth(ctx, req)
	}
	if err := checkVolumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	target := ""
	if path := req.GetVolumePublishPath(); path != "" {
		var err error
		if target, err = cleanPath("volume_publish_path", path); err != nil {
			return nil, err
		}
	}
	found, err := n.mounter.VolumeHealth(ctx, req.GetVolumeId(), target)
	if err != nil {
		return nil, fmt.Errorf("health of volume %q: %w", req.GetVolumeId(), err)
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: healthOf(req.GetVolumeId(), found)}, nil
}

// NodeGetStorageHealth implements csi.NodeServer.
func (n *Node) NodeGetStorageHealth(ctx context.Context, req *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	if !n.VolumeHealth {
		return n.UnimplementedNodeServer.NodeGetStorageHealth(ctx, req)
	}
	found, err := n.mounter.StorageHealth(ctx)
	if err != nil {
		return nil, fmt.Errorf("health of backends: %w", err)
	}
	resp := &csi.NodeGetStorageHealthResponse{}
	for _, c := range found {
		status := csi.StorageHealthErrorType_STORAGE_DEGRADED
		if c.Inaccessible {
			status = csi.StorageHealthErrorType_STORAGE_UNREACHABLE
		}
		resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: status, Reason: c.Reason,
			Message: truncate(c.Message, maxMessage)})
	}
	return resp, nil
}

// ControllerGetVolumeHealth implements csi.ControllerServer. Its conditions are degraded at most: that the controller cannot reach a volume
// does not mean that nodes cannot.
func (c *Controller) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	if !c.VolumeHealth {
		return c.UnimplementedControllerServer.ControllerGetVolumeHealth(ctx, req)
	}
	handle := req.GetVolumeId()
	if err := checkVolumeID(handle); err != nil {
		return nil, err
	}
	id, err := volume.ParseID(handle)
	if err != nil {
		return nil, fault.Errorf(fault.NotFound, "volume %q does not exist: %w", handle, err)
	}
	secret, err := c.secret(id.Backend, req.GetSecrets())
	if err != nil {
		return nil, fmt.Errorf("health of volume %q: %w", handle, err)
	}
	var found []mount.Condition
	err = c.volumes.Lookup(ctx, about(id, secret))
	switch kind := fault.KindOf(err); {
	case err == nil:
	case ctx.Err() != nil:
		return nil, fmt.Errorf("health of volume %q: %w", handle, err)
	case kind == fault.Denied || kind == fault.Unauthenticated:
		found = append(found, mount.Condition{Reason: mount.ReasonCredentialsRefused, Message: err.Error()})
	case kind == fault.Unavailable || kind == fault.Timeout:
		found = append(found, mount.Condition{Reason: mount.ReasonBackendUnreachable, Message: err.Error()})
	default:
		return nil, fmt.Errorf("health of volume %q: %w", handle, err)
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: healthOf(handle, found)}, nil
}

func healthOf(handle string, found []mount.Condition) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: handle}
	for _, c := range found {
		status := csi.VolumeHealthErrorType_DEGRADED
		if c.Inaccessible {
			status = csi.VolumeHealthErrorType_INACCESSIBLE
		}
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: c.Reason, Message: truncate(c.Message, maxMessage)})
	}
	return h
}
