package helper

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// State is what a helper's client is doing.
type State string

// The states of a helper.
const (
	StateIdle    State = "idle"    // no client was started yet
	StateRunning State = "running" // a client runs
	StateExited  State = "exited"  // the last client has ended; a new one can be started, while Ending only after a bad end
)

// Status is what a helper says of itself. Fields that a helper of another version does not know are zero.
type Status struct {
	Protocol int    `json:"protocol"` // the highest protocol that the helper speaks
	Version  string `json:"version"`  // of the helper's program
	PID      int    `json:"pid"`
	// Revision grows with every change of what follows; it starts at 1.
	Revision uint64 `json:"revision"`
	State    State  `json:"state"`
	// Ending: the helper was told that the mount is going; an exit of the client is expected.
	Ending    bool `json:"ending,omitempty"`
	ClientPID int  `json:"clientPID,omitempty"` // of the running client
	// ExitCode and Signal are those of the client that ended last; a client that was killed has the signal's name and
	// the code -1.
	ExitCode int    `json:"exitCode"`
	Signal   string `json:"signal,omitempty"`
	// Tail is the end of the client's output, cleaned of control characters and of the secrets that the helper knows.
	Tail []string `json:"tail,omitempty"`
	// Queue is what the client last said it has still to upload; nil where it never said.
	Queue *client.Queue `json:"queue,omitempty"`
	// Conflicts counts the files that this helper's clients have put aside because another writer had changed their objects.
	Conflicts int `json:"conflicts,omitempty"`
	// Starts counts the clients that were started.
	Starts int `json:"starts"`
	// Session is what the mount's client works with; nil: this helper cannot make sessions, and whoever wants the client's
	// keys renewed has to hand over new ones.
	Session *SessionStatus `json:"session,omitempty"`
}

// SessionStatus is how a mount's session is doing. A change of it changes the revision; of failures in a row that say the
// same, only the first does.
type SessionStatus struct {
	// Expires is when the session that the client has ends, by this machine's clock; zero: it does not, or there is none.
	Expires time.Time `json:"expires,omitzero"`
	// Made is since when the helper has it.
	Made time.Time `json:"made,omitzero"`
	// Renewals and Failures count the sessions that the helper has made, and its attempts that failed.
	Renewals int `json:"renewals,omitempty"`
	Failures int `json:"failures,omitempty"`
	// Error is why there is no newer session; "" where nothing is wrong. Kind is its fault kind by name ("denied"), and FailedSince when that began: the first of the failures since the last success.
	Error       string    `json:"error,omitempty"`
	Kind        string    `json:"kind,omitempty"`
	FailedSince time.Time `json:"failedSince,omitzero"`
	// Over tells that the client has no session that is valid: it gets none until one is made.
	Over bool `json:"over,omitempty"`
	// OrderDigest is credentials.Order.Digest of the order that the helper makes sessions from, under Salt; "": it has none.
	OrderDigest string `json:"orderDigest,omitempty"`
	Salt        []byte `json:"salt,omitempty"`
}

// Fault is Error with its kind; nil where there is none.
func (s *SessionStatus) Fault() error {
	if s == nil || s.Error == "" {
		return nil
	}
	return (&wireError{Kind: s.Kind, Text: s.Error}).fault()
}

// Has tells whether the helper makes its sessions from this order.
func (s *SessionStatus) Has(o credentials.Order) bool {
	return s != nil && s.OrderDigest != "" && s.OrderDigest == o.Digest(s.Salt)
}

// StartRequest is what a helper needs to run a client, beside the FUSE descriptor.
type StartRequest struct {
	// Client is the client's declared name. A helper that does not know it runs the command all the same and only
	// cannot read the queue from its output.
	Client  string
	Command client.Command
	Keys    credentials.Keys // zero: those that the helper has
	// Order is what further sessions are made from. Zero with keys: these are all, and what the helper had is forgotten. Zero
	// without: what the helper has.
	Order credentials.Order
}
