package helper

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ProtocolVersion is the protocol of this package.
//
// A connection carries one request and one reply, each a JSON object after its length in four bytes, big endian. A start
// request has the FUSE descriptor on its first byte. Both sides ignore unknown fields, and a helper answers an unknown operation with an
// error of kind "unsupported", so new fields and operations need no new protocol; a new meaning does. The operations:
//
//	hello        the status
//	assign       make a spare the helper of a mount
//	start        run a client on the descriptor
//	status       the status when its revision differs from since
//	credentials  replace the keys, the order, or both
//	forget       drop the keys and the order
//	flush        have the client upload its queue; Status.Flush shows when it has
//	end          the mount is ending; the client's exit is expected
//	kill         kill a running client and keep the helper
//	quit         kill a running client and exit
const ProtocolVersion = 4

// maxMessage bounds a message without its length, in bytes. The largest have a token service's CA bundle.
const maxMessage = 1 << 20

const (
	opHello       = "hello"
	opAssign      = "assign"
	opStart       = "start"
	opStatus      = "status"
	opCredentials = "credentials"
	opForget      = "forget"
	opFlush       = "flush"
	opEnd         = "end"
	opKill        = "kill"
	opQuit        = "quit"
)

type request struct {
	Protocol int               `json:"protocol"`
	Op       string            `json:"op"`
	Since    uint64            `json:"since,omitempty"` // status: answer when the revision differs
	Assign   *Assignment       `json:"assign,omitempty"`
	Start    *StartRequest     `json:"start,omitempty"`
	Keys     credentials.Keys  `json:"keys,omitzero"`   // start, credentials
	Order    credentials.Order `json:"order,omitzero"`  // start, credentials
	Proxy    string            `json:"proxy,omitempty"` // start: StartRequest.ProxyCredentials
}

type reply struct {
	Protocol int            `json:"protocol"`
	Error    *fault.Message `json:"error,omitempty"`
	Status   *Status        `json:"status,omitempty"`
}

func encode(message any) ([]byte, error) {
	body, err := json.Marshal(message)
	if err != nil {
		return nil, fmt.Errorf("encode a helper message: %w", err)
	}
	if len(body) > maxMessage {
		return nil, fault.Errorf(fault.Invalid, "message for the helper has %d bytes, more than the maximum of %d; "+
			"shorten the mount options or the CA bundle of the token service", len(body), maxMessage)
	}
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body))), body...), nil
}

// readBody reads the message that follows its length.
func readBody(r io.Reader, head [4]byte) ([]byte, error) {
	n := binary.BigEndian.Uint32(head[:])
	if n == 0 || n > maxMessage {
		return nil, fault.Errorf(fault.Invalid, "message length %d is not between 1 and %d", n, maxMessage)
	}
	body := make([]byte, n)
	_, err := io.ReadFull(r, body)
	return body, err
}

// decodeRequest decodes a request and refuses protocols that this helper does not know.
func decodeRequest(body []byte) (request, error) {
	// The protocol first: a newer request may not even have this shape.
	var version struct {
		Protocol int `json:"protocol"`
	}
	if err := json.Unmarshal(body, &version); err != nil {
		return request{}, fault.Errorf(fault.Invalid, "the request is not valid JSON of this protocol")
	}
	if version.Protocol < 1 {
		return request{}, fault.Errorf(fault.Invalid, "the request has no protocol version")
	}
	if version.Protocol > ProtocolVersion {
		return request{}, fault.Errorf(fault.Unsupported, "the request needs protocol %d, but this helper was started by an older driver and "+
			"supports up to %d; unpublish and republish the volume", version.Protocol, ProtocolVersion)
	}
	var req request
	if err := json.Unmarshal(body, &req); err != nil {
		// Without json's error, which may show a value.
		return request{}, fault.Errorf(fault.Invalid, "the request has fields of wrong types")
	}
	return req, nil
}

// readReply reads a whole reply. io.EOF means that there was none.
func readReply(r io.Reader) (reply, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return reply{}, err
	}
	body, err := readBody(r, head)
	if err != nil {
		return reply{}, fmt.Errorf("read the helper's answer: %w", err)
	}
	var rep reply
	if err := json.Unmarshal(body, &rep); err != nil {
		return reply{}, fmt.Errorf("decode the helper's answer: %w", err)
	}
	if rep.Protocol > ProtocolVersion {
		return reply{}, fault.Errorf(fault.Unsupported, "the helper answered in protocol %d, but this driver supports up to %d", rep.Protocol, ProtocolVersion)
	}
	return rep, nil
}

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
	// Flush is the state of the flushes of the running client.
	Flush FlushStatus `json:"flush,omitzero"`
	// Requests are the request counts that the running client, or the last one, last reported; nil if it never did. A change of it alone
	// does not change the revision.
	Requests *client.Requests `json:"requests,omitempty"`
	// Conflicts counts the files that this helper's clients have quarantined because another writer had changed their objects.
	Conflicts int `json:"conflicts,omitempty"`
	// Unstored are the files that this helper's clients could not store after they were closed; nil: none.
	Unstored *client.Unstored `json:"unstored,omitempty"`
	// Starts counts the clients that were started.
	Starts int `json:"starts"`
	// Session is the state of the client's session.
	Session *SessionStatus `json:"session,omitempty"`
}

// FlushStatus is the state of the flushes of a client.
type FlushStatus struct {
	// Done counts the flushes that have finished. Asked is what Done will be when the flush that was asked for last has finished.
	Done  int `json:"done,omitempty"`
	Asked int `json:"asked,omitempty"`
	// Unsent is the number of changed files that the client had after the last flush, in no upload queue: they are open, or
	// cannot be uploaded.
	Unsent int `json:"unsent,omitempty"`
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
	// Next is when the helper makes the next session; zero: it makes none. It is as of the status: a change of it alone does not change
	// the revision.
	Next time.Time `json:"next,omitzero"`
	// Over reports whether the client has no valid session.
	Over bool `json:"over,omitempty"`
	// OrderDigest is credentials.Order.Digest, with Salt, of the order from which the helper makes sessions; "": it has none.
	OrderDigest string `json:"orderDigest,omitempty"`
	// KeysDigest is that of an order of kind AsIs with the client's keys, if the helper makes no sessions; "": it does, or has no keys.
	KeysDigest string `json:"keysDigest,omitempty"`
	Salt       []byte `json:"salt,omitempty"`
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

// HasKeys reports whether the client uses these keys as they are, and the helper makes no sessions.
func (s *SessionStatus) HasKeys(keys credentials.Keys) bool {
	return s != nil && s.KeysDigest != "" && s.KeysDigest == credentials.Order{Kind: credentials.AsIs, Keys: keys}.Digest(s.Salt)
}

// Assignment is the mount that a spare becomes the helper of.
type Assignment struct {
	Name string `json:"name"`
	// StateDir and CacheDir are the directories that the spare was started with, by their paths from now on.
	StateDir string `json:"stateDir"`
	CacheDir string `json:"cacheDir,omitempty"`
}

// Directories returns those of the mount.
func (a Assignment) Directories() []string {
	if a.CacheDir == "" {
		return []string{a.StateDir}
	}
	return []string{a.StateDir, a.CacheDir}
}

// StartRequest has the parameters to start a client, in addition to the FUSE descriptor.
type StartRequest struct {
	// Client is the client's name. A helper that does not know it runs the command and cannot read its upload queue.
	Client         string           `json:"client"`
	client.Command                  // in the same JSON object
	Keys           credentials.Keys `json:"-"` // zero: the helper keeps its own
	// Order is what further sessions are made from. If it is zero, keys replace the helper's order as well; without keys the
	// helper keeps what it has.
	Order credentials.Order `json:"-"`
	// ProxyCredentials are "user:password" for the proxy in the command's environment; "": it needs none. They are a secret.
	ProxyCredentials string `json:"-"`
	// Await means that the client's first session follows in a request of its own. Until then, the credential endpoint lets the
	// client wait.
	Await bool `json:"await,omitempty"`
}
