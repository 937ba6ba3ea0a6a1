package helper

import (
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
	// Starts counts the clients that were started.
	Starts int `json:"starts"`
}

// StartRequest is what a helper needs to run a client, beside the FUSE descriptor.
type StartRequest struct {
	// Client is the client's declared name. A helper that does not know it runs the command all the same and only
	// cannot read the queue from its output.
	Client  string
	Command client.Command
	Keys    credentials.Keys // zero: those that the helper has
}
