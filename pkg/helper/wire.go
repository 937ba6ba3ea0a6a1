package helper

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ProtocolVersion is the newest protocol of this package.
//
// A connection carries one request and one reply, each a JSON object after its length in four bytes, big endian. Every
// message says the lowest protocol that can understand it. Both sides ignore fields that they do not know, so a new
// field needs no new protocol; a new meaning does. A start request carries the FUSE descriptor with its first byte. A
// new operation needs no new protocol either: a helper answers one that it does not know with an error of the kind
// "unsupported" and does nothing. The operations:
//
//	hello        the status
//	start        run a client on the descriptor that comes along
//	status       the status, once its revision differs from since
//	credentials  replace the keys, what sessions are made from, or both
//	end          the mount is about to go; the client's exit is expected from now on
//	kill         kill the client, if one runs, and live on (later than the others: the first helpers do not know it)
//	quit         kill the client and end
const ProtocolVersion = 1

// maxMessage bounds a message without its length, in bytes. The largest carry a token service's CA bundle; helpers from
// before orders take a quarter.
const maxMessage = 1 << 20

const (
	opHello       = "hello"
	opStart       = "start"
	opStatus      = "status"
	opCredentials = "credentials"
	opEnd         = "end"
	opKill        = "kill"
	opQuit        = "quit"
)

type request struct {
	Protocol int        `json:"protocol"`
	Op       string     `json:"op"`
	Since    uint64     `json:"since,omitempty"` // status: answer when the revision differs
	Start    *wireStart `json:"start,omitempty"`
	Keys     *wireKeys  `json:"keys,omitempty"` // start, credentials
	// Order, of start and credentials, is unknown to the first helpers, which ignore it.
	Order *credentials.Order `json:"order,omitempty"`
}

type wireStart struct {
	Client string   `json:"client"`
	Argv   []string `json:"argv"`
	Env    []string `json:"env"`
}

type wireKeys struct {
	AccessKeyID     string    `json:"accessKeyID"`
	SecretAccessKey string    `json:"secretAccessKey"`
	SessionToken    string    `json:"sessionToken,omitempty"`
	Expires         time.Time `json:"expires,omitzero"`
}

type reply struct {
	Protocol int        `json:"protocol"`
	Error    *wireError `json:"error,omitempty"`
	Status   *Status    `json:"status,omitempty"`
}

type wireError struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// kindNames are the fault kinds that travel; a name that the other side does not know is Unknown there.
func kindNames() map[fault.Kind]string {
	return map[fault.Kind]string{
		fault.Invalid:         "invalid",
		fault.Exists:          "exists",
		fault.Precondition:    "precondition",
		fault.Busy:            "busy",
		fault.Denied:          "denied",
		fault.Unauthenticated: "unauthenticated",
		fault.Unavailable:     "unavailable",
		fault.Timeout:         "timeout",
		fault.Unsupported:     "unsupported",
	}
}

func newWireError(err error) *wireError {
	return &wireError{Kind: kindNames()[fault.KindOf(err)], Text: err.Error()}
}

func (e *wireError) fault() error {
	for kind, name := range kindNames() {
		if name == e.Kind {
			return fault.Errorf(kind, "%s", e.Text)
		}
	}
	return errors.New(e.Text)
}

func newWireKeys(k credentials.Keys) *wireKeys {
	return &wireKeys{AccessKeyID: k.AccessKeyID, SecretAccessKey: k.SecretAccessKey, SessionToken: k.SessionToken, Expires: k.Expires}
}

func (k *wireKeys) keys() credentials.Keys {
	if k == nil {
		return credentials.Keys{}
	}
	return credentials.Keys{AccessKeyID: k.AccessKeyID, SecretAccessKey: k.SecretAccessKey, SessionToken: k.SessionToken, Expires: k.Expires}
}

// newWireOrder is nil for no order.
func newWireOrder(o credentials.Order) *credentials.Order {
	if o.IsZero() {
		return nil
	}
	return &o
}

// order is what a request brings to make sessions from; zero: nothing.
func (r request) order() credentials.Order {
	if r.Order == nil {
		return credentials.Order{}
	}
	return *r.Order
}

func (s *wireStart) command() client.Command { return client.Command{Argv: s.Argv, Env: s.Env} }

// encode makes a whole message: length and JSON.
func encode(message any) ([]byte, error) {
	body, err := json.Marshal(message)
	if err != nil {
		return nil, fmt.Errorf("encode a helper message: %w", err)
	}
	if len(body) > maxMessage {
		return nil, fault.Errorf(fault.Invalid, "a message for the helper has %d bytes, more than the %d that are allowed: shorten the mount's options, or the CA bundle of its token service", len(body), maxMessage)
	}
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body))), body...), nil
}

// bodySize reads the length in front of a message.
func bodySize(head [4]byte) (int, error) {
	n := binary.BigEndian.Uint32(head[:])
	if n == 0 || n > maxMessage {
		return 0, fault.Errorf(fault.Invalid, "a message says that it has %d bytes; 1 to %d are allowed", n, maxMessage)
	}
	return int(n), nil
}

// decodeRequest reads a request's JSON and refuses what this helper cannot understand.
func decodeRequest(body []byte) (request, error) {
	// The protocol first: a newer request may not even have this shape.
	var version struct {
		Protocol int `json:"protocol"`
	}
	if err := json.Unmarshal(body, &version); err != nil {
		return request{}, fault.Errorf(fault.Invalid, "the request is not a message of this protocol")
	}
	if version.Protocol < 1 {
		return request{}, fault.Errorf(fault.Invalid, "the request says no protocol")
	}
	if version.Protocol > ProtocolVersion {
		return request{}, fault.Errorf(fault.Unsupported, "the request is of protocol %d and this helper speaks up to %d: it was started by an older driver; end the mount and publish it again", version.Protocol, ProtocolVersion)
	}
	var req request
	if err := json.Unmarshal(body, &req); err != nil {
		// json's errors name fields and types, never values beyond a short literal; keep even those out.
		return request{}, fault.Errorf(fault.Invalid, "the request's fields have wrong types")
	}
	return req, nil
}

// readReply reads a whole reply. io.EOF means that not one byte came.
func readReply(r io.Reader) (reply, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return reply{}, err
	}
	n, err := bodySize(head)
	if err != nil {
		return reply{}, err
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return reply{}, fmt.Errorf("the helper's answer breaks off: %w", err)
	}
	var rep reply
	if err := json.Unmarshal(body, &rep); err != nil {
		return reply{}, fmt.Errorf("the helper's answer cannot be read: %w", err)
	}
	if rep.Protocol > ProtocolVersion {
		return reply{}, fault.Errorf(fault.Unsupported, "the helper answered in protocol %d and this driver speaks up to %d", rep.Protocol, ProtocolVersion)
	}
	return rep, nil
}
