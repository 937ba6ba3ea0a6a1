package state

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Usage is what is known of the usage of a volume. Its record outlives the volume's publications on the node, so that a volume is not
// measured more often than its interval says because pods come and go.
type Usage struct {
	VolumeID string `json:"volumeID"`
	// Setting and CapacityBytes are what the volume's record said at Read, or else its volume context; the capacity is 0 if it is unknown.
	Setting       volume.Usage `json:"setting"`
	CapacityBytes int64        `json:"capacityBytes,omitempty"`
	Read          time.Time    `json:"read,omitzero"`
	// Bytes and Objects were counted at Measured (zero: not yet). They are a minimum if the listing was cut (AtLeast).
	Measured time.Time `json:"measured,omitzero"`
	Bytes    int64     `json:"bytes,omitempty"`
	Objects  int64     `json:"objects,omitempty"`
	AtLeast  bool      `json:"atLeast,omitempty"`
	// NotBefore is when the volume may be listed again. Retry is when that may be tried again after a number of Failures.
	NotBefore time.Time `json:"notBefore,omitzero"`
	Retry     time.Time `json:"retry,omitzero"`
	Failures  int       `json:"failures,omitempty"`
}

func (p Paths) usageDir() string { return filepath.Join(p.Dir, "usage") }

func (p Paths) usageFile(volumeID string) string {
	sum := sha256.Sum256([]byte(volumeID))
	return filepath.Join(p.usageDir(), hex.EncodeToString(sum[:16])+".json")
}

// Usages are the records of the usage of volumes.
type Usages struct{ base }

// All returns the readable records.
func (s Usages) All(ctx context.Context) ([]Usage, error) { return get(ctx, s.base, s.usages) }

// Write writes the record of a volume.
func (s Usages) Write(ctx context.Context, u Usage) error {
	return s.do(ctx, func() error { return writeJSON(s.usageFile(u.VolumeID), u) })
}

// Remove removes the record of a volume.
func (s Usages) Remove(ctx context.Context, volumeID string) error {
	return s.do(ctx, func() error { return ignoreMissing(os.Remove(s.usageFile(volumeID))) })
}

func (f files) usages() (all []Usage, err error) {
	entries, err := os.ReadDir(f.usageDir())
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		var u Usage
		// A damaged record is as good as none: the volume is measured again, and the record replaced.
		if ok, err := f.readJSON(filepath.Join(f.usageDir(), e.Name()), &u); ok && err == nil {
			all = append(all, u)
		}
	}
	return all, nil
}
