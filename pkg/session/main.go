package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Mode is the argument that makes the driver's program make one session.
const Mode = "session"

// maxOrder bounds an order's JSON, in bytes: a CA bundle is most of the largest.
const maxOrder = 8 << 20

// MainBound is what the mode may take as a whole.
const MainBound = 30 * time.Second

// Reply is what the mode answers: keys or an error.
type Reply struct {
	Keys  *credentials.Keys `json:"keys,omitempty"`
	Error *ReplyError       `json:"error,omitempty"`
}

// ReplyError is an error with the name of its fault kind, as helpers write them.
type ReplyError struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// Main is the internal mode session of a program of that version: it shuts this process off from others of its user, says "ready" on a line of its own, reads
// an order as JSON, makes one session and answers with a Reply as one line of JSON. Helpers run it for each renewal. An error is
// one of the protocol; that no session could be made is an answer.
func Main(ctx context.Context, version string, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, MainBound)
	defer cancel()
	if err := Shut(); err != nil {
		return err
	}
	if _, err := io.WriteString(out, "ready\n"); err != nil {
		return fmt.Errorf("say that the order can come: %w", err)
	}
	var o credentials.Order
	// What was read is not repeated: it is secret.
	if err := json.NewDecoder(io.LimitReader(in, maxOrder)).Decode(&o); err != nil || o.IsZero() {
		return errors.New("what came is no order for a session")
	}
	m := NewMaker(version)
	defer m.Close()
	keys, err := m.Make(ctx, o)
	r := Reply{Keys: &keys}
	if err != nil {
		r = Reply{Error: &ReplyError{kindName(fault.KindOf(err)), err.Error()}}
	}
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	if _, err := out.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	return nil
}

// Shut keeps other processes of this user from looking into this one (ptrace(2), proc(5)), and its memory out of core dumps.
func Shut() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("make this process one that others cannot look into: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	return nil
}

// kindName is a fault kind as helpers name it.
func kindName(k fault.Kind) string {
	switch k {
	case fault.Denied:
		return "denied"
	case fault.Unauthenticated:
		return "unauthenticated"
	case fault.Precondition:
		return "precondition"
	case fault.Busy:
		return "busy"
	case fault.Timeout:
		return "timeout"
	case fault.Invalid:
		return "invalid"
	}
	return "unavailable"
}
