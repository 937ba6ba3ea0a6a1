package helper

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// State is what a helper's client is doing.
type State string

// The states of a helper.
const (
	StateIdle    State = "idle"    // no client was started yet
	StateRunning State = "running" // a client runs
	StateExited  State = "exited"  // the last client has exited; another can be started, while Ending only after an abnormal exit
)

// Status is a helper's status. Fields that a helper of another version does not know are zero.
type Status struct {
	Protocol int    `json:"protocol"` // the highest protocol that the helper speaks
	Version  string `json:"version"`  // of the helper's program
	PID      int    `json:"pid"`
	// Revision grows with every change of what follows; it starts at 1.
	Revision uint64 `json:"revision"`
	State    State  `json:"state"`
	// Ending means that the mount is ending and an exit of the client is expected.
	Ending    bool `json:"ending,omitempty"`
	ClientPID int  `json:"clientPID,omitempty"` // of the running client
	// ExitCode and Signal are those of the last client that exited. A client that was killed by a signal has the signal's name
	// and the code -1.
	ExitCode int    `json:"exitCode"`
	Signal   string `json:"signal,omitempty"`
	// Tail is the end of the client's output, without control characters and the secrets that the helper knows.
	Tail []string `json:"tail,omitempty"`
	// Queue is the upload queue that the client last reported; nil if it never did.
	Queue *client.Queue `json:"queue,omitempty"`
	// Conflicts counts the files that this helper's clients have quarantined because another writer had changed their objects.
	Conflicts int `json:"conflicts,omitempty"`
	// Starts counts the clients that were started.
	Starts int `json:"starts"`
	// Session is the state of the client's session.
	Session *SessionStatus `json:"session,omitempty"`
}

// SessionStatus is the state of a mount's session. A change of it changes the revision; of consecutive equal failures only the
// first does.
type SessionStatus struct {
	// Expires is when the client's session expires, by this machine's clock; zero: never, or there is none.
	Expires time.Time `json:"expires,omitzero"`
	// Made is when the helper got it.
	Made time.Time `json:"made,omitzero"`
	// Renewals and Failures count the sessions that the helper has made and its failed attempts.
	Renewals int `json:"renewals,omitempty"`
	Failures int `json:"failures,omitempty"`
	// Error is why there is no newer session; "" if nothing is wrong. Kind is the name of its fault kind ("denied"), and
	// FailedSince the time of the first failure since the last success.
	Error       string    `json:"error,omitempty"`
	Kind        string    `json:"kind,omitempty"`
	FailedSince time.Time `json:"failedSince,omitzero"`
	// Over reports whether the client has no valid session.
	Over bool `json:"over,omitempty"`
	// OrderDigest is credentials.Order.Digest, with Salt, of the order from which the helper makes sessions; "": it has none.
	OrderDigest string `json:"orderDigest,omitempty"`
	Salt        []byte `json:"salt,omitempty"`
}

// Fault returns Error with its kind, or nil.
func (s *SessionStatus) Fault() error {
	if s == nil || s.Error == "" {
		return nil
	}
	return fault.Errorf(fault.ParseKind(s.Kind), "%s", s.Error)
}

// Has reports whether the helper makes its sessions from this order.
func (s *SessionStatus) Has(o credentials.Order) bool {
	return s != nil && s.OrderDigest != "" && s.OrderDigest == o.Digest(s.Salt)
}

// StartRequest is what a helper needs to run a client in addition to the FUSE descriptor.
type StartRequest struct {
	// Client is the client's name. A helper that does not know it runs the command and cannot read its upload queue.
	Client         string           `json:"client"`
	client.Command                  // in the same JSON object
	Keys           credentials.Keys `json:"-"` // zero: the helper keeps its own
	// Order is what further sessions are made from. If it is zero, keys replace the helper's order as well; without keys the
	// helper keeps what it has.
	Order credentials.Order `json:"-"`
}
