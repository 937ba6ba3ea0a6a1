package volume

import (
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Keys that k8s-csi-s3 leaves in the volume contexts of its volumes.
const (
	legacyBucket   = "bucket"
	legacyCapacity = "capacity"
	legacyMounter  = "mounter"
	legacyOptions  = "options"
)

// ignored tells the keys that the container orchestrator adds to a volume context. They say nothing about the volume;
// what of them the driver needs it reads elsewhere.
func ignored(key string) bool {
	return strings.HasPrefix(key, metadataPrefix) || key == "storage.kubernetes.io/csiProvisionerIdentity"
}

// ParseContext reads a volume as a node gets it. The place comes from the handle if it is a volume id of this driver;
// a context that says otherwise is refused. Else it comes from the context (a static volume: bucketName, and prefix,
// backend), or, where that names no bucket, from the handle of k8s-csi-s3. Unknown keys are refused, except those that
// the orchestrator adds. Errors are Invalid and name the field.
func ParseContext(handle string, context map[string]string) (ID, Attributes, error) {
	if err := checkHandle(handle); err != nil {
		return ID{}, Attributes{}, err
	}
	given := maps.Clone(context)
	maps.DeleteFunc(given, func(key, _ string) bool { return ignored(key) })
	if mapSize(given) > maxMap {
		return ID{}, Attributes{}, fault.Field("volume_context", "has more than %d bytes", maxMap)
	}
	id, err := locate(handle, given)
	if err != nil {
		return ID{}, Attributes{}, err
	}
	attributes, err := parseAttributes(given)
	if err != nil {
		return ID{}, Attributes{}, err
	}
	return id, attributes, nil
}

// checkHandle refuses what the CSI specification does not allow in a volume_id.
func checkHandle(handle string) error {
	switch {
	case handle == "":
		return fault.Field("volume_id", "is missing")
	case len(handle) > maxString:
		return fault.Field("volume_id", "has %d bytes, %d at most are allowed", len(handle), maxString)
	case !utf8.ValidString(handle) || strings.ContainsFunc(handle, isBreak):
		return fault.Field("volume_id", "%q holds a control character or is not UTF-8", handle)
	}
	return nil
}

// locate finds the place and takes the keys that it read out of given.
func locate(handle string, given map[string]string) (ID, error) {
	own, err := ParseID(handle)
	switch _, named := given[keyBucketName]; {
	case err == nil:
		return ownPlace(own, given)
	case named:
		return staticPlace(given)
	case strings.Contains(handle, ":"):
		return ID{}, err
	default:
		return legacyPlace(handle, given)
	}
}

// ownPlace holds the context against the volume id, which alone decides.
func ownPlace(id ID, given map[string]string) (ID, error) {
	said := map[string]string{keyBackend: id.Backend, keyBucketName: id.Bucket, keyPrefix: id.Prefix}
	for _, key := range slices.Sorted(maps.Keys(said)) {
		value, ok := given[key]
		if key == keyPrefix {
			value = withSlash(value)
		}
		if ok && value != said[key] {
			return ID{}, fault.Field("volume_context."+key, "%q is not what the volume id %q says (%q); correct it, or give a static volume a handle without \":\"", given[key], id, said[key])
		}
		delete(given, key)
	}
	return id, nil
}

func staticPlace(given map[string]string) (ID, error) {
	id := ID{Backend: DefaultBackend, Bucket: given[keyBucketName], Prefix: withSlash(given[keyPrefix])}
	if backend, ok := given[keyBackend]; ok {
		if err := checkBackendName(backend); err != nil {
			return ID{}, fault.Field("volume_context."+keyBackend, "%w", err)
		}
		id.Backend = backend
	}
	if _, err := bucketKind(id.Bucket); err != nil {
		return ID{}, fault.Field("volume_context."+keyBucketName, "%q %w", id.Bucket, err)
	}
	if id.Prefix != "" {
		if err := checkPrefix(id.Prefix); err != nil {
			return ID{}, fault.Field("volume_context."+keyPrefix, "%q %w", given[keyPrefix], err)
		}
	}
	for _, key := range []string{keyBackend, keyBucketName, keyPrefix} {
		delete(given, key)
	}
	return id, nil
}

func withSlash(prefix string) string {
	if prefix == "" || strings.HasSuffix(prefix, "/") {
		return prefix
	}
	return prefix + "/"
}

// legacyPlace reads a volume of k8s-csi-s3. A bare word is taken for a bucket only if it looks like a handle of that
// driver or the context does: a static volume whose author forgot bucketName must not end up in a stranger's bucket.
func legacyPlace(handle string, given map[string]string) (ID, error) {
	telling := false
	for _, key := range []string{legacyBucket, legacyCapacity, legacyMounter, legacyOptions} {
		if _, ok := given[key]; ok {
			telling = true
		}
	}
	if !telling && !LooksForeign(handle) {
		return ID{}, fault.Field("volume_context."+keyBucketName, "is missing, and the handle %q does not say where the volume is", handle)
	}
	if _, ok := given[keyPrefix]; ok {
		return ID{}, fault.Field("volume_context."+keyPrefix, "needs bucketName beside it")
	}
	id, err := legacyID(handle)
	if err != nil {
		return ID{}, fault.Field("volume_id", "%q says neither alone nor with bucketName in the volume context where the volume is: %w", handle, err)
	}
	if backend, ok := given[keyBackend]; ok {
		if err := checkBackendName(backend); err != nil {
			return ID{}, fault.Field("volume_context."+keyBackend, "%w", err)
		}
		id.Backend = backend
		delete(given, keyBackend)
	}
	return id, legacyAttributes(id, given)
}

// legacyAttributes turns the keys of k8s-csi-s3 into ours.
func legacyAttributes(id ID, given map[string]string) error {
	if bucket := given[legacyBucket]; bucket != "" && bucket != id.Bucket {
		return fault.Field("volume_context."+legacyBucket, "%q is not the bucket of the handle, %q", bucket, id.Bucket)
	}
	if given[legacyOptions] != "" {
		return fault.Field("volume_context."+legacyOptions, "belongs to the clients of k8s-csi-s3; write mountOptions, a comma-separated list of options of this driver's client, or leave it empty")
	}
	if mounter := given[legacyMounter]; mounter != "" {
		clients := map[string]string{"rclone": "rclone", "mountpoint": "mountpoint-s3", "mountpoint-s3": "mountpoint-s3"}
		client, ok := clients[mounter]
		if !ok {
			return fault.Field("volume_context."+legacyMounter, "%q is not a client of this driver; write client: mountpoint-s3 or client: rclone instead", mounter)
		}
		if other, ok := given[keyClient]; ok && other != client {
			return fault.Field("volume_context."+legacyMounter, "%q contradicts client %q", mounter, other)
		}
		given[keyClient] = client
	}
	for _, key := range []string{legacyBucket, legacyCapacity, legacyMounter, legacyOptions} {
		delete(given, key)
	}
	return nil
}

// parseAttributes reads the keys that locate left.
func parseAttributes(given map[string]string) (Attributes, error) {
	var a Attributes
	for _, key := range slices.Sorted(maps.Keys(given)) {
		field := "volume_context." + printable(key)
		handled, err := a.set(key, given[key], field)
		if err != nil {
			return Attributes{}, err
		}
		if !handled {
			return Attributes{}, fault.Field(field, "is not a key of a volume context; %s", suggestion(key, ScopeContext))
		}
	}
	if err := a.check("volume_context"); err != nil {
		return Attributes{}, err
	}
	return a, nil
}
