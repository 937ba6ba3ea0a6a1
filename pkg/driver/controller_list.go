package driver

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// listCapabilities returns the capabilities that need credentials which no request brings.
func (c *Controller) listCapabilities() []csi.ControllerServiceCapability_RPC_Type {
	if !c.volumes.CanList() {
		return nil
	}
	return []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_LIST_VOLUMES, csi.ControllerServiceCapability_RPC_GET_VOLUME}
}

// ListVolumes implements csi.ControllerServer. A page may have fewer entries than asked for, and a next one.
func (c *Controller) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	if req.GetMaxEntries() < 0 {
		return nil, fault.Field("max_entries", "%d is negative", req.GetMaxEntries())
	}
	if !c.volumes.CanList() {
		return nil, fault.Errorf(fault.Precondition, "list volumes: a backend has controllerCredentials: secret, and requests to list volumes bring no secret")
	}
	page, next, err := c.volumes.List(ctx, int(req.GetMaxEntries()), req.GetStartingToken())
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	resp := &csi.ListVolumesResponse{NextToken: next}
	for _, v := range page {
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: volumeMessage(v)})
	}
	return resp, nil
}

// ControllerGetVolume implements csi.ControllerServer.
func (c *Controller) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	handle := req.GetVolumeId()
	if err := checkVolumeID(handle); err != nil {
		return nil, err
	}
	id, err := volume.ParseID(handle)
	if err != nil {
		return nil, fault.Errorf(fault.NotFound, "volume %q does not exist: %w", handle, err)
	}
	if _, err := c.secret(id.Backend, nil); err != nil {
		return nil, fmt.Errorf("get volume %q: %w", handle, err)
	}
	v, err := c.volumes.Get(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("get volume %q: %w", handle, err)
	}
	return &csi.ControllerGetVolumeResponse{Volume: volumeMessage(v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}

// volumeMessage returns the volume for a response. Its context is not recorded.
func volumeMessage(v provision.Volume) *csi.Volume {
	return &csi.Volume{VolumeId: v.ID.String(), CapacityBytes: v.CapacityBytes}
}
