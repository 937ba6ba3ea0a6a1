package driver

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Publication is a NodePublishVolumeRequest, parsed.
type Publication struct {
	VolumeID       string
	Target         string             // target_path, clean and absolute
	Volume         volume.ID          // where the data is
	Attributes     volume.Attributes  // from the volume context
	Options        []volume.Option    // of the context, then of the capability
	ReadOnly       bool               // this publication is read-only
	SingleWriter   bool               // at most one publication of this volume on the node
	MountGroup     *uint32            // VOLUME_MOUNT_GROUP
	SELinuxContext string             // for mount(2)
	Source         string             // credentials.Source…
	Keys           credentials.Keys   // of SourceSecret
	SecretRoleARN  string             // the role that the secret names; "": none
	Tokens         credentials.Tokens // of SourceWorkload
	PodNamespace   string             // of the pod that it is for; "": not told
	ServiceAccount string             // of that pod; "": not told
	Ephemeral      bool               // an inline volume of the pod, which never gets the driver's own credentials
	Identity       string             // for people: "driver", "secret:<access key id>", "workload:<namespace>/<service account>"
}

const capabilityField = "volume_capability"

// parsePublish checks a request and reads all of it; it touches nothing.
func parsePublish(req *csi.NodePublishVolumeRequest) (p Publication, err error) {
	p.VolumeID = req.GetVolumeId()
	if err := checkVolumeID(p.VolumeID); err != nil {
		return p, err
	}
	if p.Target, err = cleanPath("target_path", req.GetTargetPath()); err != nil {
		return p, err
	}
	c := req.GetVolumeCapability()
	if err := checkCapability(capabilityField, c); err != nil {
		return p, err
	}
	if c.GetBlock() != nil {
		return p, errBlock(capabilityField)
	}
	if err := checkMap("volume_context", req.GetVolumeContext()); err != nil {
		return p, err
	}
	if p.Ephemeral = req.GetVolumeContext()[ephemeralKey] == "true" || inlineHandle(p.VolumeID); p.Ephemeral {
		return p, fault.Errorf(fault.Precondition, "inline volumes of pods are not enabled in this driver: use a PersistentVolumeClaim")
	}
	if p.Volume, p.Attributes, err = volume.ParseContext(p.VolumeID, req.GetVolumeContext()); err != nil {
		return p, err
	}
	if err := p.readCapability(c, req.GetReadonly()); err != nil {
		return p, err
	}
	if err := p.readPod(req.GetVolumeContext()); err != nil {
		return p, err
	}
	return p, p.readCredentials(req.GetSecrets(), req.GetVolumeContext())
}

// inlineHandle tells the handles that kubelet makes for inline volumes: "csi-" and the hash of pod and volume. It says what they are
// in the context, too, but only with podInfoOnMount, and without that the rest of the context is the pod's author's.
func inlineHandle(handle string) bool {
	hash, ok := strings.CutPrefix(handle, "csi-")
	return ok && len(hash) == 64 && strings.Trim(hash, "0123456789abcdef") == ""
}

func (p *Publication) readCapability(c *csi.VolumeCapability, readOnly bool) error {
	mode := c.GetAccessMode().GetMode()
	p.ReadOnly = readOnly ||
		mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	p.SingleWriter = mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER

	field := capabilityField + ".mount.mount_flags"
	flags, selinux, err := splitSELinux(c.GetMount().GetMountFlags(), field)
	if err != nil {
		return err
	}
	p.SELinuxContext = selinux
	options, err := volume.ParseMountOptions(flags, field)
	if err != nil {
		return err
	}
	p.Options = slices.Concat(p.Attributes.MountOptions, options)
	if group := c.GetMount().GetVolumeMountGroup(); group != "" {
		gid, err := strconv.ParseUint(group, 10, 32)
		if err != nil || gid == 1<<32-1 {
			return fault.Field(capabilityField+".mount.volume_mount_group", "%q is not a group id", group)
		}
		id := uint32(gid)
		p.MountGroup = &id
	}
	return nil
}

// splitSELinux takes "context=…" out of mount flags. kubelet writes its value in double quotes, because a label's level
// may hold a comma.
func splitSELinux(flags []string, field string) (rest []string, context string, err error) {
	for _, flag := range flags {
		value, ok := strings.CutPrefix(flag, "context=")
		if !ok {
			rest = append(rest, flag)
			continue
		}
		if context != "" {
			return nil, "", fault.Field(field, "hold two SELinux contexts")
		}
		if len(value) >= 2 && value[0] == '"' && value[len(value)-1] == '"' {
			value = value[1 : len(value)-1]
		}
		if !isSELinuxContext(value) {
			return nil, "", fault.Field(field, "%q is not an SELinux context of the form user:role:type[:level]", value)
		}
		context = value
	}
	return rest, context, nil
}

func isSELinuxContext(s string) bool {
	parts := strings.SplitN(s, ":", 4)
	if len(parts) < 3 || len(s) > 255 {
		return false
	}
	for i, part := range parts {
		if part == "" || checkAlphabet(part, map[bool]string{false: "_.-", true: "_.-:,"}[i == 3]) != nil {
			return false
		}
	}
	return true
}

// readCredentials decides whose credentials the mount gets. A volume that does not say takes the keys that it is given,
// and the driver's where it is given none. Tokens of a service account are read for volumes that say workload, and for no
// others.
func (p *Publication) readCredentials(secrets, context map[string]string) error {
	own := maps.Clone(secrets)
	maps.DeleteFunc(own, func(key, _ string) bool { return strings.HasPrefix(key, metadataPrefix) })
	keys, ok, err := requestKeys(own)
	if err != nil {
		return err
	}
	role, err := credentials.RoleFromSecret(own)
	if err != nil {
		return err
	}
	switch wanted := p.Attributes.Credentials; {
	case (wanted == credentials.SourceDriver || wanted == credentials.SourceWorkload) && ok:
		return fault.Field("secrets", "hold S3 keys, but the volume says credentials: %s: take nodePublishSecretRef out of the volume, or say credentials: secret", wanted)
	case wanted == credentials.SourceSecret && !ok:
		return fault.Errorf(fault.Precondition, "the volume says credentials: secret, and the request has no secret: name one with %s and %s in the PersistentVolume's nodePublishSecretRef "+
			"(StorageClass: csi.storage.k8s.io/node-publish-secret-name and -namespace)", credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey)
	case wanted == credentials.SourceWorkload:
		return p.readWorkload(secrets, context)
	case ok:
		p.Source, p.Keys, p.SecretRoleARN = credentials.SourceSecret, keys, role
		p.Identity = credentials.SourceSecret + ":" + keys.AccessKeyID
	default:
		p.Source, p.Identity = credentials.SourceDriver, credentials.SourceDriver
	}
	return nil
}
