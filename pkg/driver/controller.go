package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/namedlock"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// NewVolume is a volume to make: a CreateVolumeRequest, parsed.
type NewVolume struct {
	Name       string
	Namespace  string // of the claim, where the CO tells it
	Parameters volume.Parameters
	Secret     Secret
}

// Secret is what a request's secrets hold for the controller's work. The zero value is nothing: it works with the driver's own
// credentials.
type Secret struct {
	Keys    credentials.Keys
	RoleARN string // to take on with the keys; "": none
}

// Provisioner makes volumes and removes them. Its errors carry fault kinds; it does its own joining of retries of Delete.
type Provisioner interface {
	// Create makes a volume, or finds the one that an earlier call with the same request made. Another request's volume
	// under that name is fault.Exists.
	Create(ctx context.Context, v NewVolume) (volume.ID, error)
	// Delete removes a volume; one that is not there is no error.
	Delete(ctx context.Context, id volume.ID, secret Secret) error
	// Lookup is nil for a volume that exists and fault.NotFound for one that does not.
	Lookup(ctx context.Context, id volume.ID, secret Secret) error
}

// claimNamespaceKey is where external-provisioner tells the claim's namespace, with --extra-create-metadata.
const claimNamespaceKey = metadataPrefix + "pvc/namespace"

// Backends knows the S3 services that the operator configured.
type Backends interface {
	// Backend is fault.Precondition for a name that is not configured.
	Backend(name string) (backend.Backend, error)
	// CheckClaims is fault.Precondition where the backend of that name is not what a volume's author says that it is.
	CheckClaims(name string, claims []volume.Claim) error
}

// Controller is the CSI Controller service. It claims what it does and no more: S3 has no capacity to report, nothing to
// attach, and volumes that grow by themselves.
type Controller struct {
	csi.UnimplementedControllerServer
	volumes  Provisioner
	backends Backends
	names    namedlock.Locks
}

// NewController makes the service.
func NewController(volumes Provisioner, backends Backends) (*Controller, error) {
	if volumes == nil || backends == nil {
		return nil, errors.New("the controller service needs a provisioner and the backends")
	}
	return &Controller{volumes: volumes, backends: backends}, nil
}

// ControllerGetCapabilities implements csi.ControllerServer.
func (c *Controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
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
		return nil, fault.Errorf(fault.Busy, "volume %q is being created by an earlier request that has not ended", v.Name)
	}
	defer release()
	if len(v.Parameters.Ignored) > 0 {
		klog.FromContext(ctx).Info("Warning: the StorageClass was written for another driver, and some of it means nothing here and is ignored", "ignored", v.Parameters.Ignored)
	}
	id, err := c.volumes.Create(ctx, v)
	if err != nil {
		return nil, fmt.Errorf("create volume %q: %w", v.Name, err)
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId:      id.String(),
		CapacityBytes: v.Parameters.CapacityBytes,
		VolumeContext: v.Parameters.Context(),
	}}, nil
}

func (c *Controller) parseCreate(req *csi.CreateVolumeRequest) (NewVolume, error) {
	v := NewVolume{Name: req.GetName(), Namespace: req.GetParameters()[claimNamespaceKey]}
	if err := checkName(v.Name); err != nil {
		return v, err
	}
	if err := checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return v, err
	}
	if err := checkMap("parameters", req.GetParameters()); err != nil {
		return v, err
	}
	if req.GetVolumeContentSource() != nil {
		return v, fault.Field("volume_content_source", "is not supported: this driver makes neither snapshots nor clones")
	}
	if len(req.GetMutableParameters()) > 0 {
		return v, fault.Field("mutable_parameters", "are not supported: this driver changes no volume (in Kubernetes: leave out volumeAttributesClassName)")
	}
	capacity, err := capacityOf(req.GetCapacityRange())
	if err != nil {
		return v, err
	}
	if v.Parameters, err = volume.ParseParameters(req.GetParameters(), v.Name); err != nil {
		return v, err
	}
	v.Parameters.CapacityBytes = capacity
	if err := c.backends.CheckClaims(v.Parameters.Backend, v.Parameters.Claims); err != nil {
		return v, err
	}
	if err := checkClientOptions(v.Parameters.Node, req.GetVolumeCapabilities()); err != nil {
		return v, err
	}
	v.Secret, err = c.secret(v.Parameters.Backend, req.GetSecrets())
	return v, err
}

// checkClientOptions finds now what would fail on every node later. Which client serves a volume that names none is the
// nodes' choice, so for such a volume only the form of its options is checked.
func checkClientOptions(a volume.Attributes, capabilities []*csi.VolumeCapability) error {
	var serves *client.Client
	if a.Client != "" {
		named, err := client.Get(a.Client)
		if err != nil {
			return fault.Field("parameters.client", "%w", err)
		}
		serves = &named
		if err := named.Check(a.MountOptions, "parameters.mountOptions"); err != nil {
			return err
		}
		if err := named.CheckOwner(a.UID, a.GID, "parameters"); err != nil {
			return err
		}
		if err := named.CheckLimits(a, a.MountOptions, "parameters"); err != nil {
			return err
		}
	}
	for i, c := range capabilities {
		field := fmt.Sprintf("volume_capabilities[%d].mount.mount_flags", i)
		flags, _, err := splitSELinux(c.GetMount().GetMountFlags(), field)
		if err != nil {
			return err
		}
		options, err := volume.ParseMountOptions(flags, field)
		if err != nil {
			return err
		}
		for _, o := range options {
			if slices.ContainsFunc(a.MountOptions, func(other volume.Option) bool { return other.Name == o.Name }) {
				return fault.Field(field, "give %s, which the volume's own mountOptions give already; remove one", o.Name)
			}
		}
		if serves == nil {
			continue
		}
		if err := serves.Check(options, field); err != nil {
			return err
		}
		if err := serves.CheckLimits(a, slices.Concat(a.MountOptions, options), "parameters"); err != nil {
			return err
		}
	}
	return nil
}

// DeleteVolume implements csi.ControllerServer. A handle that is not a volume id of this driver names a volume that is
// not there, which is success, unless another S3 driver may have issued it: then somebody's data may be behind it.
func (c *Controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	handle := req.GetVolumeId()
	if err := checkVolumeID(handle); err != nil {
		return nil, err
	}
	id, err := volume.ParseID(handle)
	if err != nil {
		if volume.LooksForeign(handle) {
			return nil, fault.Errorf(fault.Precondition, "delete volume %q: this is not a volume id of this driver, and another S3 driver may have issued it, "+
				"so its data is not touched: remove the data by hand if it is to go, then delete the PersistentVolume", handle)
		}
		return &csi.DeleteVolumeResponse{}, nil
	}
	secret, err := c.secret(id.Backend, req.GetSecrets())
	if err != nil {
		return nil, fmt.Errorf("delete volume %q: %w", handle, err)
	}
	if err := c.volumes.Delete(ctx, id, secret); err != nil {
		return nil, fmt.Errorf("delete volume %q: %w", handle, err)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (c *Controller) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
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
	for field, m := range map[string]map[string]string{"volume_context": req.GetVolumeContext(), "parameters": req.GetParameters()} {
		if err := checkMap(field, m); err != nil {
			return nil, err
		}
	}
	id, err := volume.ParseID(handle)
	if err != nil {
		return nil, fault.Errorf(fault.NotFound, "volume %q does not exist: %w", handle, err)
	}
	secret, err := c.secret(id.Backend, req.GetSecrets())
	if err != nil {
		return nil, err
	}
	if err := c.volumes.Lookup(ctx, id, secret); err != nil {
		return nil, fmt.Errorf("look up volume %q: %w", handle, err)
	}
	if why := unsupported(req); why != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: why}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// unsupported is why a well-formed question of ValidateVolumeCapabilities is answered with no; "" is yes.
func unsupported(req *csi.ValidateVolumeCapabilitiesRequest) string {
	_, attributes, err := volume.ParseContext(req.GetVolumeId(), req.GetVolumeContext())
	if err == nil && len(req.GetParameters()) > 0 {
		// Any name does: what parameters mean does not depend on it.
		_, err = volume.ParseParameters(req.GetParameters(), "volume")
	}
	if err == nil && len(req.GetMutableParameters()) > 0 {
		err = fault.Field("mutable_parameters", "are not supported")
	}
	if err == nil {
		err = checkCapabilities(req.GetVolumeCapabilities())
	}
	if err == nil {
		err = checkClientOptions(attributes, req.GetVolumeCapabilities())
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

// secret chooses the credentials for work on a backend: by what its configuration says, never by what happens to be there.
func (c *Controller) secret(backendName string, secrets map[string]string) (Secret, error) {
	b, err := c.backends.Backend(backendName)
	if err != nil {
		return Secret{}, err
	}
	keys, ok, err := requestKeys(secrets)
	if err != nil {
		return Secret{}, err
	}
	if err := c.backends.CheckClaims(b.Name, volume.SecretClaims(secrets)); err != nil {
		return Secret{}, err
	}
	if ok && b.ControllerCredentials != credentials.SourceSecret {
		return Secret{}, fault.Field("secrets", "hold S3 keys, but backend %q works with the controller's own credentials: "+
			"set controllerCredentials: secret for it in the driver's config file, or take the provisioner secret out of the StorageClass", b.Name)
	}
	if !ok && b.ControllerCredentials == credentials.SourceSecret {
		return Secret{}, fault.Errorf(fault.Precondition, "backend %q works with the keys of the request's secret, and the request has none: "+
			"name one in the StorageClass with csi.storage.k8s.io/provisioner-secret-name and -namespace; for a deletion, the secret that the PersistentVolume's annotation "+
			"volume.kubernetes.io/provisioner-deletion-secret-name names may be gone: create it again with %s and %s",
			b.Name, credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey)
	}
	role, err := credentials.RoleFromSecret(secrets)
	if err != nil {
		return Secret{}, err
	}
	return Secret{Keys: keys, RoleARN: role}, nil
}
