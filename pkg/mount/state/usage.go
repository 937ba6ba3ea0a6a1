package state

import (
	"context"
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

// Usages are the records of the usage of volumes.
type Usages struct{ store *Store }

// All returns the readable records. A damaged one is as good as none: the volume is measured again, and the record replaced.
func (r Usages) All(context.Context) (all []Usage, err error) {
	names, err := r.store.readDir(usageDir)
	for _, name := range names {
		var u Usage
		if !strings.HasSuffix(name, ".json") {
			continue
		}
		if ok, err := r.store.readRecord(filepath.Join(usageDir, name), &u); ok && err == nil {
			all = append(all, u)
		}
	}
	return all, err
}

// Write writes the record of a volume.
func (r Usages) Write(_ context.Context, u Usage) error {
	return r.store.writeRecord(hashed(usageDir, u.VolumeID), u)
}

// Remove removes the record of a volume.
func (r Usages) Remove(_ context.Context, volumeID string) error {
	return r.store.removeRecord(hashed(usageDir, volumeID))
}
