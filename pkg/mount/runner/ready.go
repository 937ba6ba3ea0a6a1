package runner

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// exitReport is how long a failed first read waits for a report that the client has exited.
const exitReport = 500 * time.Millisecond

// exitUsage is the exit code of programs for invalid command lines.
const exitUsage = 2

// awaitReady waits until a directory read through the mount succeeds, or the client exits: then the error has its output. The read
// begins when the client has its session: a driver that is killed does not exit while a client leaves its read without an answer.
func (r *Runner) awaitReady(ctx context.Context, m state.Mount, status helper.Status, session <-chan struct{}) error {
	peer := r.Peer(m.Name)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	read, exited := make(chan error, 1), make(chan error, 1)
	go func() {
		select {
		case <-session:
			read <- r.Namespace.ReadRoot(host.For(ctx, m.Account()), r.Store.SourceDir(m.Name))
		case <-ctx.Done():
			read <- ctx.Err()
		}
	}()
	go func() {
		for status.State == helper.StateRunning {
			next, err := peer.WaitStatus(ctx, status.Revision)
			if ctx.Err() != nil {
				return // the read has ended, too, and its error is reported
			}
			if err != nil {
				exited <- fault.Errorf(fault.Unavailable, "client %s: its helper exited: %w", m.Client, err)
				return
			}
			status = next
		}
		exited <- exitedEarly(m.Client, status)
	}()
	select {
	case err := <-exited:
		return err
	case err := <-read:
		if err == nil {
			return nil
		}
		// If the read failed because the client exited, its output is the better report, and follows. If the client runs and
		// cannot list its bucket, only the read reports that.
		patience := exitReport
		if isConnectionGone(err) {
			patience = killBound
		}
		select {
		case why := <-exited:
			return why
		case <-time.After(patience):
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			err = fault.See(pageClients, fault.Errorf(fault.Timeout, "client %s did not answer within %s", m.Client, r.MountTimeout))
		}
		return fmt.Errorf("reading the root of the new mount: %w%s", err, r.outputSoFar(ctx, m))
	}
}

// pageClients explains errors of clients.
const pageClients = "docs/reference/errors.md#publishing-clients-and-the-node"

// unknownFlag matches the output of a client that does not support a flag of another version.
var unknownFlag = regexp.MustCompile(`(?:unexpected argument '|flag provided but not defined: )-{0,2}([a-z0-9-]+)`)

// exitedEarly returns the error of a client that exited before its mount was ready.
func exitedEarly(name string, s helper.Status) error {
	summary := ExitSummary(s)
	if m := unknownFlag.FindStringSubmatch(summary); m != nil && s.ExitCode == exitUsage {
		return fault.Errorf(fault.Precondition, "client %s does not support the flag --%s, so its version does not match the driver's: "+
			"install the program from the driver's image, or remove the mount option: %s", name, m[1], summary)
	}
	return fault.See(pageClients, fault.Errorf(fault.Unavailable, "client %s exited before the mount was ready: %s", name, summary))
}

func (r *Runner) outputSoFar(ctx context.Context, m state.Mount) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	status, err := r.Peer(m.Name).Status(ctx)
	if err != nil || len(status.Tail) == 0 {
		return ""
	}
	return "; output of client " + m.Client + ": " + strings.Join(status.Tail, " | ")
}

// ExitSummary returns a client's exit status and last output for a message.
func ExitSummary(s helper.Status) string {
	how := fmt.Sprintf("exit status %d", s.ExitCode)
	if s.Signal != "" {
		how = "signal " + s.Signal
	}
	if len(s.Tail) == 0 {
		return how + " (no output)"
	}
	return how + ": " + strings.Join(s.Tail, " | ")
}

// ExitedAbnormally reports whether a client exited with an error or by a signal.
func ExitedAbnormally(s helper.Status) bool { return s.ExitCode != 0 || s.Signal != "" }

func isConnectionGone(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED)
}
