package state

import (
	"cmp"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// Phase is the phase of a mount's life cycle.
type Phase string

// The phases, in their order.
const (
	Starting Phase = "starting" // after a crash of the driver in this phase, the mount is removed
	Running  Phase = "running"
	Ending   Phase = "ending" // without publications; it may be draining
)

// Mount is the record of a mount. Nothing in it is secret.
type Mount struct {
	Name       string `json:"name"` // <key>-<generation>
	Key        string `json:"key"`
	Generation uint64 `json:"generation"`
	Phase      Phase  `json:"phase"`
	VolumeID   string `json:"volumeID"` // of the publication that it was started for
	Source     string `json:"source"`   // in the mount table
	// Minor is the source's minor device number while it is mounted; FUSE's major number is 0. The kernel reuses the number
	// afterwards, so it identifies a file system only together with Source.
	Minor  uint32 `json:"minor,omitempty"`
	Client string `json:"client"` // its name, never empty
	UID    uint32 `json:"uid"`    // of the helper and the client
	// Spare is the spare that became the mount's helper; "": none. The helper's unit has its name.
	Spare   string     `json:"spare,omitempty"`
	Spec    mount.Spec `json:"spec"`
	Created time.Time  `json:"created"`
	Ending  time.Time  `json:"ending,omitzero"`
	// OOMKills is the number of the mount's processes that the kernel had OOM-killed when the client was started.
	OOMKills uint64 `json:"oomKills,omitempty"`
	// Backend is the digest of the backend's configuration at the start; Region and Owner are the bucket's, if they were known.
	Backend string `json:"backend,omitempty"`
	Region  string `json:"region,omitempty"`
	Owner   string `json:"owner,omitempty"`
	// Rotated is the identity that the mount serves instead of Spec's, after the secret of its only publications was rotated;
	// "" is Spec's own. Rotating is set while it is unknown which of the two the client uses.
	Rotated   string    `json:"rotated,omitempty"`
	Rotating  bool      `json:"rotating,omitempty"`
	RotatedAt time.Time `json:"rotatedAt,omitzero"`
	// LingerFor is how long the mount may linger after its last publication: the longest time of its publications since it had
	// none. Linger is set while it lingers, and stays set while such a mount is stopped: it has nothing left to store.
	LingerFor time.Duration `json:"lingerFor,omitempty"`
	Linger    *Linger       `json:"linger,omitempty"`
	// UnstoredReported is set when the files that the client could not store were reported to the caller that ends the mount.
	UnstoredReported bool `json:"unstoredReported,omitempty"`
	// Predecessors are the names of the mounts whose publications this one took over. Superseded is set if another one took
	// over this one's.
	Predecessors []string `json:"predecessors,omitempty"`
	Superseded   bool     `json:"superseded,omitempty"`
	// Command is the client's command line, with which it is restarted.
	Command client.Command `json:"command"`
}

// Linger is the state of a lingering mount: it has no publication, everything that was written and closed is stored, and its client and
// its cache stay for a while.
type Linger struct {
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	// Backend identifies the backend's configuration, the operator's rules included, as of then.
	Backend string `json:"backend"`
}

// Lingers reports whether the mount lingers.
func (m Mount) Lingers() bool { return m.Linger != nil && m.Phase == Running && !m.Superseded }

// Publication is the record of a target.
type Publication struct {
	Target       string    `json:"target"`
	VolumeID     string    `json:"volumeID"`
	Mount        string    `json:"mount"` // the mount's name
	ReadOnly     bool      `json:"readOnly,omitempty"`
	SingleWriter bool      `json:"singleWriter,omitempty"`
	Created      time.Time `json:"created"`
	Pod          Pod       `json:"pod,omitzero"` // zero: unknown
	// MovedFrom are the names of the mounts that the publication was moved away from. They may have other publications. Where
	// one of them still shows at a place of this publication, Mount must replace it. Files that were open stay in them.
	MovedFrom []string `json:"movedFrom,omitempty"`
	// PendingIdentity is the identity that the publication gets once the mount's other publications ask for it too.
	PendingIdentity string `json:"pendingIdentity,omitempty"`
}

// Pod is the pod that a publication is for, by the names that the CO gave. It is for people: nothing is decided by it.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// Serves returns the spec of those who may use the mount: Spec, with the identity that it was rotated to.
func (m Mount) Serves() mount.Spec {
	s := m.Spec
	if m.Rotated != "" {
		s.Identity = m.Rotated
	}
	return s
}

// Joinable reports whether further publications of a spec, whose key the mount has, can use it.
func (m Mount) Joinable(spec mount.Spec) bool {
	return !m.Superseded && !m.Rotating && (m.Rotated == "" || m.Serves().Encode() == spec.Encode())
}

// Unit is the name of the mount's helper for launchers.
func (m Mount) Unit() string { return cmp.Or(m.Spare, m.Name) }

// Account is what calls that wait for the mount's client are accounted to: see host.For.
func (m Mount) Account() string { return mount.Account(m.Source) }

// KeepsOnDisk reports whether the mount's client may hold closed files in its cache directory that are not stored yet. One whose
// declaration was removed may.
func (m Mount) KeepsOnDisk(clients client.Registry) bool {
	cl, err := clients.Of(m.Client)
	if err != nil {
		return !m.Spec.ReadOnly
	}
	return mount.KeepsOnDisk(cl, m.Spec)
}
