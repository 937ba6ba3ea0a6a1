package driver

import (
	"cmp"
	"context"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// ControllerExpandVolume implements csi.ControllerServer. It records the size and nothing else: S3 limits no sizes, and nodes have nothing
// to do.
func (c *Controller) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	handle := req.GetVolumeId()
	size := provision.Change{Required: req.GetCapacityRange().GetRequiredBytes(), Limit: req.GetCapacityRange().GetLimitBytes()}
	_, err := capacityOf(req.GetCapacityRange())
	if size.Required == 0 && size.Limit == 0 {
		err = fault.Field("capacity_range", "is missing")
	}
	if c := req.GetVolumeCapability(); c != nil {
		err = cmp.Or(err, checkMountCapability(capabilityField, c))
	}
	if err = cmp.Or(checkVolumeID(handle), err); err != nil {
		return nil, err
	}
	capacity, err := c.modify(ctx, handle, req.GetSecrets(), size)
	if err != nil {
		return nil, fmt.Errorf("expand volume %q: %w", handle, err)
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: capacity}, nil
}

// ControllerModifyVolume implements csi.ControllerServer. It changes what a VolumeAttributesClass names, and nothing else.
func (c *Controller) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	handle := req.GetVolumeId()
	if err := checkVolumeID(handle); err != nil {
		return nil, err
	}
	set, err := mutableOf(req.GetMutableParameters())
	if err != nil {
		return nil, err
	}
	if _, err := c.modify(ctx, handle, req.GetSecrets(), provision.Change{Set: set}); err != nil {
		return nil, fmt.Errorf("modify volume %q: %w", handle, err)
	}
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// mutableOf parses mutable_parameters.
func mutableOf(params map[string]string) (volume.Mutable, error) {
	if err := checkMap("mutable_parameters", params); err != nil {
		return volume.Mutable{}, err
	}
	return volume.ParseMutable(params)
}

// withMutable returns the parameters of a creation: those of the VolumeAttributesClass take precedence.
func withMutable(params, mutable map[string]string) map[string]string {
	all := maps.Clone(params)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, mutable)
	return all
}

// modify changes a volume that this driver created, and returns its size.
func (c *Controller) modify(ctx context.Context, handle string, secrets map[string]string, change provision.Change) (int64, error) {
	id, err := volume.ParseID(handle)
	switch {
	case err != nil && volume.LooksForeign(handle):
		return 0, fault.Errorf(fault.Precondition, "not a volume id of this driver: a static volume has no record that could be changed")
	case err != nil:
		return 0, fault.Errorf(fault.NotFound, "the volume does not exist: %w", err)
	}
	secret, err := c.secret(id.Backend, secrets)
	if err != nil {
		return 0, err
	}
	return c.volumes.Modify(ctx, provision.ModifyRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN, Change: change})
}
