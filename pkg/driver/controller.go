package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Provisioner creates, changes, finds and deletes volumes, as *provision.Provisioner describes. Its errors have fault kinds.
type Provisioner interface {
	// Create returns fault.Exists for a volume of that name from another request. A retry of Delete joins the running deletion.
	Create(ctx context.Context, r provision.CreateRequest) (volume.ID, error)
	Delete(ctx context.Context, r provision.DeleteRequest) error
	// Lookup finds a volume that the driver created, LookupPlace one whose bucket exists and, for a prefix, has an object below it.
	Lookup(ctx context.Context, r provision.LookupRequest) error
	LookupPlace(ctx context.Context, r provision.LookupRequest) error
	Modify(ctx context.Context, r provision.ModifyRequest) (capacity int64, err error)
	// CanList reports whether the controller has credentials of its own for every backend, with which List and Get work.
	CanList() bool
	List(ctx context.Context, limit int, token string) (page []provision.Volume, next string, err error)
	Get(ctx context.Context, id volume.ID) (provision.Volume, error)
}

// claimNamespaceKey is the parameter in which external-provisioner passes the claim's namespace, with --extra-create-metadata.
const claimNamespaceKey = metadataPrefix + "pvc/namespace"

// Backends returns the configured S3 services.
type Backends interface {
	// Backend returns fault.Precondition for a name that is not configured.
	Backend(name string) (backend.Backend, error)
	// CheckClaims returns fault.Precondition if the backend of that name contradicts the claims in a volume's parameters.
	CheckClaims(name string, claims []volume.Claim) error
	client.Source
}

// Publications are those of a node.
type Publications interface {
	// PublishedAt returns a target at which the node has the volume published, or is still storing its data; "": there is none.
	PublishedAt(ctx context.Context, volumeID string) (target string, err error)
}

// Controller is the CSI Controller service. It has no capabilities for capacity and attachment, because S3 volumes need neither.
type Controller struct {
	csi.UnimplementedControllerServer
	VolumeHealth bool         // offers the alpha RPCs of volume health
	DriverName   string       // the driver's; static volumes are read by it, see volume.Given
	InUse        Publications // the node that this process also serves; nil: none
	volumes      Provisioner
	snapshots    Snapshots
	backends     Backends
	names        conc.Locks
}

// NewController returns the service.
func NewController(volumes Provisioner, snapshots Snapshots, backends Backends) *Controller {
	return &Controller{volumes: volumes, snapshots: snapshots, backends: backends}
}

// ControllerGetCapabilities implements csi.ControllerServer.
func (c *Controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range append(append(c.listCapabilities(), c.healthCapabilities()...),
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
	) {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

// CreateVolume implements csi.ControllerServer.
func (c *Controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	v, err := c.parseCreate(req)
	if err != nil {
		return nil, err
	}
	release, ok := c.names.TryLock(v.Name)
	if !ok {
		return nil, fault.Errorf(fault.Busy, "volume %q: an earlier request to create it is still in progress", v.Name)
	}
	defer release()
	if len(v.Parameters.Ignored) > 0 {
		klog.FromContext(ctx).Info("Ignoring parameters of another driver", "ignored", v.Parameters.Ignored)
	}
	id, err := c.volumes.Create(ctx, v)
	if err != nil {
		return nil, fmt.Errorf("create volume %q: %w", v.Name, err)
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId:      id.String(),
		CapacityBytes: v.Parameters.CapacityBytes,
		VolumeContext: v.Parameters.Context(),
		ContentSource: req.GetVolumeContentSource(),
	}}, nil
}

func (c *Controller) parseCreate(req *csi.CreateVolumeRequest) (provision.CreateRequest, error) {
	v := provision.CreateRequest{Name: req.GetName(), Namespace: req.GetParameters()[claimNamespaceKey]}
	_, mutableErr := mutableOf(req.GetMutableParameters())
	capacity, err := capacityOf(req.GetCapacityRange())
	if err = cmp.Or(checkCapabilities(req.GetVolumeCapabilities()), checkMap("parameters", req.GetParameters()), mutableErr, err); err != nil {
		return v, err
	}
	if v.Parameters, err = volume.ParseParameters(withMutable(req.GetParameters(), req.GetMutableParameters()), v.Name); err != nil {
		return v, err
	}
	v.Parameters.CapacityBytes = capacity
	if v.Parameters.Content, err = contentOf(req.GetVolumeContentSource()); err != nil {
		return v, err
	}
	if err := v.Parameters.ApplyAccess(); err != nil {
		return v, err
	}
	if v.Parameters.Node.Snapshot != "" {
		for i, capability := range req.GetVolumeCapabilities() {
			if !readOnlyMode(capability) {
				return v, fault.Field(fmt.Sprintf("volume_capabilities[%d].access_mode", i), "must be read-only (in Kubernetes: ReadOnlyMany), because the volume is a "+
					"snapshot (snapshotAccess: direct)")
			}
		}
	}
	if err := c.backends.CheckClaims(v.Parameters.Backend, v.Parameters.Claims); err != nil {
		return v, err
	}
	if v.Options, err = c.clientOptions(volume.ID{Backend: v.Parameters.Backend, Prefix: v.Parameters.VolumePrefix(v.Name, 1)}, v.Parameters.Node,
		req.GetVolumeCapabilities()); err != nil {
		return v, err
	}
	secret, err := c.secret(v.Parameters.Backend, req.GetSecrets())
	v.Keys, v.RoleARN = secret.Keys, secret.RoleARN
	return v, err
}

// clientOf returns the client that a volume names, or its backend's default; nil: each node chooses it. An unknown backend has none: the
// error comes when the volume is looked up there. place is that of the volume's client in errors.
func (c *Controller) clientOf(backendName, name, place string) (*client.Client, error) {
	if be, err := c.backends.Backend(backendName); err == nil {
		name = cmp.Or(name, be.DefaultClient)
	}
	if name == "" {
		return nil, nil //nolint:nilnil // unknown here
	}
	named, err := c.backends.Clients().Get(name)
	if err != nil {
		return nil, fault.Field(place, "%w", err)
	}
	return &named, nil
}

// clientOptions returns the volume's mount options, of attributes and capabilities. It rejects options that would fail on every node. If each
// node chooses the client, it checks only the syntax.
func (c *Controller) clientOptions(place volume.ID, a volume.Attributes, capabilities []*csi.VolumeCapability) ([]volume.Option, error) {
	named, err := c.clientOf(place.Backend, a.Client, "parameters.client")
	if err != nil {
		return nil, err
	}
	all := slices.Clone(a.MountOptions)
	for i, capability := range capabilities {
		field := fmt.Sprintf("volume_capabilities[%d].mount.mount_flags", i)
		flags, _, err := splitSELinux(capability.GetMount().GetMountFlags(), field)
		if err != nil {
			return nil, err
		}
		options, err := volume.ParseMountOptions(flags, field)
		if err != nil {
			return nil, err
		}
		for _, o := range options {
			if slices.ContainsFunc(a.MountOptions, func(other volume.Option) bool { return other.Name == o.Name }) {
				return nil, fault.Field(field, "contain %s, which is also in the volume's mountOptions; remove one of them", o.Name)
			}
		}
		all = append(all, options...)
		if named == nil {
			continue
		}
		given := []client.Given{{Field: "parameters.mountOptions", Options: a.MountOptions}, {Field: field, Options: options}}
		if err := named.CheckVolume(client.Volume{Place: "parameters", Prefix: place.Prefix, Attributes: a, Options: given}); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// DeleteVolume implements csi.ControllerServer. A handle that is not a volume id of this driver is a volume that does not exist, which is
// success. It is an error if the handle may be from another S3 driver, because the volume may have data, and if the volume is in use on this
// process's own node. That does not protect volumes that are in use elsewhere.
func (c *Controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	handle := req.GetVolumeId()
	if err := checkVolumeID(handle); err != nil {
		return nil, err
	}
	id, err := volume.ParseID(handle)
	if err != nil {
		if volume.LooksForeign(handle) {
			return nil, fault.Errorf(fault.Precondition, "delete volume %q: not a volume id of this driver, possibly of another S3 driver, so nothing is deleted: "+
				"delete the data by hand if it is unused, then remove the volume without deleting it (in Kubernetes: delete the PersistentVolume)", handle)
		}
		return &csi.DeleteVolumeResponse{}, nil
	}
	if c.InUse != nil {
		target, err := c.InUse.PublishedAt(ctx, handle)
		if err == nil && target != "" {
			err = fault.Errorf(fault.Precondition, "it is in use on this node, at %s: stop what uses it first", target)
		}
		if err != nil {
			return nil, fmt.Errorf("delete volume %q: %w", handle, err)
		}
	}
	secret, err := c.secret(id.Backend, req.GetSecrets())
	if err != nil {
		return nil, fmt.Errorf("delete volume %q: %w", handle, err)
	}
	if err := c.volumes.Delete(ctx, about(id, secret)); err != nil {
		return nil, fmt.Errorf("delete volume %q: %w", handle, err)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (c *Controller) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse,
	error) {
	handle := req.GetVolumeId()
	if err := checkVolumeID(handle); err != nil {
		return nil, err
	}
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, fault.Field("volume_capabilities", "are missing")
	}
	for i, wanted := range req.GetVolumeCapabilities() {
		if err := checkCapability(fmt.Sprintf("volume_capabilities[%d]", i), wanted); err != nil {
			return nil, err
		}
	}
	if err := cmp.Or(checkMap("volume_context", req.GetVolumeContext()), checkMap("parameters", req.GetParameters())); err != nil {
		return nil, err
	}
	r, unreadable := c.read(req)
	id, err := volume.ParseID(handle)
	switch {
	case err == nil:
		err = c.lookup(ctx, id, req.GetSecrets())
	case unreadable == nil:
		err = c.lookupStatic(ctx, r.ID, req.GetSecrets())
	case namesNoPlace(unreadable):
		err = fault.Errorf(fault.NotFound, "not a volume id of this driver, and no bucket is named: %w", unreadable)
	default:
		err = nil // the place is not known, and the response says why
	}
	if err != nil {
		return nil, fmt.Errorf("look up volume %q: %w", handle, err)
	}
	if err := errors.Join(unreadable, c.unsupported(req)); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil //nolint:nilerr // the response has it
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
		MutableParameters:  req.GetMutableParameters(),
	}}, nil
}

// read reads the volume as publications with the capabilities would, and checks the options for its client.
func (c *Controller) read(req *csi.ValidateVolumeCapabilitiesRequest) (r volume.Reading, err error) {
	_, ownErr := volume.ParseID(req.GetVolumeId())
	for i, capability := range req.GetVolumeCapabilities() {
		field := fmt.Sprintf("volume_capabilities[%d].mount.mount_flags", i)
		flags, _, err := splitSELinux(capability.GetMount().GetMountFlags(), field)
		if err != nil {
			return r, err
		}
		r, err = volume.Read(volume.Given{
			Handle: req.GetVolumeId(), Context: req.GetVolumeContext(), Flags: flags, FlagsField: field, DriverName: c.DriverName,
		})
		if err != nil {
			return r, err
		}
		if err := c.backends.CheckClaims(r.ID.Backend, r.Claims); err != nil {
			return r, err
		}
		if ownErr != nil { // flags of a static volume are options only after their conversion
			if err := c.checkOptions(r, field); err != nil {
				return r, err
			}
		}
	}
	if ownErr == nil {
		_, err = c.clientOptions(r.ID, r.Attributes, req.GetVolumeCapabilities())
	}
	return r, err
}

// checkOptions checks a static volume's options if its client is known.
func (c *Controller) checkOptions(r volume.Reading, field string) error {
	named, err := c.clientOf(r.ID.Backend, r.Attributes.Client, "volume_context.client")
	if err != nil || named == nil {
		return err
	}
	return named.CheckVolume(client.Volume{Place: "volume_context", Prefix: r.ID.Prefix, Attributes: r.Attributes,
		Options: []client.Given{{Field: field, Options: r.Options}}})
}

// namesNoPlace reports whether an error of volume.Read means that neither the handle nor the context names a bucket.
func namesNoPlace(err error) bool {
	f := (*fault.Error)(nil)
	return errors.As(err, &f) && (f.Field == "volume_id" || f.Field == "volume_context.bucketName")
}

// lookup finds a volume by its id: one that the driver created, or one whose data is there without a record, such as a retained one.
func (c *Controller) lookup(ctx context.Context, id volume.ID, secrets map[string]string) error {
	secret, err := c.secret(id.Backend, secrets)
	if err != nil {
		return err
	}
	if err := c.volumes.Lookup(ctx, about(id, secret)); !fault.Is(err, fault.NotFound) {
		return err
	}
	return c.volumes.LookupPlace(ctx, about(id, secret))
}

// lookupStatic looks for the bucket of a static volume. Nodes may have other credentials for it than the controller, so a refusal of the
// service says nothing about the volume.
func (c *Controller) lookupStatic(ctx context.Context, id volume.ID, secrets map[string]string) error {
	b, secret, err := c.readSecret(id.Backend, secrets)
	if err != nil {
		return err
	}
	if b.ControllerCredentials != credentials.SourceSecret {
		secret = provision.Secret{} // the request's are those of publications
	}
	err = c.volumes.LookupPlace(ctx, about(volume.ID{Backend: id.Backend, Bucket: id.Bucket}, secret))
	if kind := fault.KindOf(err); kind == fault.Denied || kind == fault.Unauthenticated || kind == fault.Precondition {
		klog.FromContext(ctx).Info("Controller cannot see the bucket", "bucket", id.Bucket, "reason", err)
		return nil
	}
	return err
}

// unsupported returns why the driver does not support a well-formed request, or nil if it does. It does not check the volume itself.
func (c *Controller) unsupported(req *csi.ValidateVolumeCapabilitiesRequest) error {
	if _, err := mutableOf(req.GetMutableParameters()); err != nil {
		return err
	}
	if len(req.GetParameters()) > 0 {
		// Any name will do, because the check does not depend on it.
		if _, err := volume.ParseParameters(withMutable(req.GetParameters(), req.GetMutableParameters()), "volume"); err != nil {
			return err
		}
	}
	return checkCapabilities(req.GetVolumeCapabilities())
}

// about returns the request to look a volume up, or to delete it.
func about(id volume.ID, secret provision.Secret) provision.DeleteRequest {
	return provision.DeleteRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN}
}

// readSecret returns a backend and what a request's secrets hold, which must not contradict it.
func (c *Controller) readSecret(backendName string, secrets map[string]string) (b backend.Backend, secret provision.Secret, err error) {
	if b, err = c.backends.Backend(backendName); err != nil {
		return b, secret, err
	}
	secret, claims, err := readSecret(secrets)
	if err == nil {
		err = c.backends.CheckClaims(b.Name, claims)
	}
	return b, secret, err
}

// secret returns the controller's credentials for a backend. The backend's configuration decides about the source, not whether a secret is present.
func (c *Controller) secret(backendName string, secrets map[string]string) (provision.Secret, error) {
	b, secret, err := c.readSecret(backendName, secrets)
	if err != nil {
		return provision.Secret{}, err
	}
	ok := !secret.Keys.IsZero()
	if ok && b.ControllerCredentials != credentials.SourceSecret {
		return provision.Secret{}, fault.Field("secrets", "hold S3 keys, but backend %q uses the driver's own credentials: "+
			"set controllerCredentials: secret for it in the driver's config file, or remove the secret from the volume (in Kubernetes: the provisioner secret of "+
			"the StorageClass)", b.Name)
	}
	if !ok && b.ControllerCredentials == credentials.SourceSecret {
		return provision.Secret{}, fault.Errorf(fault.Precondition, "backend %[1]q takes the controller's credentials from the request's secret, "+
			"but the request has none: give the volume a secret with %[2]s and %[3]s (in Kubernetes: csi.storage.k8s.io/provisioner-secret-name "+
			"and -namespace of the StorageClass; for a deletion, the secret in the PersistentVolume's annotation "+
			"volume.kubernetes.io/provisioner-deletion-secret-name may have been deleted: create it again)",
			b.Name, credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey)
	}
	return secret, nil
}
