package driver

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Limits of the CSI specification ("Size Limits"). For paths it allows those of the operating system.
const (
	maxString = 128
	maxMap    = 4 << 10
	maxFlags  = 4 << 10
	maxPath   = 4095 // PATH_MAX without its terminating zero
)

const (
	// metadataPrefix is the prefix of the keys that kubelet and the provisioner add to contexts and secrets.
	metadataPrefix = "csi.storage.k8s.io/"
	ephemeralKey   = metadataPrefix + "ephemeral"
	tokensKey      = metadataPrefix + "serviceAccount.tokens"
)

func checkVolumeID(id string) error { return checkID("volume_id", id) }

func checkID(field, id string) error {
	if id == "" {
		return fault.Field(field, "is missing")
	}
	if len(id) > maxString {
		return fault.Field(field, "has %d bytes, the maximum is %d", len(id), maxString)
	}
	return nil
}

// checkMap checks the size of a map. Service account tokens do not count, because kubelet adds them to a map that was within the limit,
// one for each of tokenRequests.
func checkMap(field string, m map[string]string) error {
	size := 0
	for key, value := range m {
		if key != tokensKey {
			size += len(key) + len(value)
		}
	}
	if size > maxMap {
		return fault.Field(field, "has %d bytes, the maximum is %d", size, maxMap)
	}
	return nil
}

// cleanPath validates a path of a request and returns it in canonical form.
func cleanPath(field, path string) (string, error) {
	switch {
	case path == "":
		return "", fault.Field(field, "is missing")
	case len(path) > maxPath:
		return "", fault.Field(field, "has %d bytes, the maximum is %d", len(path), maxPath)
	case !filepath.IsAbs(path):
		return "", fault.Field(field, "%q is not an absolute path", path)
	case strings.ContainsRune(path, 0):
		return "", fault.Field(field, "%q contains a zero byte", path)
	case slices.Contains(strings.Split(path, "/"), ".."):
		return "", fault.Field(field, `%q contains ".."`, path)
	case filepath.Clean(path) == "/":
		return "", fault.Field(field, "%q is the root directory", path)
	}
	return filepath.Clean(path), nil
}

// checkCapabilities checks a list of capabilities, which must not be empty.
func checkCapabilities(capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return fault.Field("volume_capabilities", "are missing")
	}
	for i, c := range capabilities {
		field := fmt.Sprintf("volume_capabilities[%d]", i)
		if err := checkMountCapability(field, c); err != nil {
			return err
		}
	}
	return nil
}

// checkMountCapability is checkCapability for what must be a mount volume.
func checkMountCapability(field string, c *csi.VolumeCapability) error {
	if err := checkCapability(field, c); err != nil {
		return err
	}
	if c.GetBlock() != nil {
		return fault.Field(field+".block", "block volumes are not supported: use a mount volume (in Kubernetes: volumeMode: Filesystem)")
	}
	return nil
}

// checkCapability checks that a capability is well-formed, which includes block volumes. fs_type is accepted and ignored, because
// PersistentVolumes of other drivers have various values.
func checkCapability(field string, c *csi.VolumeCapability) error {
	switch {
	case c == nil:
		return fault.Field(field, "is missing")
	case c.GetAccessType() == nil:
		return fault.Field(field+".access_type", "is missing: must be mount")
	case c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN:
		return fault.Field(field+".access_mode", "is missing")
	}
	if _, known := csi.VolumeCapability_AccessMode_Mode_name[int32(c.GetAccessMode().GetMode())]; !known {
		return fault.Field(field+".access_mode", "%d is an unknown access mode", c.GetAccessMode().GetMode())
	}
	m := c.GetMount()
	size := 0
	for _, flag := range m.GetMountFlags() {
		size += len(flag)
	}
	if size > maxFlags {
		return fault.Field(field+".mount.mount_flags", "have %d bytes in total, the maximum is %d", size, maxFlags)
	}
	for name, value := range map[string]string{"fs_type": m.GetFsType(), "volume_mount_group": m.GetVolumeMountGroup()} {
		if len(value) > maxString {
			return fault.Field(field+".mount."+name, "has %d bytes, the maximum is %d", len(value), maxString)
		}
	}
	return nil
}

// capacityOf returns the required capacity in bytes, or 0 if there is none. S3 has no capacity limit, so any size is accepted.
func capacityOf(r *csi.CapacityRange) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0:
		return 0, fault.Field("capacity_range.required_bytes", "%d is negative", required)
	case limit < 0:
		return 0, fault.Field("capacity_range.limit_bytes", "%d is negative", limit)
	case limit > 0 && required > limit:
		return 0, fault.Field("capacity_range", "required_bytes %d is more than limit_bytes %d", required, limit)
	}
	return required, nil
}

// readSecret returns the keys and the role in a request's secrets, and what they claim about the service; without secrets, none. kubelet's
// tokens are no secret. A secret without keys, and an unknown key, are errors: a misspelt one must not make the driver use other credentials,
// or those of another role. On the wire an empty secret is the same as none.
func readSecret(secrets map[string]string) (s provision.Secret, claims []volume.Claim, err error) {
	if err := checkMap("secrets", secrets); err != nil {
		return s, nil, err
	}
	keys, ok, err := credentials.FromSecret(secrets)
	if err != nil {
		return s, nil, err
	}
	known := volume.SecretKeys()
	var names, unknown []string
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		if name != tokensKey {
			names = append(names, name)
		}
		if name != tokensKey && !slices.Contains(known, name) {
			unknown = append(unknown, name)
		}
	}
	switch {
	case !ok && len(names) > 0:
		have := "have neither %s nor %s, only %s: correct the keys of the secret"
		if slices.Contains(names, credentials.SecretAccessKeyID) {
			have = "have no values of %s and %s (keys: %s): correct the values of the secret"
		}
		return s, nil, fault.Field("secrets", have, credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey, strings.Join(names, ", "))
	case len(unknown) > 0:
		return s, nil, fault.Field("secrets."+unknown[0], "is not a key of a secret (unknown: %s; known: %s): correct or remove it", strings.Join(unknown, ", "),
			strings.Join(known, ", "))
	}
	role, err := credentials.RoleFromSecret(secrets)
	return provision.Secret{Keys: keys, RoleARN: role}, volume.SecretClaims(secrets), err
}
