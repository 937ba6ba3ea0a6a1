package helper

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ProtocolVersion is the newest protocol of this package.
//
// A connection carries one request and one reply, each a JSON object after its length in four bytes, big endian. A start
// request has the FUSE descriptor on its first byte. Every message names the lowest protocol that can understand it. Both
// sides ignore unknown fields, and a helper answers an unknown operation with an error of kind "unsupported", so new fields
// and operations need no new protocol; a new meaning does. The operations:
//
//	hello        the status
//	start        run a client on the descriptor
//	status       the status when its revision differs from since
//	credentials  replace the keys, the order, or both
//	end          the mount is ending; the client's exit is expected
//	kill         kill a running client and keep the helper
//	quit         kill a running client and exit
const ProtocolVersion = 1

// maxMessage bounds a message without its length, in bytes. The largest have a token service's CA bundle.
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
	Protocol int               `json:"protocol"`
	Op       string            `json:"op"`
	Since    uint64            `json:"since,omitempty"` // status: answer when the revision differs
	Start    *StartRequest     `json:"start,omitempty"`
	Keys     credentials.Keys  `json:"keys,omitzero"`  // start, credentials
	Order    credentials.Order `json:"order,omitzero"` // start, credentials
}

type reply struct {
	Protocol int            `json:"protocol"`
	Error    *fault.Message `json:"error,omitempty"`
	Status   *Status        `json:"status,omitempty"`
}

// encode returns a whole message: length and JSON.
func encode(message any) ([]byte, error) {
	body, err := json.Marshal(message)
	if err != nil {
		return nil, fmt.Errorf("encode a helper message: %w", err)
	}
	if len(body) > maxMessage {
		return nil, fault.Errorf(fault.Invalid, "message for the helper has %d bytes, the maximum is %d; shorten the mount options or the CA bundle of the token service", len(body), maxMessage)
	}
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body))), body...), nil
}

// bodySize reads the length in front of a message.
func bodySize(head [4]byte) (int, error) {
	n := binary.BigEndian.Uint32(head[:])
	if n == 0 || n > maxMessage {
		return 0, fault.Errorf(fault.Invalid, "message length %d is not between 1 and %d", n, maxMessage)
	}
	return int(n), nil
}

// decodeRequest decodes a request and refuses protocols that this helper does not know.
func decodeRequest(body []byte) (request, error) {
	// The protocol first: a newer request may not even have this shape.
	var version struct {
		Protocol int `json:"protocol"`
	}
	if err := json.Unmarshal(body, &version); err != nil {
		return request{}, fault.Errorf(fault.Invalid, "the request is not JSON of this protocol")
	}
	if version.Protocol < 1 {
		return request{}, fault.Errorf(fault.Invalid, "the request names no protocol")
	}
	if version.Protocol > ProtocolVersion {
		return request{}, fault.Errorf(fault.Unsupported, "the request needs protocol %d and this helper knows up to %d, because an older driver started it; unpublish and republish the volume", version.Protocol, ProtocolVersion)
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
	n, err := bodySize(head)
	if err != nil {
		return reply{}, err
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return reply{}, fmt.Errorf("the helper's answer is incomplete: %w", err)
	}
	var rep reply
	if err := json.Unmarshal(body, &rep); err != nil {
		return reply{}, fmt.Errorf("decode the helper's answer: %w", err)
	}
	if rep.Protocol > ProtocolVersion {
		return reply{}, fault.Errorf(fault.Unsupported, "the helper answered in protocol %d and this driver knows up to %d", rep.Protocol, ProtocolVersion)
	}
	return rep, nil
}
