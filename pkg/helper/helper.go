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

// options configure a helper. Tests replace the parts that need a real mount.
type options struct {
	args       Arguments
	version    string // of the program
	stderr     *os.File
	now        func() time.Time
	lookup     func(name string) (client.Client, error)
	checkFuse  func(*os.File) error
	idleLimit  time.Duration // without a client and without a request
	endGrace   time.Duration // after the client's exit, for the driver to read the final status
	idleQueue  time.Duration // how long a client must be idle before a helper that was asked to stop kills it:
	idleSilent time.Duration // a client that reports its upload queue, and one that does not
	cpuTime    func(pid int) (time.Duration, error)
	// exchange makes a session from an order. It is bounded.
	exchange func(context.Context, credentials.Order) (credentials.Keys, error)
	random   func() float64 // at least 0, less than 1
	callers  *callers       // nil: users of connections are unknown
}

// helper is the state of a helper process. mu guards everything below it.
type helper struct {
	options  options
	scrub    *scrubber
	log      *logger
	endpoint *endpoint
	tail     *tail
	done     chan struct{}  // closed when the helper must exit
	killed   chan struct{}  // closed by the first quit request
	wake     chan struct{}  // to renew
	runs     sync.WaitGroup // of clients' readers and waiters

	mu            sync.Mutex
	mount         Assignment
	unassigned    bool // a spare without a mount
	status        Status
	session       session
	changed       chan struct{} // closed and replaced with each revision
	lastActivity  time.Time     // of the latest request or the client's exit
	waiting       int           // status requests that wait
	pgid          int           // of the running client
	flushes       bool          // the running client reports flushes
	stopping      bool          // SIGTERM: exit when there is no client
	quitting      bool          // a quit request: likewise, and the client is killed
	killRequested bool          // the running client was killed for a kill request
	idleKilled    bool          // the running client was killed because it was idle
	finalRead     bool          // the final status was read
	finished      bool          // done is closed
}

func newHelper(o options) (*helper, error) {
	scrub := &scrubber{}
	log := newLogger(o.stderr, scrub, o.now)
	ep, err := newEndpoint(log, o.now, o.callers)
	if err != nil {
		return nil, err
	}
	scrub.setSecrets(o.now(), "endpoint", ep.token)
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return nil, errors.Join(fmt.Errorf("create a salt: %w", err), ep.listener.Close())
	}
	h := &helper{
		options: o, scrub: scrub, log: log, endpoint: ep, tail: &tail{}, wake: make(chan struct{}, 1),
		done: make(chan struct{}), killed: make(chan struct{}), changed: make(chan struct{}), lastActivity: o.now(),
		status:  Status{Protocol: ProtocolVersion, Version: o.version, PID: os.Getpid(), Revision: 1, State: StateIdle},
		session: session{random: o.random, salt: salt},
		mount:   Assignment{o.args.Name, o.args.StateDir, o.args.CacheDir}, unassigned: o.args.Spare,
	}
	ep.sessionMissing = h.sessionMissing
	return h, nil
}

// changeStatus starts a new revision and wakes requests that wait for it. Call under mu.
func (h *helper) changeStatus() {
	h.status.Revision++
	close(h.changed)
	h.changed = make(chan struct{})
	h.exitIfDone()
}

// exitIfDone ends the helper if nothing is left to do. Call under mu.
func (h *helper) exitIfDone() {
	if h.finished || h.status.State == StateRunning {
		return
	}
	// The driver asks for files that are not stored once more when the client has exited.
	if h.quitting || h.stopping || h.status.Ending && h.finalRead && !h.exitedAbnormally() && h.status.Unstored == nil {
		h.finished = true
		close(h.done)
	}
}

// exitedAbnormally reports whether the last client may have left uploads unfinished. Then another client can be started even
// while the mount is ending, and the keys are kept for it. Call under mu.
func (h *helper) exitedAbnormally() bool {
	return h.status.State == StateExited && (h.status.ExitCode != 0 || h.status.Signal != "")
}

// snapshot returns the status and a channel that is closed with the next revision.
func (h *helper) snapshot() (Status, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.status
	if s.Queue != nil {
		q := *s.Queue
		s.Queue = &q
	}
	s.Tail = h.tail.snapshot()
	s.Session = h.session.status(h.options.now())
	return s, h.changed
}

// noteRequest records that the driver still uses this helper. waiters is the change in the number of waiting requests.
func (h *helper) noteRequest(waiters int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lastActivity = h.options.now()
	h.waiting += waiters
}

func (h *helper) delivered(s Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.Ending && s.State != StateRunning {
		h.finalRead = true
		h.exitIfDone()
	}
}

// start runs a client. It closes fuse.
func (h *helper) start(req StartRequest, fuse *os.File) error {
	defer fuse.Close()
	if err := h.options.checkFuse(fuse); err != nil {
		return err
	}
	if err := checkCommand(req.Command); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.unassigned:
		return fault.Errorf(fault.Precondition, "cannot start a client: this spare helper has no mount yet")
	case h.status.State == StateRunning:
		return fault.Errorf(fault.Exists, "a client is already running (pid %d)", h.status.ClientPID)
	case h.status.Ending && !h.exitedAbnormally():
		return fault.Errorf(fault.Precondition, "cannot start a client: the mount is being unmounted")
	case h.quitting || h.stopping:
		return fault.Errorf(fault.Precondition, "cannot start a client: the helper is exiting")
	}
	c, err := h.options.lookup(req.Client)
	if err != nil { // a declared client
		h.log.printf("client does not report uploads: client=%q", req.Client)
	}
	if !req.Keys.IsZero() || !req.Order.IsZero() {
		if err := h.updateSession(req.Keys, req.Order); err != nil {
			return err
		}
	}
	h.endpoint.setAwaited(req.Await && h.session.keys.IsZero())
	if err := removeEnd(h.mount.StateDir); err != nil {
		h.log.printf("removing the previous exit record failed: %v", err)
	}
	env, err := h.clientCredentials(req.Command)
	if err != nil {
		return err
	}
	env = append(env, h.proxy(req)...)
	if req.Fusermount != "" {
		path, err := prepareFusermount(h.mount.StateDir, req.Fusermount)
		if err != nil {
			return fmt.Errorf("prepare the client's mount point: %w", err)
		}
		env = append(env, path...)
	}
	h.tail.reset()
	var run *run
	err = h.options.restricted(h.clientSandbox(req.Command), func() (err error) {
		run, err = startProcess(req.Command, env, fuse)
		return err
	})
	if err != nil {
		return fault.Errorf(fault.Precondition, "start the client %s: %w", req.Command.Argv[0], err)
	}
	raiseOOMScore(run.process.Pid)
	h.log.printf("client started: program=%s pid=%d", filepath.Base(req.Command.Argv[0]), run.process.Pid)
	h.pgid, h.killRequested, h.flushes = run.process.Pid, false, c.Flushed != nil
	h.status.State, h.status.ClientPID = StateRunning, run.process.Pid
	h.status.ExitCode, h.status.Signal, h.status.Queue, h.status.Requests = 0, "", nil, nil
	h.status.Flush = FlushStatus{}
	h.status.Starts++
	before := previous{h.status.Conflicts, h.status.Unstored}
	h.changeStatus()
	h.wakeRenewal()
	h.runs.Go(func() {
		code, signal := run.wait(func(line []byte, cut bool) { h.output(line, cut, c, before) })
		h.exited(code, signal)
	})
	return nil
}

// previous is what previous clients reported.
type previous struct {
	conflicts int
	unstored  *client.Unstored
}

// output handles a line of the client's output.
func (h *helper) output(raw []byte, cut bool, c client.Client, before previous) {
	line := clean(raw)
	// Reports are not part of the tail: they would displace the lines that explain an exit.
	if h.report(line, c, before) {
		return
	}
	scrub := h.scrub.scrub
	if cut {
		scrub = h.scrub.scrubCut
	}
	line = shorten(scrub(line))
	if line == "" {
		return
	}
	h.tail.add(line)
	h.log.line("client: " + line)
}

// report records what a line reports, and returns whether it is a report of the client.
func (h *helper) report(line string, c client.Client, before previous) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.status
	if n, ok := parsed(c.Conflicts, line); ok {
		if n += before.conflicts; s.Conflicts != n {
			s.Conflicts = n
			h.changeStatus()
		}
		return true
	}
	if u, ok := parsed(c.Unstored, line); ok {
		u.Name, u.Reason = clean([]byte(u.Name)), clean([]byte(u.Reason))
		s.Unstored = before.plus(u)
		h.changeStatus()
		return true
	}
	if q, ok := parsed(c.Queue, line); ok {
		if s.Queue == nil || *s.Queue != q {
			s.Queue = &q
			h.changeStatus()
		}
		return true
	}
	if unsent, ok := parsed(c.Flushed, line); ok {
		h.flushed(unsent)
		return true
	}
	r, ok := parsed(c.Requests, line)
	if ok {
		s.Requests = &r
	}
	return ok
}

// parsed returns what a client's parser reads from a line, if the client has one.
func parsed[T any](parse func(line string) (T, bool), line string) (value T, ok bool) {
	if parse != nil {
		return parse(line)
	}
	return value, false
}

// plus returns the files that previous clients and the running one could not store, nil if there are none.
func (p previous) plus(u client.Unstored) *client.Unstored {
	switch {
	case u.Files == 0:
		return p.unstored
	case p.unstored != nil:
		u.Files += p.unstored.Files
	}
	return &u
}

func (h *helper) exited(code int, signal string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pgid = 0
	h.status.State, h.status.ClientPID = StateExited, 0
	h.status.ExitCode, h.status.Signal = code, signal
	h.lastActivity = h.options.now()
	h.endpoint.setAwaited(notAwaited)
	h.log.printf("client exited: %s", describe(code, signal))
	h.recordEnd()
	h.changeStatus()
}

// recordEnd writes how the last client exited. Call under mu.
func (h *helper) recordEnd() {
	end := End{Expected: h.status.Ending, Code: h.status.ExitCode, Signal: h.status.Signal, When: h.options.now().UTC(), Starts: h.status.Starts}
	if !end.Expected || end.Code != 0 {
		end.Tail = h.tail.snapshot()
		end.Reason = "the client exited " + describe(end.Code, end.Signal)
		switch {
		case h.quitting:
			end.Reason += " after a quit request of the driver"
		case h.killRequested:
			end.Reason += " after a kill request of the driver"
		case h.idleKilled:
			end.Reason += " because its helper was asked to stop and it was idle"
		case !end.Expected:
			end.Reason += " while it was mounted"
		}
	}
	if err := writeEnd(h.mount.StateDir, end); err != nil {
		h.log.printf("recording the client's exit failed: dir=%s: %v", h.mount.StateDir, err)
	}
}

func describe(code int, signal string) string {
	if signal != "" {
		return "on signal " + signal
	}
	return fmt.Sprintf("with exit code %d", code)
}

// assign makes a spare the helper of a mount.
func (h *helper) assign(a Assignment) error {
	if a.Name == "" || !filepath.IsAbs(a.StateDir) || a.CacheDir != "" && !filepath.IsAbs(a.CacheDir) {
		return fault.Errorf(fault.Invalid, "the assignment has no name, or directories without absolute paths")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case !h.unassigned:
		return fault.Errorf(fault.Exists, "this helper has a mount already")
	case h.quitting || h.stopping:
		return fault.Errorf(fault.Precondition, "cannot take a mount: the helper is exiting")
	}
	h.unassigned, h.mount = false, a
	h.log.printf("spare assigned: name=%s", a.Name)
	h.changeStatus()
	return nil
}

func (h *helper) credentials(keys credentials.Keys, order credentials.Order) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.updateSession(keys, order); err != nil {
		return err
	}
	if keys.IsZero() {
		h.log.printf("order replaced")
	} else {
		h.log.printf("credentials replaced")
	}
	h.changeStatus()
	return nil
}

// forget drops the session and the order.
func (h *helper) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.session.forget()
	h.serveSession()
	h.log.printf("credentials dropped on request")
	h.changeStatus()
}

// flush signals the client, which reports when it has uploaded everything that was in its queue by then. Signals that wait for a
// process are one, so the next one is sent when the client has reported the flush before it.
func (h *helper) flush() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch f := &h.status.Flush; {
	case h.pgid == 0:
		return fault.Errorf(fault.Precondition, "no client is running")
	case !h.flushes:
		return fault.Errorf(fault.Unsupported, "the client reports no flushes")
	case f.Asked == f.Done:
		f.Asked++
		signalFlush(h.pgid)
	default:
		f.Asked = f.Done + 2
	}
	h.changeStatus()
	return nil
}

// flushed records that the client has finished a flush, and begins the next one. Call under mu.
func (h *helper) flushed(unsent int) {
	f := &h.status.Flush
	if f.Done == f.Asked {
		return // another process sent the signal
	}
	f.Done++
	f.Unsent = unsent
	if f.Done < f.Asked {
		signalFlush(h.pgid)
	}
	h.changeStatus()
}

func (h *helper) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.status.Ending {
		return
	}
	h.status.Ending = true
	h.log.printf("unmount announced, client exit expected")
	if h.status.State != StateRunning {
		h.recordEnd()
	}
	h.changeStatus()
}

// quit ends the helper and kills a running client. Call it after the answer was sent.
func (h *helper) quit() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.quitting {
		h.quitting = true
		close(h.killed)
		h.log.printf("quit requested")
	}
	if h.pgid != 0 {
		killGroup(h.pgid)
	}
	h.exitIfDone()
}

// kill kills a running client. One that is blocked in the kernel exits when its FUSE connection ends; the status shows when.
func (h *helper) kill() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pgid == 0 {
		return
	}
	h.killRequested = true
	h.log.printf("killing client on request: pid=%d", h.pgid)
	killGroup(h.pgid)
}

func (h *helper) stop(why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopping && h.status.State == StateRunning {
		h.log.printf("exiting after the client: signal=%q", why)
	}
	h.stopping = true
	h.exitIfDone()
}

// checkCommand refuses commands that exec cannot pass on as they are.
func checkCommand(c client.Command) error {
	if len(c.Argv) == 0 || !filepath.IsAbs(c.Argv[0]) {
		return fault.Errorf(fault.Invalid, "the path of the client's program is not absolute")
	}
	if c.Fusermount != "" && !filepath.IsAbs(c.Fusermount) {
		return fault.Errorf(fault.Invalid, "the path of the client's fusermount is not absolute")
	}
	for _, s := range c.Argv {
		if strings.IndexByte(s, 0) >= 0 {
			return fault.Errorf(fault.Invalid, "an argument of the client contains a NUL byte")
		}
	}
	for _, s := range c.Env {
		name, _, ok := strings.Cut(s, "=")
		if !ok || name == "" || strings.IndexByte(s, 0) >= 0 {
			return fault.Errorf(fault.Invalid, "the client's environment has an entry other than NAME=value")
		}
	}
	return nil
}
