package driver

import (
	"cmp"
	"regexp"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	capabilityField   = "volume_capability"
	maxSELinuxContext = 255
)

// parsePublish validates and parses a request. It has no side effects. inline is whether inline volumes are allowed.
func parsePublish(driverName string, inline bool, req *csi.NodePublishVolumeRequest) (mount.Request, error) {
	var p publication
	err := p.parse(driverName, inline, req)
	return mount.Request(p), err
}

// publication is a NodePublishVolumeRequest while it is parsed.
type publication mount.Request

func (p *publication) parse(driverName string, inline bool, req *csi.NodePublishVolumeRequest) (err error) {
	p.VolumeID = req.GetVolumeId()
	if p.Target, err = checkPublish(req); err != nil {
		return err
	}
	c := req.GetVolumeCapability()
	if p.Ephemeral = isInline(p.VolumeID, req.GetVolumeContext()); p.Ephemeral {
		if !inline {
			return errInlineDisabled()
		}
		if err := checkInline(p.Target, req.GetVolumeContext()); err != nil {
			return err
		}
	}
	flags, err := p.readCapability(c, req.GetReadonly())
	if err != nil {
		return err
	}
	if err := p.readVolume(driverName, req.GetVolumeContext(), flags); err != nil {
		return err
	}
	// With a read-only access mode the file system itself must be read-only: kubelet does not pass the mode to the container runtime,
	// and a runtime that makes a writable bind mount (runc from 1.2 on) clears the read-only flag of the target. An inline volume has
	// only one user, so readOnly applies to the whole volume and its session needs no write permission.
	if readOnlyMode(c) || p.Ephemeral && req.GetReadonly() {
		p.Attributes.ReadOnly = true
	}
	if err := p.readPod(req.GetVolumeContext()); err != nil {
		return err
	}
	return p.readCredentials(req.GetSecrets(), req.GetVolumeContext())
}

// checkPublish checks what all publications have in common. The target is set if the request has a valid one.
func checkPublish(req *csi.NodePublishVolumeRequest) (target string, err error) {
	target, err = cleanPath("target_path", req.GetTargetPath())
	if err := cmp.Or(checkVolumeID(req.GetVolumeId()), err); err != nil {
		return "", err
	}
	return target, cmp.Or(checkMountCapability(capabilityField, req.GetVolumeCapability()), checkMap("volume_context", req.GetVolumeContext()))
}

// flagsField is the name of the mount flags in errors.
const flagsField = capabilityField + ".mount.mount_flags"

// readVolume parses the volume's handle, context and mount flags.
func (p *publication) readVolume(driverName string, context map[string]string, flags []string) error {
	r, err := volume.Read(volume.Given{Handle: p.VolumeID, Context: context, Flags: flags, FlagsField: flagsField, DriverName: driverName})
	if err != nil {
		return err
	}
	p.Volume, p.Attributes, p.Options, p.Claims, p.Ignored = r.ID, r.Attributes, r.Options, r.Claims, r.Ignored
	return nil
}

// readCapability parses a capability. It returns the mount flags that are options of the volume.
func (p *publication) readCapability(c *csi.VolumeCapability, readOnly bool) (flags []string, err error) {
	p.ReadOnly = readOnly || readOnlyMode(c)
	p.SingleWriter = c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER

	if flags, p.SELinuxContext, err = splitSELinux(c.GetMount().GetMountFlags(), flagsField); err != nil {
		return nil, err
	}
	if group := c.GetMount().GetVolumeMountGroup(); group != "" {
		if p.MountGroup, err = volume.ParseOwner(group, capabilityField+".mount.volume_mount_group"); err != nil {
			return nil, err
		}
	}
	return flags, nil
}

// readOnlyMode reports whether an access mode only allows reading.
func readOnlyMode(c *csi.VolumeCapability) bool {
	mode := c.GetAccessMode().GetMode()
	return mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY || mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
}

// splitSELinux separates "context=…" from the other mount flags. kubelet puts its value in double quotes, because the level of a label may
// contain a comma.
func splitSELinux(flags []string, field string) (rest []string, context string, err error) {
	for _, flag := range flags {
		value, ok := strings.CutPrefix(flag, "context=")
		if !ok {
			rest = append(rest, flag)
			continue
		}
		if context != "" {
			return nil, "", fault.Field(field, "contain two SELinux contexts")
		}
		if len(value) >= 2 && value[0] == '"' && value[len(value)-1] == '"' {
			value = value[1 : len(value)-1]
		}
		if len(value) > maxSELinuxContext || !selinuxContext.MatchString(value) {
			return nil, "", fault.Field(field, "%q is not an SELinux context of the form user:role:type[:level]", value)
		}
		context = value
	}
	return rest, context, nil
}

// selinuxContext matches user:role:type[:level].
var selinuxContext = regexp.MustCompile(`^([A-Za-z0-9_.-]+:){2}[A-Za-z0-9_.-]+(:[A-Za-z0-9_.:,-]+)?$`)

// readCredentials determines the source of the mount's credentials. Without credentials in the volume, it is the secret if the request has
// one, otherwise the pod for inline volumes and the driver for others. Service account tokens are read only for source workload.
func (p *publication) readCredentials(secrets, context map[string]string) error {
	secret, claims, err := readSecret(secrets)
	if err != nil {
		return err
	}
	p.Claims = append(p.Claims, claims...)
	ok := !secret.Keys.IsZero()
	wanted := p.Attributes.Credentials
	if p.Ephemeral {
		if wanted, err = inlineSource(wanted, ok); err != nil {
			return err
		}
	}
	switch {
	case (wanted == credentials.SourceDriver || wanted == credentials.SourceWorkload) && ok:
		return fault.Field("secrets", "hold S3 keys, but the volume has credentials: %s: remove the secret from the volume (in Kubernetes: "+
			"nodePublishSecretRef), or set credentials: secret", wanted)
	case wanted == credentials.SourceSecret && !ok:
		return fault.See(credentials.Page, fault.Errorf(fault.Precondition, "the volume has credentials: secret, but the request has no secret: give the volume "+
			"one with %s and %s "+
			"(in Kubernetes: nodePublishSecretRef of the PersistentVolume or the pod's volume, or csi.storage.k8s.io/node-publish-secret-name and -namespace of "+
			"the StorageClass)", credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey))
	case wanted == credentials.SourceWorkload:
		return fault.SeeElse(credentials.Page, p.readWorkload(secrets, context))
	case ok:
		p.Source, p.Keys, p.SecretRoleARN = credentials.SourceSecret, secret.Keys, secret.RoleARN
		p.Identity = credentials.SourceSecret + ":" + secret.Keys.AccessKeyID
	default:
		p.Source, p.Identity = credentials.SourceDriver, credentials.SourceDriver
	}
	return nil
}
