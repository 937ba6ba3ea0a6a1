package helper

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// options are what a helper is made from; tests replace the parts that need a real mount.
type options struct {
	name, stateDir string
	version        string // of the program
	stderr         *os.File
	now            func() time.Time
	lookup         func(name string) (client.Client, error)
	checkFuse      func(*os.File) error
	idleLimit      time.Duration // without a client and without a question
	endGrace       time.Duration // after the end, for somebody to read the final status
	idleQueue      time.Duration // for how long a client does nothing before a helper that was asked to stop ends it:
	idleSilent     time.Duration // one that says what it has left to store, and one that does not
	// exchange makes a session from an order. It is bounded. nil: there is nothing that makes sessions.
	exchange func(context.Context, credentials.Order) (credentials.Keys, error)
	random   func() float64 // at least 0, less than 1
}

// helper is the state of a helper process. Everything below mu is changed under it only.
type helper struct {
	options
	scrub    *scrubber
	log      *logger
	endpoint *endpoint
	tail     *tail
	done     chan struct{}  // closed when the helper has to end
	killed   chan struct{}  // closed by the first quit request
	wake     chan struct{}  // to renew
	runs     sync.WaitGroup // of clients' readers and waiters

	mu        sync.Mutex
	status    Status
	session   session
	changed   chan struct{} // closed and replaced with each revision
	lastTalk  time.Time     // of the latest request, and of the end
	waiting   int           // status requests that wait
	pgid      int           // of the running client
	stopping  bool          // SIGTERM: end when there is no client
	quitting  bool          // a quit request: likewise, and the client is killed
	condemned bool          // the running client was killed for a kill request
	released  bool          // the running client was killed because it had nothing left to do
	told      bool          // the final status was read
	finished  bool          // done is closed
}

func newHelper(o options) (*helper, error) {
	scrub := &scrubber{}
	log := newLogger(o.stderr, scrub, o.now)
	ep, err := newEndpoint(log, o.now)
	if err != nil {
		return nil, err
	}
	scrub.hold(o.now(), "endpoint", ep.token)
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return nil, errors.Join(fmt.Errorf("make a salt: %w", err), ep.listener.Close())
	}
	h := &helper{
		options: o, scrub: scrub, log: log, endpoint: ep, tail: &tail{}, wake: make(chan struct{}, 1),
		done: make(chan struct{}), killed: make(chan struct{}), changed: make(chan struct{}), lastTalk: o.now(),
		status:  Status{Protocol: ProtocolVersion, Version: o.version, PID: os.Getpid(), Revision: 1, State: StateIdle},
		session: session{random: o.random, salt: salt},
	}
	ep.inVain = h.inVain
	return h, nil
}

// bump tells everybody who waits that the status changed. Call under mu.
func (h *helper) bump() {
	h.status.Revision++
	close(h.changed)
	h.changed = make(chan struct{})
	h.settle()
}

// settle ends the helper when nothing keeps it. Call under mu.
func (h *helper) settle() {
	if h.finished || h.status.State == StateRunning {
		return
	}
	if h.quitting || h.stopping || h.status.Ending && h.told && !h.endedBadly() {
		h.finished = true
		close(h.done)
	}
}

// endedBadly tells whether the last client may have left something undone: then it can be started again even while the
// mount is ending, and the keys for that are kept. Call under mu.
func (h *helper) endedBadly() bool {
	return h.status.State == StateExited && (h.status.ExitCode != 0 || h.status.Signal != "")
}

// snapshot is the status and the channel that tells of the next one.
func (h *helper) snapshot() (Status, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.status
	if s.Queue != nil {
		q := *s.Queue
		s.Queue = &q
	}
	s.Tail = h.tail.snapshot()
	if h.exchange != nil {
		s.Session = h.session.status(h.now())
	}
	return s, h.changed
}

// talked notes that the driver is interested in this helper; waiters is by how much the number of waiting requests
// changes.
func (h *helper) talked(waiters int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lastTalk = h.now()
	h.waiting += waiters
}

// delivered notes that somebody read this status.
func (h *helper) delivered(s Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.Ending && s.State != StateRunning {
		h.told = true
		h.settle()
	}
}

// start runs a client and takes over fuse.
func (h *helper) start(req StartRequest, fuse *os.File) error {
	defer fuse.Close()
	if err := h.checkFuse(fuse); err != nil {
		return err
	}
	if err := checkCommand(req.Command); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.status.State == StateRunning:
		return fault.Errorf(fault.Exists, "a client runs already (pid %d)", h.status.ClientPID)
	case h.status.Ending && !h.endedBadly():
		return fault.Errorf(fault.Precondition, "the mount is ending: no client is started any more")
	case h.quitting || h.stopping:
		return fault.Errorf(fault.Precondition, "the helper is ending: no client is started any more")
	}
	c, err := h.lookup(req.Client)
	if err != nil {
		h.log.printf("client %q is not known to this helper: its upload queue will not be reported", req.Client)
	}
	if !req.Keys.IsZero() || h.exchange != nil && !req.Order.IsZero() {
		if err := h.give(req.Keys, req.Order); err != nil {
			return err
		}
	}
	if err := forgetEnd(h.stateDir); err != nil {
		h.log.printf("remove what an earlier client left: %v", err)
	}
	h.tail.reset()
	run, err := startProcess(req.Command, h.endpoint.env(), fuse)
	if err != nil {
		return fault.Errorf(fault.Precondition, "start the client %s: %w", req.Command.Argv[0], err)
	}
	h.log.printf("client %s started as pid %d", filepath.Base(req.Command.Argv[0]), run.process.Pid)
	h.pgid, h.condemned = run.process.Pid, false
	h.status.State, h.status.ClientPID = StateRunning, run.process.Pid
	h.status.ExitCode, h.status.Signal, h.status.Queue = 0, "", nil
	h.status.Starts++
	before := h.status.Conflicts
	h.bump()
	h.poke()
	h.runs.Go(func() {
		code, signal := run.wait(func(line []byte, cut bool) { h.output(line, cut, c, before) })
		h.exited(code, signal)
	})
	return nil
}

// output takes a line of the client's. Clients before it have put aside as many files as conflicts says.
func (h *helper) output(raw []byte, cut bool, c client.Client, conflicts int) {
	line := clean(raw)
	if c.Conflicts != nil {
		if n, ok := c.Conflicts(line); ok {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.status.Conflicts != conflicts+n {
				h.status.Conflicts = conflicts + n
				h.bump()
			}
			return
		}
	}
	if c.Queue != nil {
		if q, ok := c.Queue(line); ok {
			// Not kept as output: progress would push out the client's last words.
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.status.Queue == nil || *h.status.Queue != q {
				h.status.Queue = &q
				h.bump()
			}
			return
		}
	}
	line = shorten(h.scrub.scrub(line, cut))
	if line == "" {
		return
	}
	h.tail.add(line)
	h.log.line("client: " + line)
}

// exited notes the end of the running client.
func (h *helper) exited(code int, signal string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pgid = 0
	h.status.State, h.status.ClientPID = StateExited, 0
	h.status.ExitCode, h.status.Signal = code, signal
	h.lastTalk = h.now()
	h.log.printf("client ended: %s", describe(code, signal))
	h.recordEnd()
	h.bump()
}

// recordEnd writes how the last client ended. Call under mu.
func (h *helper) recordEnd() {
	end := End{Expected: h.status.Ending, Code: h.status.ExitCode, Signal: h.status.Signal, When: h.now().UTC(), Starts: h.status.Starts}
	if !end.Expected || end.Code != 0 {
		end.Tail = h.tail.snapshot()
		end.Reason = "the client ended " + describe(end.Code, end.Signal)
		switch {
		case h.quitting:
			end.Reason += " after the driver had told the helper to quit"
		case h.condemned:
			end.Reason += " after the driver had told the helper to kill it"
		case h.released:
			end.Reason += " because its helper was asked to stop and it had nothing left to store"
		case !end.Expected:
			end.Reason += " while it was mounted"
		}
	}
	if err := writeEnd(h.stateDir, end); err != nil {
		h.log.printf("record the client's end in %s: %v", h.stateDir, err)
	}
}

func describe(code int, signal string) string {
	if signal != "" {
		return "by signal " + signal
	}
	return fmt.Sprintf("with exit code %d", code)
}

// credentials replaces the client's keys, what its sessions are made from, or both.
func (h *helper) credentials(keys credentials.Keys, order credentials.Order) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.give(keys, order); err != nil {
		return err
	}
	if keys.IsZero() {
		h.log.printf("what sessions are made from was replaced")
	} else {
		h.log.printf("credentials replaced")
	}
	h.bump()
	return nil
}

// end notes that the mount is going.
func (h *helper) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.status.Ending {
		return
	}
	h.status.Ending = true
	h.log.printf("the mount is ending")
	if h.status.State != StateRunning {
		h.recordEnd()
	}
	h.bump()
}

// quit ends the helper, and kills a client that runs. The caller's answer goes out before.
func (h *helper) quit() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.quitting {
		h.quitting = true
		close(h.killed)
		h.log.printf("told to quit")
	}
	if h.pgid != 0 {
		killGroup(h.pgid)
	}
	h.settle()
}

// kill kills a client that runs. One that hangs in the kernel ends when its connection does; the status tells when.
func (h *helper) kill() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pgid == 0 {
		return
	}
	h.condemned = true
	h.log.printf("told to kill the client (pid %d)", h.pgid)
	killGroup(h.pgid)
}

// stop is a signal: ends the helper as soon as no client runs.
func (h *helper) stop(why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopping && h.status.State == StateRunning {
		h.log.printf("%s: will end when the client does", why)
	}
	h.stopping = true
	h.settle()
}

// checkCommand refuses what exec would misunderstand.
func checkCommand(c client.Command) error {
	if len(c.Argv) == 0 || !filepath.IsAbs(c.Argv[0]) {
		return fault.Errorf(fault.Invalid, "the client's command line does not begin with an absolute path")
	}
	for _, s := range c.Argv {
		if strings.IndexByte(s, 0) >= 0 {
			return fault.Errorf(fault.Invalid, "an argument of the client holds a NUL byte")
		}
	}
	for _, s := range c.Env {
		name, _, ok := strings.Cut(s, "=")
		if !ok || name == "" || strings.IndexByte(s, 0) >= 0 {
			return fault.Errorf(fault.Invalid, "the client's environment holds something other than NAME=value")
		}
	}
	return nil
}
