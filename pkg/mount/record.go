package mount

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
)

// phase is where in its life a mount is.
type phase string

const (
	phaseStarting phase = "starting" // being made; if its maker died, it is cleared away
	phaseRunning  phase = "running"
	phaseEnding   phase = "ending" // its last publication went; it may be draining
)

// record is what the state directory keeps of a mount. Nothing in it is secret.
type record struct {
	Name       string `json:"name"` // <key>-<generation>
	Key        string `json:"key"`
	Generation uint64 `json:"generation"`
	Phase      phase  `json:"phase"`
	VolumeID   string `json:"volumeID"` // of the publication that it was made for
	Source     string `json:"source"`   // in the mount table
	// Minor is the source's device while it is mounted; the major number of FUSE is 0. The kernel gives it out again after
	// that, so that it says something only together with Source.
	Minor   uint32    `json:"minor,omitempty"`
	Client  string    `json:"client"` // the default resolved
	UID     uint32    `json:"uid"`    // of the helper and the client
	Spec    Spec      `json:"spec"`
	Created time.Time `json:"created"`
	Ending  time.Time `json:"ending,omitzero"`
	// OOMKills is how many of the helper's processes had been killed for want of memory when the client was started.
	OOMKills uint64 `json:"oomKills,omitempty"`
	// Backend is the digest of what the backend's configuration was then; Region and Owner are what was known of the bucket.
	Backend string `json:"backend,omitempty"`
	Region  string `json:"region,omitempty"`
	Owner   string `json:"owner,omitempty"`
	// Rotated is the identity that the mount serves now in the place of Spec's: its only publications' secret was changed. ""
	// is Spec's own. Rotating tells that nobody knows yet which of the two its client works with.
	Rotated   string    `json:"rotated,omitempty"`
	Rotating  bool      `json:"rotating,omitempty"`
	RotatedAt time.Time `json:"rotatedAt,omitzero"`
	// Former are the names of the mounts whose publications this one took over, and Superseded tells that another one does.
	Former     []string `json:"former,omitempty"`
	Superseded bool     `json:"superseded,omitempty"`
	// Command is the client's, as it was started: what a new life of the client is started with.
	Command client.Command `json:"command"`
}

// publication is what the state directory keeps of a target.
type publication struct {
	Target       string    `json:"target"`
	VolumeID     string    `json:"volumeID"`
	Mount        string    `json:"mount"` // the mount's name
	ReadOnly     bool      `json:"readOnly,omitempty"`
	SingleWriter bool      `json:"singleWriter,omitempty"`
	Created      time.Time `json:"created"`
	// From are the names of mounts that the publication was moved away from, whose other publications, if they have any, stay:
	// where one of them still shows in its places, Mount is to be put. What was open then is in them until it is closed.
	From []string `json:"from,omitempty"`
	// Wants is the identity that the publication is to have once the mount's others are to have it too; "": none.
	Wants string `json:"wants,omitempty"`
}

// serves is the spec of those who may use the mount.
func (r record) serves() Spec {
	s := r.Spec
	if r.Rotated != "" {
		s.Identity = r.Rotated
	}
	return s
}

// joinable tells whether further publications of a spec, whose key the mount has, can use it. Its identity may be another now.
func (r record) joinable(spec Spec) bool {
	return !r.Superseded && !r.Rotating && (r.Rotated == "" || r.serves().encode() == spec.encode())
}
