package volume

import (
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Content is where the objects of a new volume come from: a snapshot or a volume. The zero value is an empty volume.
type Content struct {
	Snapshot SnapshotID
	Volume   ID
}

const (
	contentSnapshot = "snapshot "
	contentVolume   = "volume "
)

// String returns "snapshot <id>" or "volume <id>", "" for none.
func (c Content) String() string {
	switch {
	case c.Snapshot != SnapshotID{}:
		return contentSnapshot + c.Snapshot.String()
	case c.Volume != ID{}:
		return contentVolume + c.Volume.String()
	}
	return ""
}

// Backend returns the name of the backend, "" for none.
func (c Content) Backend() string {
	if c.Snapshot.Backend != "" {
		return c.Snapshot.Backend
	}
	return c.Volume.Backend
}

// ParseContent is the inverse of String. The error is Invalid.
func ParseContent(s string) (c Content, err error) {
	if id, ok := strings.CutPrefix(s, contentSnapshot); ok {
		c.Snapshot, err = ParseSnapshotID(id)
		return c, err
	}
	if id, ok := strings.CutPrefix(s, contentVolume); ok {
		c.Volume, err = ParseID(id)
		return c, err
	}
	return c, fault.Errorf(fault.Invalid, "%q is no source of a volume", s)
}

// FillsPrefix is the prefix of the manifests of volumes that are being filled.
const FillsPrefix = RecordPrefix + "/fills/"

// FillManifest returns the prefix of the manifest segments of the volume, while it is filled.
func (id ID) FillManifest() string {
	if segment, generation, ok := id.NameSegment(); ok {
		return FillsPrefix + element(segment, max(generation, 1))
	}
	return FillsPrefix + "bucket/"
}
