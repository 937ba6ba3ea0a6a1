// Package host does the mount work on Linux: it enters the host's mount namespace, reads mount tables, opens targets without
// following symbolic links, mounts and binds FUSE file systems, replaces stale mounts, and reads the state of FUSE connections.
// It holds no policy: packages above it decide which volume is mounted where and when.
//
// Every call that may wait for a FUSE client runs under Namespace.Do, which returns when its context ends, even if the system
// call does not. Functions that say "call inside Do" are plain system calls on the calling thread.
//
// The oldest supported kernel is 5.12: openat2 (5.6), open_tree and move_mount (5.2), mount_setattr (5.12). Since 6.5
// (MOVE_MOUNT_BENEATH), a replaced stale mount leaves no trace.
package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

const (
	hostNamespace = "/proc/1/ns/mnt"
	ownNamespace  = "/proc/self/ns/mnt"
	hostMountinfo = "/proc/1/mountinfo"
	ownMountinfo  = "/proc/self/mountinfo"

	// maxOverdue bounds the threads that unresponsive file systems can block. A node has a few calls for each unresponsive mount;
	// the Go runtime aborts at 10,000 threads.
	maxOverdue = 1000
	// maxOverdueEach bounds the overdue calls on the account of one volume or pod, see For.
	maxOverdueEach = 16
	// probeTimeout bounds the test in NewNamespace, which waits only for the kernel.
	probeTimeout = 10 * time.Second
)

// Namespace is the mount namespace in which this process does its mount work: PID 1's. It counts the calls that unresponsive file
// systems still block. It is safe for concurrent use.
type Namespace struct {
	foreign   bool
	mountinfo string // the file with this namespace's mount table
	tables    conc.Reader[[]Mount]
	reads     atomic.Int64
	looks     Looks
	known     knownTable
	skipped   atomic.Int64 // the lines that the latest read of the table could not parse

	mu      sync.Mutex
	overdue map[*call]struct{}
	probes  map[string]*call // calls of which one at most runs for each directory
}

// call is one piece of work on its own goroutine, and perhaps its own thread.
type call struct {
	what    string
	account string // "": none
	started time.Time
	logger  klog.Logger
	done    chan struct{} // closed when err and value are final
	err     error
	value   any // what a probe found
}

type accountKey struct{}

// For returns a context whose calls are on the account of one volume or pod, such as "pod <uid>". The number of overdue calls is
// bounded for each account. At the bound, Do refuses further calls on that account only.
func For(ctx context.Context, account string) context.Context {
	return context.WithValue(ctx, accountKey{}, account)
}

func accountIn(ctx context.Context) string {
	account, _ := ctx.Value(accountKey{}).(string)
	return account
}

// errUnfinished is the error of a call that ended its goroutine instead of returning.
var errUnfinished = errors.New("the call exited without a result")

// NewNamespace finds PID 1's mount namespace and decides how calls reach it: plainly if this process is in it already, else by
// setns on threads of their own, which it tries. If that is not permitted, the error is a fault.Precondition that names what the
// container lacks.
func NewNamespace() (*Namespace, error) {
	same, err := inHostNamespace()
	if err != nil {
		return nil, err
	}
	if same {
		return Own(), nil
	}
	n := Own()
	n.foreign, n.mountinfo = true, hostMountinfo
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	if err := n.Do(ctx, "entering the host's mount namespace", func() error { return nil }); err != nil {
		return nil, fault.Errorf(fault.Precondition, "this process is outside the host's mount namespace and cannot enter it; "+
			"the driver's container must be privileged and in the host's PID namespace (Kubernetes: hostPID: true, privileged: true; "+
			"Nomad: pid_mode = \"host\", privileged = true; CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SYS_PTRACE): %w", err)
	}
	return n, nil
}

// Own is the mount namespace of this process, whatever PID 1's is. It is for tests and development in a private mount namespace.
func Own() *Namespace {
	return &Namespace{mountinfo: ownMountinfo, overdue: map[*call]struct{}{}, probes: map[string]*call{}}
}

// Foreign reports whether Do uses setns, because this process is in another mount namespace than PID 1.
func (n *Namespace) Foreign() bool { return n.foreign }

// Do runs fn in the namespace and returns its error as it is.
//
// If the namespace is foreign, fn runs on an OS thread that entered it and that ends afterwards. The thread's root and working
// directory are the host's, and children that fn forks inherit them. Goroutines that fn starts run on other threads, outside the
// namespace. A child must not have a parent death signal, because that follows the thread. If the namespace is this process's
// own, fn runs on a plain goroutine.
//
// If ctx ends first, Do returns an error that wraps ctx.Err() and names what (a phrase such as "unmounting /a/b"). fn runs on,
// because a system call that waits for a FUSE client cannot be interrupted, and Overdue counts it until it ends. So fn must not
// change what the caller uses after Do has failed. With too many overdue calls, in total or on the context's account (see For),
// Do starts no further ones (fault.Exhausted).
func (n *Namespace) Do(ctx context.Context, what string, fn func() error) error {
	return n.runCall(ctx, what, n.entry(), fn)
}

// entry returns the function that enters the namespace, nil if this process is in it.
func (n *Namespace) entry() func() error {
	if n.foreign {
		return enterHost
	}
	return nil
}

// runCall is Do with the function that enters a namespace. If enter is nil, fn runs plainly, else on a thread that ends afterwards.
func (n *Namespace) runCall(ctx context.Context, what string, enter, fn func() error) error {
	if err := n.checkOverdue(ctx, what); err != nil {
		return err
	}
	c := n.newCall(ctx, what)
	n.startCall(c, enter, fn)
	return n.awaitCall(ctx, c)
}

func (n *Namespace) checkOverdue(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: not started: %w", what, err)
	}
	if overdue := n.Overdue(); overdue >= maxOverdue {
		return fault.Errorf(fault.Exhausted, "%s: not started: %d earlier calls still wait for unresponsive file systems", what, overdue)
	}
	account := accountIn(ctx)
	if overdue := n.overdueOn(account); account != "" && overdue >= maxOverdueEach {
		return fault.Errorf(fault.Exhausted, "%s: not started: %d earlier calls for %s still wait for unresponsive file systems", what, overdue, account)
	}
	return nil
}

func (n *Namespace) overdueOn(account string) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.overdue {
		if c.account == account {
			count++
		}
	}
	return count
}

func (n *Namespace) newCall(ctx context.Context, what string) *call {
	return &call{what: what, account: accountIn(ctx), started: time.Now(), logger: klog.FromContext(ctx), done: make(chan struct{}), err: errUnfinished}
}

// startCall starts a call. The result of fn is in the call's err when done is closed.
func (n *Namespace) startCall(c *call, enter, fn func() error) {
	go func() {
		defer n.finishCall(c)
		if enter == nil {
			c.err = fn()
			return
		}
		proc.OnThrowawayThread(func() {
			if err := enter(); err != nil {
				c.err = fmt.Errorf("%s: %w", c.what, err)
				return
			}
			c.err = fn()
		})
	}()
}

// awaitCall waits for a call until ctx ends, and then counts it as overdue.
func (n *Namespace) awaitCall(ctx context.Context, c *call) error {
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-c.done: // closed under the lock: the call has finished, or it finds itself in overdue when it does
		return c.err
	default:
	}
	n.overdue[c] = struct{}{}
	return fmt.Errorf("%s: no answer for %s, the call is still running: %w", c.what, age(c), ctx.Err())
}

func (n *Namespace) finishCall(c *call) {
	n.mu.Lock()
	_, late := n.overdue[c]
	delete(n.overdue, c)
	if n.probes[c.what] == c {
		delete(n.probes, c.what)
	}
	close(c.done)
	n.mu.Unlock()
	if late {
		c.logger.Info("Overdue call returned", "call", c.what, "after", age(c), "error", c.err)
	}
}

// Overdue returns the number of calls that still run after their context has ended, and of looks at processes that hang.
func (n *Namespace) Overdue() int {
	hung := len(n.looks.hungCalls())
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.overdue) + hung
}

// OverdueCalls returns the names and ages of the calls that Overdue counts.
func (n *Namespace) OverdueCalls() []string {
	names := n.looks.hungCalls()
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.overdue {
		names = append(names, fmt.Sprintf("%s (%s)", c.what, age(c)))
	}
	sort.Strings(names)
	return names
}

func age(c *call) time.Duration { return time.Since(c.started).Round(time.Millisecond) }

// enterHost moves the calling thread, which must end afterwards, into PID 1's mount namespace.
func enterHost() error {
	first, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return fmt.Errorf("opening PID 1: %w", err)
	}
	defer unix.Close(first)
	return enterNamespace(first)
}

// enterNamespace moves the calling thread, which must end afterwards, into the mount namespace of the process of a pidfd, also if the process
// hangs. The kernel requires a thread that shares its root and working directory with no other.
func enterNamespace(pidfd int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unsharing the thread's root and working directory: %w", err)
	}
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the mount namespace: %w", err)
	}
	return nil
}

// inHostNamespace reports whether this process is in PID 1's mount namespace. It compares the links of the namespaces. If PID 1 has
// a capability that this process lacks, its link cannot be read; then the mount tables are compared, because a mount's id belongs
// to one namespace only.
func inHostNamespace() (bool, error) {
	own, err := os.Readlink(ownNamespace)
	if err != nil {
		return false, fault.Errorf(fault.Precondition, "reading %s (is /proc mounted?): %w", ownNamespace, err)
	}
	if host, err := os.Readlink(hostNamespace); err == nil {
		return own == host, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	ownMounts, err := readMounts(ctx, ownMountinfo)
	if err != nil {
		return false, err
	}
	hostMounts, err := readMounts(ctx, hostMountinfo)
	if err != nil {
		return false, fault.Errorf(fault.Precondition, "finding the host's mount namespace: neither %s nor %s can be read; "+
			"the driver must run as root: %w", hostNamespace, hostMountinfo, err)
	}
	return shareMounts(ownMounts, hostMounts), nil
}

// shareMounts reports whether two mount tables belong to one namespace: most mounts of the smaller one are in the other. A single
// common id proves nothing, because the kernel may have reused it between the two reads.
func shareMounts(a, b []Mount) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	ids := mountIDs(b)
	common := 0
	for _, m := range a {
		if ids[m.ID] {
			common++
		}
	}
	return 2*common > len(a)
}

func mountIDs(mounts []Mount) map[int]bool {
	ids := make(map[int]bool, len(mounts))
	for _, m := range mounts {
		ids[m.ID] = true
	}
	return ids
}

// Doer does work in the host's mount namespace: a Namespace.
type Doer interface {
	Do(ctx context.Context, what string, fn func() error) error
}

// Call is Namespace.Do for a function with a result. If ctx ends first, Call returns the zero value, and passes a later result to
// drop unless that is nil.
func Call[T any](ctx context.Context, ns Doer, what string, drop func(T), fn func() (T, error)) (result T, err error) {
	made, abandoned := make(chan T, 1), atomic.Bool{}
	dropMade := func() {
		select {
		case v := <-made:
			if drop != nil {
				drop(v)
			}
		default: // there is none yet, or the other side has dropped it
		}
	}
	err = ns.Do(ctx, what, func() error {
		v, err := fn()
		if err == nil {
			made <- v
		}
		if abandoned.Load() {
			dropMade()
		}
		return err
	})
	if err != nil {
		abandoned.Store(true)
		dropMade()
		return result, err
	}
	return <-made, nil
}
