package driver

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// VolumeInfo is what is recorded of a volume.
type VolumeInfo struct {
	ID            volume.ID
	CapacityBytes int64 // 0: unknown
}

// Lister finds volumes, with the controller's own credentials. Its errors are those of Provisioner.
type Lister interface {
	// CanList reports whether the controller has credentials of its own for every backend.
	CanList() bool
	// List returns at most limit volumes (0: the provisioner's choice) and the token of the next page; "": there is none. A token that is not
	// valid is fault.Busy.
	List(ctx context.Context, limit int, token string) (page []VolumeInfo, next string, err error)
	// Get returns fault.NotFound if the volume does not exist.
	Get(ctx context.Context, id volume.ID) (VolumeInfo, error)
}

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
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: v.message()})
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
	return &csi.ControllerGetVolumeResponse{Volume: v.message(), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}

// message returns the volume for a response. Its context is not recorded.
func (v VolumeInfo) message() *csi.Volume {
	return &csi.Volume{VolumeId: v.ID.String(), CapacityBytes: v.CapacityBytes}
}
