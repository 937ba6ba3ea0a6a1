// Package status shows what runs on a node: the document, how a driver collects and serves it, and how the command status gets and
// prints it.
//
// A document is made of what the driver remembers and of its records. Nothing here calls a client, a helper, an S3 service or a FUSE file
// system, so that an unresponsive one delays no answer.
package status

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

// Version is the version of Document. Fields may be added to a version, and a reader ignores those that it does not know.
const Version = "v1"

// Document is what runs on a node. Nothing in it is secret.
type Document struct {
	Version    string      `json:"version"`
	Driver     Driver      `json:"driver"`
	Time       time.Time   `json:"time"`
	Launcher   string      `json:"launcher"`
	Notes      []string    `json:"notes,omitempty"` // degraded features and their reasons, as /readyz lists them
	Mounts     []Mount     `json:"mounts"`
	PodClients []PodClient `json:"podClients,omitempty"` // the volumes whose client runs in the user's own pod
}

// Driver identifies the driver that answers.
type Driver struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	NodeID  string `json:"nodeID"`
}

// State is the state of a mount.
type State string

// The states of mounts: those of package tracker, and two that only records have.
const (
	Healthy      = State(tracker.Healthy)
	Failed       = State(tracker.Failed)
	Unresponsive = State(tracker.Unresponsive)
	Draining     = State(tracker.Draining)
	Lingering    = State(tracker.Lingering)
	Starting     = State("starting") // its first publish is in progress
	Unknown      = State("unknown")  // the driver has just started and has not looked at it yet
)

// Mount is one mount: a client, and the publications that share it.
type Mount struct {
	Name    string    `json:"name"`
	State   State     `json:"state"`
	Since   time.Time `json:"since,omitzero"` // of State, as far as this driver knows
	Created time.Time `json:"created"`
	// Superseded means that another mount took over its publications, and that files which were open stay in it.
	Superseded   bool          `json:"superseded,omitempty"`
	VolumeID     string        `json:"volumeID"` // of the publication that it was started for
	Backend      string        `json:"backend"`
	Bucket       string        `json:"bucket"`
	Prefix       string        `json:"prefix,omitempty"`
	ReadOnly     bool          `json:"readOnly,omitempty"`
	Client       Client        `json:"client"`
	Publications []Publication `json:"publications"`
	Session      Session       `json:"session"`
	Memory       *Memory       `json:"memory,omitempty"`  // nil: unknown
	Uploads      *Uploads      `json:"uploads,omitempty"` // nil: the client has not reported any
	// Conflicts is the number of files that were quarantined because another writer had changed their objects.
	Conflicts int `json:"conflicts,omitempty"`
	// Unstored is the number of files that the client could not store after they were closed. Their data is lost.
	Unstored     int       `json:"unstored,omitempty"`
	LingersUntil time.Time `json:"lingersUntil,omitzero"` // when a lingering mount ends
	Problems     []Problem `json:"problems,omitempty"`    // what is not well

	requests *client.Requests // nil: the client has not reported any
}

// Client is the program of a mount.
type Client struct {
	Name    string   `json:"name"`
	Version string   `json:"version,omitempty"` // of the driver that the running programs came with; "": unknown
	Program string   `json:"program,omitempty"` // on the host
	PID     int      `json:"pid,omitempty"`
	Starts  int      `json:"starts,omitempty"` // by the running helper
	UID     uint32   `json:"uid"`              // of helper and client
	Output  []string `json:"output,omitempty"` // the end of its output, without secrets; of the last client if none runs
}

// Publication is a target that shows a mount.
type Publication struct {
	VolumeID string `json:"volumeID"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// PersistentVolume is the name of the PersistentVolume, by kubelet's target path; "": unknown, or an inline volume.
	PersistentVolume string `json:"persistentVolume,omitempty"`
	Pod              Pod    `json:"pod,omitzero"`
}

// Pod is the pod of a publication. Namespace and Name need podInfoOnMount: true in the CSIDriver object.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"` // by kubelet's target path
}

// Session is the session of a mount.
type Session struct {
	// State is valid, failing (valid, but it could not be renewed), expired, static (keys that do not expire), or "" (unknown, or none).
	State            string    `json:"state,omitempty"`
	Source           string    `json:"source"` // of the credentials
	RoleARN          string    `json:"roleARN,omitempty"`
	Expires          time.Time `json:"expires,omitzero"`
	RemainingSeconds int64     `json:"remainingSeconds,omitempty"` // until Expires, at Document.Time
	Renewals         int       `json:"renewals,omitempty"`
}

// Memory is the resident memory of a mount's helper and client, and its limit.
type Memory struct {
	UsedBytes  uint64 `json:"usedBytes"`
	LimitBytes uint64 `json:"limitBytes,omitempty"` // 0: none that is enforced
}

// Uploads are the files that were closed and are not uploaded yet, as the client last reported.
type Uploads struct {
	Files int   `json:"files"`
	Bytes int64 `json:"bytes"`
}

// PodClient is a volume whose client runs in the user's own pod.
type PodClient struct {
	VolumeID string `json:"volumeID"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	Pod      Pod    `json:"pod,omitzero"`
	Volume   string `json:"volume,omitempty"` // the pod's name of it
	EmptyDir string `json:"emptyDir"`         // the pod's name of the emptyDir volume with the socket
	Socket   string `json:"socket"`           // its file name
	// State is one of package podclient's: unknown, waiting, starting, serving, unresponsive, exited or stopped.
	State State     `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Handovers is the number of FUSE descriptors that this driver passed to programs of the pod.
	Handovers   int      `json:"handovers"`
	LastFailure *Problem `json:"lastFailure,omitempty"` // LastFailure stays when the client serves again
}

// Problem is one thing that is not well.
type Problem struct {
	Reason  string    `json:"reason"` // one of the constants Reason…
	Message string    `json:"message"`
	Since   time.Time `json:"since,omitzero"`
	NextTry time.Time `json:"nextTry,omitzero"` // when the driver or the helper tries again; zero: unknown, or nothing is tried
}

// The reasons of problems. For a client that exited, and of which the driver knows why, it is one of package tracker: crash, oom, hang, helper,
// source, backend or secret.
const (
	ReasonExited       = "exited"       // the client has exited, and the driver has not determined why yet
	ReasonReconcile    = "reconcile"    // the driver could not reconcile the mount
	ReasonUnresponsive = "unresponsive" // the client does not answer
	ReasonSession      = "session"      // the session has expired or cannot be renewed
	ReasonConflicts    = "conflicts"    // files were quarantined
	ReasonUnstored     = "unstored"     // closed files could not be stored, their data is lost
	ReasonMissing      = "missing"      // a publication's mount is gone
)
