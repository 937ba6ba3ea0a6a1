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
)

// The program that makes sessions: the driver in a mode of its own, a process for each session, so that no helper carries
// along what speaking to a token service takes. Nothing secret is in its arguments or its environment. It
//
//   - makes itself not dumpable and then prints the line "ready",
//   - reads an order (credentials.Order) as one line of JSON,
//   - prints one line of JSON: {"keys": …} (credentials.Keys, with the end by this machine's clock), or
//     {"error": {"kind": …, "text": …}}, with the name of a fault kind as in a helper's answers.
//
// The client has the same uid. A process whose program its user may execute and not read (mode 0711, root's) is closed to
// others of the same user from its first instruction on: the kernel never makes it dumpable (execve(2), ptrace(2)). That is
// how the driver installs the program. Where it can be read, as in a developer's directory, there is a moment before "ready"
// in which a client could get a hold of the process. One that traces it is noticed, and no order is given; one that has opened
// its memory (/proc/<pid>/mem, which is checked only then) is not. The driver says so when it starts.
const (
	// ExchangeProgram is the file name of the program that makes sessions, and ExchangeMode its argument.
	ExchangeProgram = "s3-csi-driver"
	ExchangeMode    = "session"

	exchangeTimeout = 30 * time.Second
	// exchangeEnd is how long a killed program is waited for.
	exchangeEnd = 5 * time.Second
	// maxAnswer and maxComplaint bound a line of its output, and what is read of its standard error, in bytes.
	maxAnswer    = 32 << 10
	maxComplaint = 4 << 10
)

// ExchangeBeside is the program that makes sessions in the directory of this program.
func ExchangeBeside() (string, error) {
	own, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the program that makes sessions: %w", err)
	}
	return filepath.Join(filepath.Dir(own), ExchangeProgram), nil
}

// exchanger runs the program that makes sessions.
type exchanger struct {
	program string
	timeout time.Duration
	// untraced refuses a process that another one may have a hold of; nil where nobody can get one.
	untraced func(pid int) error
}

func newExchanger(program string) (*exchanger, error) {
	if err := unix.Access(program, unix.X_OK); err != nil {
		return nil, fmt.Errorf("%s cannot be executed: %w", program, err)
	}
	x := &exchanger{program: program, timeout: exchangeTimeout}
	if unix.Access(program, unix.R_OK) == nil {
		x.untraced = untraced
	}
	return x, nil
}

// untraced refuses a process that another one traces.
func untraced(pid int) error {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Hidden, as processes that cannot be traced are where /proc hides any.
		return fault.Errorf(fault.Precondition, "nobody can tell whether another process looks into it, because this user can read it and /proc hides it: "+
			"take the permission to read the program from all but root (chmod 0711)")
	case err != nil:
		return err
	}
	for line := range bytes.Lines(status) {
		if tracer, ok := bytes.CutPrefix(line, []byte("TracerPid:")); ok {
			if tracer = bytes.TrimSpace(tracer); string(tracer) != "0" {
				return fault.Errorf(fault.Denied, "process %s traces it, so nothing secret was given to it: look at what that process is", tracer)
			}
			return nil
		}
	}
	return errors.New("its status says nothing of a tracer")
}

// make asks the program for a session.
func (x *exchanger) make(ctx context.Context, order credentials.Order) (credentials.Keys, error) {
	message, err := json.Marshal(order)
	if err != nil {
		return credentials.Keys{}, fault.Errorf(fault.Invalid, "what sessions are made from cannot be passed on: %w", err)
	}
	keys, err := x.run(ctx, append(message, '\n'))
	if err != nil && fault.KindOf(err) == fault.Unknown {
		err = fmt.Errorf("make a session with %s: %w", x.program, err)
	}
	return keys, err
}

// run starts the program, gives it the order and takes its answer. It leaves nothing of it.
func (x *exchanger) run(ctx context.Context, order []byte) (credentials.Keys, error) {
	p, err := startExchange(x.program)
	if err != nil {
		return credentials.Keys{}, err
	}
	defer p.close()
	deadline := time.Now().Add(x.timeout)
	p.setDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { p.setDeadline(time.Unix(1, 0)) })
	defer stop()
	keys, err := p.converse(order, x.untraced)
	complaint, ended := p.end()
	switch {
	case err == nil || fault.KindOf(err) != fault.Unknown && !errors.Is(err, os.ErrDeadlineExceeded):
		return keys, err
	case ctx.Err() != nil:
		return keys, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return keys, fault.Errorf(fault.Timeout, "no session was made within %s: the token service does not answer", x.timeout)
	case complaint != "":
		err = fmt.Errorf("%w; it said: %s", err, complaint)
	}
	if !ended {
		err = fmt.Errorf("%w; it was killed and hangs in the kernel", err)
	}
	return keys, err
}

// exchangeProcess is the program while it runs.
type exchangeProcess struct {
	process     *os.Process
	in          *os.File // its standard input
	out, errors *os.File
}

// startExchange starts the program in a process group of its own, with pipes as its standard descriptors and nothing else.
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
		return nil, fmt.Errorf("make pipes: %w", err)
	}
	p.process, err = os.StartProcess(program, []string{program, ExchangeMode}, &os.ProcAttr{
		Dir:   "/",
		Env:   exchangeEnvironment(),
		Files: theirs[:],
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		p.close()
		err = fmt.Errorf("start the program that makes sessions: %w", err)
		for _, lasting := range []error{unix.ENOENT, unix.EACCES, unix.EPERM, unix.ENOEXEC, unix.ENOTDIR} {
			if errors.Is(err, lasting) {
				return nil, fault.Errorf(fault.Precondition, "%w", err)
			}
		}
		return nil, err // as a limit of the mount's that is reached for now: memory, or tasksMax
	}
	preferAsVictim(p.process.Pid)
	return p, nil
}

// exchangeEnvironment keeps the program small, and from every source of credentials but the order.
func exchangeEnvironment() []string {
	return append(noOtherSources(), "GOMAXPROCS=1", "GOMEMLIMIT=24MiB")
}

func (p *exchangeProcess) setDeadline(t time.Time) {
	for _, f := range []*os.File{p.in, p.out, p.errors} {
		_ = f.SetDeadline(t)
	}
}

// answer is the program's.
type answer struct {
	Keys  *credentials.Keys `json:"keys"`
	Error *wireError        `json:"error"`
}

// converse waits for the program to be ready, gives it the order and reads its answer.
func (p *exchangeProcess) converse(order []byte, untraced func(pid int) error) (credentials.Keys, error) {
	out := bufio.NewReaderSize(p.out, maxAnswer)
	line, err := out.ReadSlice('\n')
	if err != nil {
		return credentials.Keys{}, fmt.Errorf("it did not get ready: %w", brokenOff(err))
	}
	if string(line) != "ready\n" {
		return credentials.Keys{}, errors.New("it did not say that it is ready: it is not the program that belongs to this helper")
	}
	if untraced != nil {
		if err := untraced(p.process.Pid); err != nil {
			return credentials.Keys{}, fault.Errorf(fault.KindOf(err), "the program that makes sessions: %w", err)
		}
	}
	// One that has ended already says why.
	_, writeErr := p.in.Write(order)
	_ = p.in.Close()
	line, err = out.ReadSlice('\n')
	if err != nil {
		return credentials.Keys{}, errors.Join(fmt.Errorf("it did not answer: %w", brokenOff(err)), writeErr)
	}
	var a answer
	if err := json.Unmarshal(line, &a); err != nil {
		return credentials.Keys{}, errors.New("its answer cannot be read") // without the text, which may be of secrets
	}
	switch {
	case a.Error != nil:
		return credentials.Keys{}, a.Error.fault()
	case a.Keys == nil:
		return credentials.Keys{}, errors.New("its answer has no keys")
	}
	return *a.Keys, nil
}

func brokenOff(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("it ended")
	case errors.Is(err, bufio.ErrBufferFull):
		return errors.New("a line of its output is too long")
	}
	return err
}

// end kills the program, with what it may have started, and gives its last words and whether it has ended.
func (p *exchangeProcess) end() (complaint string, ended bool) {
	killGroup(p.process.Pid) // it is a child that nobody waits for yet: the number is still its own
	reaped := make(chan struct{})
	go func() {
		defer close(reaped)
		_, _ = p.process.Wait()
	}()
	timer := time.NewTimer(exchangeEnd)
	defer timer.Stop()
	select {
	case <-reaped:
		ended = true
	case <-timer.C:
	}
	_ = p.errors.SetDeadline(time.Now().Add(outputGrace))
	text, _ := io.ReadAll(io.LimitReader(p.errors, maxComplaint))
	return strings.Join(strings.Fields(clean(bytes.ReplaceAll(text, []byte("\n"), []byte(" ")))), " "), ended
}

func (p *exchangeProcess) close() {
	for _, f := range []*os.File{p.in, p.out, p.errors} {
		_ = f.Close()
	}
}
