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

// Mode is the driver's argument for making one session.
const Mode = "session"

// maxOrder bounds an order's JSON, in bytes. The largest have a CA bundle.
const maxOrder = 8 << 20

// MainBound bounds the duration of the mode.
const MainBound = 30 * time.Second

// Main is the internal mode session, which helpers run for each renewal. It makes this process not dumpable, prints the line
// "ready", reads an order as JSON, makes one session and prints a credentials.Reply as one line of JSON. Errors are those of
// the protocol: a session that could not be made is a reply.
func Main(ctx context.Context, version string, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, MainBound)
	defer cancel()
	if err := Shut(); err != nil {
		return err
	}
	if _, err := io.WriteString(out, "ready\n"); err != nil {
		return fmt.Errorf("print ready: %w", err)
	}
	var o credentials.Order
	// The error does not repeat the input, which is secret.
	if err := json.NewDecoder(io.LimitReader(in, maxOrder)).Decode(&o); err != nil || o.IsZero() {
		return errors.New("the input is not an order")
	}
	m := NewMaker(version)
	defer m.Close()
	keys, err := m.Make(ctx, o)
	r := credentials.Reply{Keys: &keys}
	if err != nil {
		r = credentials.Reply{Error: fault.MessageOf(err)}
	}
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("print the reply: %w", err)
	}
	if _, err := out.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("print the reply: %w", err)
	}
	return nil
}

// Shut makes this process not dumpable (ptrace(2), proc(5)) and disables core dumps.
func Shut() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("make the process not dumpable: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("disable core dumps: %w", err)
	}
	return nil
}
