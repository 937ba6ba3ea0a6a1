package helper

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

// The exchange program makes sessions: it is the driver in mode session, one process for each session, so that helpers need no
// code for token services. Nothing secret is in its arguments or its environment. It
//
//   - makes itself not dumpable and then prints the line "ready",
//   - reads an order (credentials.Order) as one line of JSON,
//   - prints one line of JSON, a credentials.Reply; the expiry of the keys is by this machine's clock.
//
// The client has the same uid. If the program belongs to root and its user may execute but not read it (mode 0711, as the
// driver installs it), the kernel never makes the process dumpable (execve(2), ptrace(2)), so other processes of that user
// cannot look into it. If the program is readable, as in a developer's directory, a client could attach before "ready". The
// helper notices a tracer and sends no order; it does not notice that /proc/<pid>/mem is open. The driver reports that risk
// when it starts.
const (
	// ExchangeProgram is the file name of the exchange program, and ExchangeMode its argument.
	ExchangeProgram = "s3-csi-driver"
	ExchangeMode    = "session"

	exchangeTimeout = 30 * time.Second
	// exchangeKillGrace is how long to wait for a killed program.
	exchangeKillGrace = 5 * time.Second
	// maxAnswer and maxStderr bound a line of its output and its standard error, in bytes.
	maxAnswer = 32 << 10
	maxStderr = 4 << 10
)

// ExchangeBeside returns the path of the exchange program in the directory of this program.
func ExchangeBeside() (string, error) {
	own, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the exchange program: %w", err)
	}
	return filepath.Join(filepath.Dir(own), ExchangeProgram), nil
}

type exchanger struct {
	program string
	timeout time.Duration
	// untraced refuses a process that another one may look into; nil if none can.
	untraced func(pid int) error
	// restricted calls a function that starts a process within that process's sandbox.
	restricted func(c sandbox.Child, start func() error) error
}

func newExchanger(program string, restricted func(sandbox.Child, func() error) error) *exchanger {
	x := &exchanger{program: program, timeout: exchangeTimeout, restricted: restricted}
	if unix.Access(program, unix.R_OK) == nil {
		x.untraced = untraced
	}
	return x
}

func untraced(pid int) error {
	status, err := proc.ReadStatus(pid)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// With hidepid, /proc hides processes that this user may not trace.
		return fault.Errorf(fault.Precondition, "cannot determine whether another process traces it, because /proc is mounted with hidepid; "+
			"make the program readable only for root (chmod 0711)")
	case err != nil:
		return err
	}
	switch tracer := status.Field("TracerPid"); tracer {
	case "0":
		return nil
	case "":
		return errors.New("no TracerPid in its status")
	default:
		return fault.Errorf(fault.Denied, "process %s traces it, so the order was not sent", tracer)
	}
}

func (x *exchanger) make(ctx context.Context, order credentials.Order) (credentials.Keys, error) {
	message, err := json.Marshal(order)
	if err != nil {
		return credentials.Keys{}, fault.Errorf(fault.Invalid, "encode the order: %w", err)
	}
	keys, err := x.run(ctx, append(message, '\n'), exchangeSandbox(x.program, order))
	if err != nil && fault.KindOf(err) == fault.Unknown {
		err = fmt.Errorf("make a session with %s: %w", x.program, err)
	}
	return keys, err
}

// run starts the program, sends it the order, reads its answer and kills its remaining processes.
func (x *exchanger) run(ctx context.Context, order []byte, c sandbox.Child) (credentials.Keys, error) {
	p, err := x.start(c)
	if err != nil {
		return credentials.Keys{}, err
	}
	raiseOOMScore(p.cmd.Process.Pid)
	bounded, cancel := context.WithTimeout(ctx, x.timeout)
	defer cancel()
	stop := context.AfterFunc(bounded, p.close)
	keys, err := p.converse(order, x.untraced)
	stop()
	stderr, ended := p.end()
	switch {
	case err == nil || fault.KindOf(err) != fault.Unknown:
		return keys, err
	case ctx.Err() != nil:
		return keys, ctx.Err()
	case bounded.Err() != nil:
		return keys, fault.Errorf(fault.Timeout, "no session within %s: the token service does not answer", x.timeout)
	case !ended:
		err = fmt.Errorf("%w; the program was killed but is blocked in the kernel", err)
	case stderr != "":
		err = fmt.Errorf("%w; stderr: %s", err, stderr)
	}
	return keys, err
}

// exchangeProcess is the program in a process group of its own, with pipes as its only descriptors.
type exchangeProcess struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    io.ReadCloser
	stderr beginning
}

// beginning keeps the first maxStderr bytes that are written to it.
type beginning []byte

func (b *beginning) Write(p []byte) (int, error) {
	*b = append(*b, p[:min(len(p), maxStderr-len(*b))]...)
	return len(p), nil
}

func (x *exchanger) start(c sandbox.Child) (*exchangeProcess, error) {
	p := &exchangeProcess{cmd: exec.Command(x.program, ExchangeMode)} //nolint:noctx,gosec // end kills its whole group; the driver installs it
	p.cmd.Dir, p.cmd.Env, p.cmd.Stderr, p.cmd.WaitDelay = "/", exchangeEnvironment(), &p.stderr, outputGrace
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var inErr, outErr error
	p.in, inErr = p.cmd.StdinPipe()
	p.out, outErr = p.cmd.StdoutPipe()
	p.cmd.Err = errors.Join(inErr, outErr) // which Start returns
	err := x.restricted(c, p.cmd.Start)
	if err == nil {
		return p, nil
	}
	err = fmt.Errorf("start the exchange program: %w", err)
	for _, lasting := range []error{unix.ENOENT, unix.EACCES, unix.EPERM, unix.ENOEXEC, unix.ENOTDIR} {
		if errors.Is(err, lasting) {
			return nil, fault.Errorf(fault.Precondition, "%w", err)
		}
	}
	return nil, err // transient, such as a limit of the mount: memory, tasksMax
}

// exchangeEnvironment limits the program's memory and keeps it from sources of credentials other than the order.
func exchangeEnvironment() []string {
	return append(noOtherSources(), "GOMAXPROCS=1", "GOMEMLIMIT=24MiB")
}

// converse waits until the program is ready, sends it the order and reads its answer.
func (p *exchangeProcess) converse(order []byte, untraced func(pid int) error) (credentials.Keys, error) {
	out := bufio.NewReaderSize(p.out, maxAnswer)
	line, err := out.ReadSlice('\n')
	if err != nil {
		return credentials.Keys{}, fmt.Errorf("waiting for it to become ready: %w", brokenOff(err))
	}
	if string(line) != "ready\n" {
		return credentials.Keys{}, errors.New("unexpected first line: not the exchange program of this helper")
	}
	if untraced != nil {
		if err := untraced(p.cmd.Process.Pid); err != nil {
			return credentials.Keys{}, fault.Errorf(fault.KindOf(err), "the exchange program: %w", err)
		}
	}
	// Ignored for now: if it has exited, its stderr has the reason.
	_, writeErr := p.in.Write(order)
	_ = p.in.Close()
	line, err = out.ReadSlice('\n')
	if err != nil {
		return credentials.Keys{}, errors.Join(fmt.Errorf("no answer: %w", brokenOff(err)), writeErr)
	}
	var a credentials.Reply
	if err := json.Unmarshal(line, &a); err != nil {
		return credentials.Keys{}, errors.New("malformed answer") // without the text, which may hold secrets
	}
	switch {
	case a.Error != nil:
		return credentials.Keys{}, a.Error.Err()
	case a.Keys == nil:
		return credentials.Keys{}, errors.New("answer without keys")
	}
	return *a.Keys, nil
}

func brokenOff(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the program exited")
	case errors.Is(err, bufio.ErrBufferFull):
		return errors.New("output line too long")
	}
	return err
}

// end kills the program and its children. It returns the program's stderr and reports whether it has exited.
func (p *exchangeProcess) end() (stderr string, ended bool) {
	p.close()
	killGroup(p.cmd.Process.Pid) // not reaped yet, so the pid is still its own
	reaped := make(chan struct{})
	go func() {
		defer close(reaped)
		_ = p.cmd.Wait()
	}()
	select {
	case <-reaped:
		text := clean(bytes.ReplaceAll(p.stderr, []byte("\n"), []byte(" ")))
		return strings.Join(strings.Fields(text), " "), true
	case <-time.After(exchangeKillGrace):
		return "", false
	}
}

// close ends the conversation, also one in progress.
func (p *exchangeProcess) close() {
	_ = p.in.Close()
	_ = p.out.Close()
}
