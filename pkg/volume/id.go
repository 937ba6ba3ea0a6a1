package volume

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const maxBackendName = 32

// uuidEnd matches handles that provisioners derive from a PersistentVolumeClaim's uid; hash40 those that k8s-csi-s3 derives from
// long names.
const (
	uuidEnd Pattern = `^([a-z0-9][a-z0-9.-]*-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`
	hash40  Pattern = `^[0-9a-f]{40}$`
)

// String returns the volume_id: "<backend>:<bucket>" or "<backend>:<bucket>/<prefix>". ParseID accepts those of ParseID and
// Parameters.ID; that of a static volume may be too long.
func (id ID) String() string {
	if id.Prefix == "" {
		return id.Backend + ":" + id.Bucket
	}
	return id.Backend + ":" + id.Bucket + "/" + id.Prefix
}

// ParseID parses a volume_id of this driver. It is strict: it accepts only what String returns. The error
// is Invalid and names volume_id.
func ParseID(s string) (ID, error) {
	id, err := parseID(s)
	if err != nil {
		return ID{}, fault.Field("volume_id", "%q is not a volume id of this driver (<backend>:<bucket> or <backend>:<bucket>/<prefix>/): %w", s, err)
	}
	return id, nil
}

func parseID(s string) (ID, error) {
	if len(s) > maxString {
		return ID{}, fmt.Errorf("it has %d bytes, the maximum is %d", len(s), maxString)
	}
	backend, place, ok := strings.Cut(s, ":")
	if !ok {
		return ID{}, errors.New(`it contains no ":"`)
	}
	if err := checkBackendName(backend); err != nil {
		return ID{}, err
	}
	bucket, prefix, hasPrefix := strings.Cut(place, "/")
	if err := CheckBucketName(bucket); err != nil {
		return ID{}, fmt.Errorf("bucket %q %w", bucket, err)
	}
	if hasPrefix {
		if !strings.HasSuffix(prefix, "/") {
			return ID{}, errors.New(`its prefix does not end in "/"`)
		}
		if err := checkPrefix(prefix); err != nil {
			return ID{}, fmt.Errorf("its prefix %w", err)
		}
	}
	return ID{Backend: backend, Bucket: bucket, Prefix: prefix}, nil
}

// ValidateBackendName checks a backend's name, which is part of volume ids: 1 to 32 bytes of [a-z0-9-] with a letter or a digit at
// both ends. The error is Invalid.
func ValidateBackendName(name string) error {
	if err := checkBackendName(name); err != nil {
		return fault.Errorf(fault.Invalid, "%w", err)
	}
	return nil
}

func checkBackendName(name string) error {
	if !IsName(name, maxBackendName) {
		return fmt.Errorf("backend name %q is not 1 to %d of a-z, 0-9 and \"-\", with a letter or digit at both ends", name, maxBackendName)
	}
	return nil
}

// IsName reports whether s is [a-z0-9] with inner dashes.
func IsName(s string, limit int) bool {
	return s != "" && len(s) <= limit && s[0] != '-' && s[len(s)-1] != '-' && consistsOf(s, func(c byte) bool { return isLower(c) || c == '-' })
}

// NameSegment parses the last path element of the volume's prefix, "<segment>" or "<segment>@<generation>", which
// Parameters.VolumePrefix wrote. ok is false for a whole bucket and for other prefixes.
func (id ID) NameSegment() (segment string, generation int, ok bool) {
	last := strings.TrimSuffix(id.Prefix, "/")
	if last == id.Prefix {
		return "", 0, false
	}
	last = last[strings.LastIndexByte(last, '/')+1:]
	segment, suffix, later := strings.Cut(last, "@")
	generation = 1
	if later {
		n, err := strconv.Atoi(suffix)
		if err != nil || n < 2 || n > MaxGeneration || strconv.Itoa(n) != suffix {
			return "", 0, false
		}
		generation = n
	}
	if !isSegment(segment, maxSegment) {
		return "", 0, false
	}
	return segment, generation, true
}

// LooksForeign reports whether another S3 CSI driver may have issued a handle: "pvc-<uuid>", another name that ends in a uuid, the
// hash of a long name, or "<bucket>/<path>". Such a volume may contain data although this driver has no record of it.
func LooksForeign(handle string) bool {
	if strings.Contains(handle, ":") || len(handle) > maxString {
		return false
	}
	if _, err := legacyID(handle); err != nil {
		return false
	}
	return strings.Contains(handle, "/") || uuidEnd.MatchString(handle) || hash40.MatchString(handle)
}

// legacyID parses handles of k8s-csi-s3: "<bucket>" or "<bucket>/<path>", with or without a final slash.
func legacyID(handle string) (ID, error) {
	bucket, path, hasPath := strings.Cut(handle, "/")
	if err := CheckBucketName(bucket); err != nil {
		return ID{}, fmt.Errorf("bucket %q %w", bucket, err)
	}
	if !hasPath {
		return ID{Backend: DefaultBackend, Bucket: bucket}, nil
	}
	path = strings.TrimSuffix(path, "/") + "/"
	if err := checkPrefix(path); err != nil {
		return ID{}, fmt.Errorf("the path after the bucket %w", err)
	}
	return ID{Backend: DefaultBackend, Bucket: bucket, Prefix: path}, nil
}
