package mount

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// SourceName is the source of a mount in the mount table: its volume and its name.
func SourceName(volumeID, name string) string {
	safe := strings.Map(func(r rune) rune {
		if r > ' ' && r < 0x7f && r != ',' && r != '\\' {
			return r
		}
		return '_'
	}, volumeID)
	return sourcePrefix + safe + ":" + name
}

const sourcePrefix = "s3csi:"

// NameOf returns the name of the mount that a source in the mount table belongs to; ok is false for mounts of other programs.
func NameOf(source string) (name string, ok bool) {
	if !strings.HasPrefix(source, sourcePrefix) {
		return "", false
	}
	name = source[strings.LastIndexByte(source, ':')+1:]
	return name, ValidName(name)
}

// ClientUID returns the uid of the client of one of the driver's mounts, as the mount table shows it.
func ClientUID(mnt host.Mount) (uid uint32, ok bool) {
	if _, ours := NameOf(mnt.Source); !ours {
		return 0, false
	}
	for option := range strings.SplitSeq(mnt.SuperOptions, ",") {
		if value, found := strings.CutPrefix(option, "user_id="); found {
			n, err := strconv.ParseUint(value, 10, 32)
			return uint32(n), err == nil
		}
	}
	return 0, false
}

var validName = regexp.MustCompile(`^[a-z2-7]{24}-[0-9]{1,19}$`)

// ValidName reports whether a name has the form <key>-<generation>. Names are read from the mount table and from file names,
// and become paths.
func ValidName(name string) bool { return validName.MatchString(name) }

// Account is what calls that wait for a mount's client are accounted to, by the mount's source: see host.For.
func Account(source string) string { return "mount " + source }

// KeyOf returns the key in a mount's name.
func KeyOf(name string) string {
	key, _, _ := strings.Cut(name, "-")
	return key
}

// Name is the name of a generation of the mount with that key.
func Name(key string, generation uint64) string {
	return key + "-" + strconv.FormatUint(generation, 10)
}

// KeepsOnDisk reports whether a client may hold closed files in its cache directory that are not stored yet.
func KeepsOnDisk(cl client.Client, spec Spec) bool { return cl.WriteBack && !spec.ReadOnly }

// Health is the result of a health check of a mount.
type Health int

// The results, of which only Healthy needs nothing.
const (
	Down     Health = iota // its client has exited, or its file system is gone
	Healthy                // its client serves
	Outdated               // healthy, but started for an older configuration of the backend
	Orphaned               // its client serves, but its helper, which stops it and renews its credentials, has exited
)

// Serves reports whether the client serves, and its helper can be reached.
func (h Health) Serves() bool { return h == Healthy || h == Outdated }

// SourceUnmounted returns the error for a mount without a file system on its source. The driver itself unmounts a source only under the
// mount's lock. A retry restarts the client.
func SourceUnmounted(name string) error {
	return fault.Errorf(fault.Unavailable, "the source of mount %s was unmounted by another process", name)
}

// WithCleanupError joins an error with that of the clean-up after it, which may be nil. If the clean-up failed, the error is not final
// (fault.Unavailable), so the caller retries, and the retry cleans up.
func WithCleanupError(err, cleanup error) error {
	if cleanup == nil {
		return err
	}
	return fault.Errorf(fault.Unavailable, "%w; the clean-up also failed and will be retried: %w", err, cleanup)
}
