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
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
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
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// With hidepid, /proc hides processes that this user may not trace.
		return fault.Errorf(fault.Precondition, "cannot determine whether another process traces it, because /proc is mounted with hidepid; make the program readable only for root (chmod 0711)")
	case err != nil:
		return err
	}
	for line := range bytes.Lines(status) {
		if tracer, ok := bytes.CutPrefix(line, []byte("TracerPid:")); ok {
			if tracer = bytes.TrimSpace(tracer); string(tracer) != "0" {
				return fault.Errorf(fault.Denied, "process %s traces it, so the order was not sent", tracer)
			}
			return nil
		}
	}
	return errors.New("no TracerPid in its status")
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
	var p *exchangeProcess
	err := x.restricted(c, func() (err error) {
		p, err = startExchange(x.program)
		return err
	})
	if err != nil {
		return credentials.Keys{}, err
	}
	raiseOOMScore(p.process.Pid)
	defer p.close()
	deadline := time.Now().Add(x.timeout)
	p.setDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { p.setDeadline(time.Unix(1, 0)) })
	defer stop()
	keys, err := p.converse(order, x.untraced)
	stderr, ended := p.end()
	switch {
	case err == nil || fault.KindOf(err) != fault.Unknown && !errors.Is(err, os.ErrDeadlineExceeded):
		return keys, err
	case ctx.Err() != nil:
		return keys, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return keys, fault.Errorf(fault.Timeout, "no session within %s: the token service does not answer", x.timeout)
	case stderr != "":
		err = fmt.Errorf("%w; stderr: %s", err, stderr)
	}
	if !ended {
		err = fmt.Errorf("%w; the program was killed but is blocked in the kernel", err)
	}
	return keys, err
}

type exchangeProcess struct {
	process     *os.Process
	in          *os.File // its standard input
	out, errors *os.File
}

// startExchange starts the program in a process group of its own, with pipes as its only descriptors.
func startExchange(program string) (*exchangeProcess, error) {
	p := &exchangeProcess{}
	var theirs [3]*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
	}()
	var errs [3]error
	theirs[0], p.in, errs[0] = os.Pipe()
	p.out, theirs[1], errs[1] = os.Pipe()
	p.errors, theirs[2], errs[2] = os.Pipe()
	err := errors.Join(errs[:]...)
	if err != nil {
		p.close()
		return nil, fmt.Errorf("create pipes: %w", err)
	}
	p.process, err = os.StartProcess(program, []string{program, ExchangeMode}, &os.ProcAttr{
		Dir:   "/",
		Env:   exchangeEnvironment(),
		Files: theirs[:],
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		p.close()
		err = fmt.Errorf("start the exchange program: %w", err)
		for _, lasting := range []error{unix.ENOENT, unix.EACCES, unix.EPERM, unix.ENOEXEC, unix.ENOTDIR} {
			if errors.Is(err, lasting) {
				return nil, fault.Errorf(fault.Precondition, "%w", err)
			}
		}
		return nil, err // transient, such as a limit of the mount: memory, tasksMax
	}
	return p, nil
}

// exchangeEnvironment limits the program's memory and keeps it from sources of credentials other than the order.
func exchangeEnvironment() []string {
	return append(noOtherSources(), "GOMAXPROCS=1", "GOMEMLIMIT=24MiB")
}

func (p *exchangeProcess) setDeadline(t time.Time) {
	for _, f := range []*os.File{p.in, p.out, p.errors} {
		_ = f.SetDeadline(t)
	}
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
		if err := untraced(p.process.Pid); err != nil {
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
	killGroup(p.process.Pid) // not reaped yet, so the pid is still its own
	reaped := make(chan struct{})
	go func() {
		defer close(reaped)
		_, _ = p.process.Wait()
	}()
	timer := time.NewTimer(exchangeKillGrace)
	defer timer.Stop()
	select {
	case <-reaped:
		ended = true
	case <-timer.C:
	}
	_ = p.errors.SetDeadline(time.Now().Add(outputGrace))
	text, _ := io.ReadAll(io.LimitReader(p.errors, maxStderr))
	return strings.Join(strings.Fields(clean(bytes.ReplaceAll(text, []byte("\n"), []byte(" ")))), " "), ended
}

func (p *exchangeProcess) close() {
	for _, f := range []*os.File{p.in, p.out, p.errors} {
		_ = f.Close()
	}
}
