package driver

import (
	"cmp"
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Snapshots makes, finds and deletes snapshots, as *provision.Provisioner describes. Its errors have fault kinds.
type Snapshots interface {
	CreateSnapshot(ctx context.Context, r provision.SnapshotRequest) (provision.Snapshot, error)
	DeleteSnapshot(ctx context.Context, r provision.DeleteSnapshotRequest) error
	GetSnapshot(ctx context.Context, id volume.SnapshotID, secret provision.Secret) (provision.Snapshot, error)
	ListSnapshots(ctx context.Context, r provision.ListSnapshotsRequest) (list []provision.Snapshot, next string, err error)
}

// snapshotNamespaceKey is the parameter in which the snapshotter passes the snapshot's namespace, with --extra-create-metadata.
const snapshotNamespaceKey = metadataPrefix + "volumesnapshot/namespace"

// CreateSnapshot implements csi.ControllerServer.
func (c *Controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	s, err := c.parseSnapshot(req)
	if err != nil {
		return nil, err
	}
	release, ok := c.names.TryLock("snapshot " + s.Name)
	if !ok {
		return nil, fault.Errorf(fault.Busy, "snapshot %q: an earlier request to create it is still in progress", s.Name)
	}
	defer release()
	made, err := c.snapshots.CreateSnapshot(ctx, s)
	if err != nil {
		return nil, fmt.Errorf("create snapshot %q: %w", s.Name, err)
	}
	return &csi.CreateSnapshotResponse{Snapshot: snapshotMessage(made)}, nil
}

func (c *Controller) parseSnapshot(req *csi.CreateSnapshotRequest) (s provision.SnapshotRequest, err error) {
	s.Name, s.Namespace = req.GetName(), req.GetParameters()[snapshotNamespaceKey]
	handle := req.GetSourceVolumeId()
	if err := cmp.Or(volume.CheckName(s.Name), checkID("source_volume_id", handle), checkMap("parameters", req.GetParameters())); err != nil {
		return s, err
	}
	if s.Source, err = volume.ParseID(handle); err != nil {
		return s, fault.Errorf(fault.NotFound, "source_volume_id: %q is not a volume that this driver created, and names no place as handles of static volumes "+
			"must for a snapshot (parameter staticVolumes): %w", handle, err)
	}
	if s.Parameters, err = volume.ParseSnapshotParameters(req.GetParameters()); err != nil {
		return s, err
	}
	secret, err := c.secret(s.Source.Backend, req.GetSecrets())
	s.Keys, s.RoleARN = secret.Keys, secret.RoleARN
	return s, err
}

// DeleteSnapshot implements csi.ControllerServer. An id that is not one of this driver is a snapshot that does not exist, which is success.
func (c *Controller) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	handle := req.GetSnapshotId()
	if err := checkID("snapshot_id", handle); err != nil {
		return nil, err
	}
	id, err := volume.ParseSnapshotID(handle)
	if err != nil {
		return &csi.DeleteSnapshotResponse{}, nil //nolint:nilerr // it does not exist
	}
	secret, err := c.secret(id.Backend, req.GetSecrets())
	if err == nil {
		err = c.snapshots.DeleteSnapshot(ctx, provision.DeleteSnapshotRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN})
	}
	if err != nil {
		return nil, fmt.Errorf("delete snapshot %q: %w", handle, err)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// GetSnapshot implements csi.ControllerServer.
func (c *Controller) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if err := checkID("snapshot_id", req.GetSnapshotId()); err != nil {
		return nil, err
	}
	found, err := c.snapshot(ctx, req.GetSnapshotId(), req.GetSecrets())
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: snapshotMessage(found)}, nil
}

// snapshot returns a snapshot by its id.
func (c *Controller) snapshot(ctx context.Context, handle string, secrets map[string]string) (provision.Snapshot, error) {
	id, err := volume.ParseSnapshotID(handle)
	if err != nil {
		return provision.Snapshot{}, fault.Errorf(fault.NotFound, "snapshot %q does not exist: %w", handle, err)
	}
	secret, err := c.secret(id.Backend, secrets)
	if err != nil {
		return provision.Snapshot{}, err
	}
	found, err := c.snapshots.GetSnapshot(ctx, id, secret)
	if err != nil {
		return provision.Snapshot{}, fmt.Errorf("look up snapshot %q: %w", handle, err)
	}
	return found, nil
}

// ListSnapshots implements csi.ControllerServer.
func (c *Controller) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	if req.GetMaxEntries() < 0 {
		return nil, fault.Field("max_entries", "%d is negative", req.GetMaxEntries())
	}
	if handle := req.GetSnapshotId(); handle != "" {
		found, err := c.snapshot(ctx, handle, req.GetSecrets())
		switch {
		case fault.Is(err, fault.NotFound), err == nil && req.GetSourceVolumeId() != "" && req.GetSourceVolumeId() != found.Source:
			return &csi.ListSnapshotsResponse{}, nil
		case err != nil:
			return nil, err
		}
		return &csi.ListSnapshotsResponse{Entries: []*csi.ListSnapshotsResponse_Entry{{Snapshot: snapshotMessage(found)}}}, nil
	}
	q := provision.ListSnapshotsRequest{Source: req.GetSourceVolumeId(), Max: int(req.GetMaxEntries()), Token: req.GetStartingToken()}
	var err error
	if q.Secret, _, err = readSecret(req.GetSecrets()); err != nil {
		return nil, err
	}
	list, next, err := c.snapshots.ListSnapshots(ctx, q)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	resp := &csi.ListSnapshotsResponse{NextToken: next}
	for _, s := range list {
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshotMessage(s)})
	}
	return resp, nil
}

func snapshotMessage(s provision.Snapshot) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: s.ID.String(), SourceVolumeId: s.Source, SizeBytes: s.Bytes, CreationTime: timestamppb.New(s.Cut), ReadyToUse: s.Ready}
}

// contentOf returns where the content of a new volume comes from.
func contentOf(source *csi.VolumeContentSource) (c volume.Content, err error) {
	switch {
	case source == nil:
		return c, nil
	case source.GetSnapshot() != nil:
		handle := source.GetSnapshot().GetSnapshotId()
		if err := checkID("snapshot_id", handle); err != nil {
			return c, fmt.Errorf("volume_content_source.snapshot: %w", err)
		}
		if c.Snapshot, err = volume.ParseSnapshotID(handle); err != nil {
			return c, fault.Errorf(fault.NotFound, "volume_content_source.snapshot: snapshot %q does not exist: %w", handle, err)
		}
	case source.GetVolume() != nil:
		handle := source.GetVolume().GetVolumeId()
		if err := checkVolumeID(handle); err != nil {
			return c, fmt.Errorf("volume_content_source.volume: %w", err)
		}
		if c.Volume, err = volume.ParseID(handle); err != nil {
			return c, fault.Errorf(fault.NotFound, "volume_content_source.volume: %q is not a volume that this driver created: %w", handle, err)
		}
	default:
		return c, fault.Field("volume_content_source", "has an unknown type")
	}
	return c, nil
}
