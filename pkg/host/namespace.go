//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	hostNamespace = "/proc/1/ns/mnt"
	ownNamespace  = "/proc/self/ns/mnt"
	hostMountinfo = "/proc/1/mountinfo"
	ownMountinfo  = "/proc/self/mountinfo"

	// maxOverdue bounds the threads that hung file systems can take from this process. A node has at most a few calls
	// for each hung mount; the Go runtime dies at 10,000 threads.
	maxOverdue = 1000
	// maxOverdueEach bounds those on the account of one volume or pod, see For.
	maxOverdueEach = 16
	// probeTimeout bounds the trial at construction, which waits for nothing but the kernel.
	probeTimeout = 10 * time.Second
)

// Namespace is a mount namespace in which this process does its mount work: PID 1's. It also keeps account of the calls
// that hung file systems have not let go of. It is safe for concurrent use.
type Namespace struct {
	foreign   bool
	mountinfo string // the file that shows this namespace's mounts

	mu      sync.Mutex
	overdue map[*call]struct{}
	probes  map[string]*call // calls of which there is at most one for each directory
}

// call is one piece of work on a goroutine, and perhaps a thread, of its own.
type call struct {
	what    string
	account string // "": of no account
	started time.Time
	logger  klog.Logger
	done    chan struct{} // closed when err and value are final
	err     error
	value   any // what a probe found
}

// accountKey is the context's key of For.
type accountKey struct{}

// For returns a context whose calls are on the account of one volume or pod, such as "pod <uid>". Calls whose context ended and
// that still run are bounded for each account. Beyond that, further ones are refused, and those of others go on.
func For(ctx context.Context, account string) context.Context {
	return context.WithValue(ctx, accountKey{}, account)
}

// accountIn is the account of a context, "" where it has none.
func accountIn(ctx context.Context) string {
	account, _ := ctx.Value(accountKey{}).(string)
	return account
}

// errUnfinished is what a call leaves behind that ended its goroutine instead of returning.
var errUnfinished = errors.New("the call ended without a result")

// NewNamespace finds PID 1's mount namespace and decides, once, how it is reached: by plain calls where this process
// is in it already, else by setns on threads of their own, which is tried here. Where that is not permitted the error
// is a fault.Precondition that says what the container lacks.
func NewNamespace() (*Namespace, error) {
	same, err := inHostNamespace()
	if err != nil {
		return nil, err
	}
	if same {
		return Own(), nil
	}
	n := &Namespace{foreign: true, mountinfo: hostMountinfo, overdue: map[*call]struct{}{}, probes: map[string]*call{}}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	if err := n.Do(ctx, "trying the host's mount namespace", func() error { return nil }); err != nil {
		return nil, fault.Errorf(fault.Precondition, "this process is not in the host's mount namespace and cannot enter it; "+
			"the node's pod needs hostPID: true and its container privileged: true (CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SYS_PTRACE): %w", err)
	}
	return n, nil
}

// Own is the mount namespace that this process is in, whatever PID 1's is: for tests and for development, where a
// mount namespace of one's own keeps mounts from the host.
func Own() *Namespace {
	return &Namespace{mountinfo: ownMountinfo, overdue: map[*call]struct{}{}, probes: map[string]*call{}}
}

// Foreign tells whether work is done through setns, because this process is in another mount namespace than PID 1.
func (n *Namespace) Foreign() bool { return n.foreign }

// Do runs fn in the namespace and returns its error as it is.
//
// Where the namespace is foreign, fn runs on an OS thread that entered it and that is thrown away afterwards: its
// root and working directory are the host's, and so is what it forks, because a child is forked from the calling
// thread and inherits its namespace. Goroutines that fn starts are on other threads and do not see it. A child must
// not have a parent death signal: that follows the thread. Where the namespace is this process's own, fn runs on a
// plain goroutine.
//
// When ctx ends first, Do returns an error that wraps ctx.Err() and names what (a phrase such as "unmounting /a/b"),
// while fn runs on, because a system call that waits for a FUSE client cannot be interrupted; it is counted by
// Overdue until it ends. fn must therefore leave alone what the caller uses after Do failed. With too many overdue
// calls, in sum or on the context's account (see For), Do refuses to start another (fault.Exhausted).
func (n *Namespace) Do(ctx context.Context, what string, fn func() error) error {
	return n.run(ctx, what, n.entry(), fn)
}

// entry is the way into the namespace, nil where this process is in it.
func (n *Namespace) entry() func() error {
	if n.foreign {
		return enterHost
	}
	return nil
}

// run is Do with the way into a namespace: nil is a plain call, else a thread is thrown away after enter and fn.
func (n *Namespace) run(ctx context.Context, what string, enter, fn func() error) error {
	if err := n.admit(ctx, what); err != nil {
		return err
	}
	c := n.newCall(ctx, what)
	n.start(c, enter, fn)
	return n.wait(ctx, c)
}

// admit tells whether one more call may start.
func (n *Namespace) admit(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: not started: %w", what, err)
	}
	if overdue := n.Overdue(); overdue >= maxOverdue {
		return fault.Errorf(fault.Exhausted, "%s: not started: %d earlier calls still wait for file systems that do not answer", what, overdue)
	}
	account := accountIn(ctx)
	if overdue := n.overdueOn(account); account != "" && overdue >= maxOverdueEach {
		return fault.Errorf(fault.Exhausted, "%s: not started: %d earlier calls for %s still wait for file systems that do not answer", what, overdue, account)
	}
	return nil
}

// overdueOn counts the overdue calls of an account.
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

// newCall is a call that has not been started.
func (n *Namespace) newCall(ctx context.Context, what string) *call {
	return &call{what: what, account: accountIn(ctx), started: time.Now(), logger: klog.FromContext(ctx), done: make(chan struct{}), err: errUnfinished}
}

// start begins a call. What fn returns is in the call's err once done is closed.
func (n *Namespace) start(c *call, enter, fn func() error) {
	go func() {
		defer n.finish(c)
		if enter == nil {
			c.err = fn()
			return
		}
		onThrowawayThread(func() {
			if err := enter(); err != nil {
				c.err = fmt.Errorf("%s: %w", c.what, err)
				return
			}
			c.err = fn()
		})
	}()
}

// wait waits for a call until ctx ends, and then counts it as overdue.
func (n *Namespace) wait(ctx context.Context, c *call) error {
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-c.done: // closed under the lock, so it is either finished now or will find itself among the overdue
		return c.err
	default:
	}
	n.overdue[c] = struct{}{}
	return fmt.Errorf("%s: no answer for %s, the call still runs: %w", c.what, age(c), ctx.Err())
}

// finish publishes a call's result and takes it off the overdue ones.
func (n *Namespace) finish(c *call) {
	n.mu.Lock()
	_, late := n.overdue[c]
	delete(n.overdue, c)
	if n.probes[c.what] == c {
		delete(n.probes, c.what)
	}
	close(c.done)
	n.mu.Unlock()
	if late {
		c.logger.Info("A call that was given up on has ended", "call", c.what, "after", age(c), "err", c.err)
	}
}

// Overdue counts the calls whose context ended before they did and that still run.
func (n *Namespace) Overdue() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.overdue)
}

// OverdueCalls names the calls that Overdue counts, with their ages.
func (n *Namespace) OverdueCalls() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	names := make([]string, 0, len(n.overdue))
	for c := range n.overdue {
		names = append(names, fmt.Sprintf("%s (%s)", c.what, age(c)))
	}
	sort.Strings(names)
	return names
}

// age is how long ago a call was started, as people read it.
func age(c *call) time.Duration { return time.Since(c.started).Round(time.Millisecond) }

// onThrowawayThread runs fn on a locked thread whose root, working directory and namespaces fn may change: the caller's
// goroutine ends with the thread, because a locked thread dies with its goroutine. It returns when fn has.
//
// The thread is never the process's first one. That one is not destroyed but parked for ever, and /proc/self shows its
// namespace and root, so everybody would take the whole process to be where fn went.
func onThrowawayThread(fn func()) {
	runtime.LockOSThread()
	if unix.Gettid() != os.Getpid() {
		fn()
		return
	}
	done := make(chan struct{})
	go func() { // on another thread, since this one is held until it is done
		defer close(done)
		onThrowawayThread(fn)
	}()
	<-done
	runtime.UnlockOSThread()
}

// enterHost takes the calling thread, which must be a throwaway, into PID 1's mount namespace.
func enterHost() error {
	fd, err := unix.Open(hostNamespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening %s: %w", hostNamespace, err)
	}
	defer unix.Close(fd)
	return enterNamespace(fd)
}

// enterNamespace takes the calling thread, which must be a throwaway, into the mount namespace behind fd. The kernel
// wants a thread whose root and working directory are shared with no other for that.
func enterNamespace(fd int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unsharing the thread's root and working directory: %w", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the mount namespace: %w", err)
	}
	return nil
}

// inHostNamespace tells whether this process is in PID 1's mount namespace. The links of the namespaces say so, where
// they can be read. They cannot when PID 1 has a capability that this process lacks; then the mount tables do,
// because a mount's id belongs to one namespace alone.
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

// shareMounts tells whether two mount tables are of one namespace: most of the smaller is in the other. One common id
// alone could be one that was freed and given out again between the two reads.
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

// mountIDs is the set of the mounts' ids.
func mountIDs(mounts []Mount) map[int]bool {
	ids := make(map[int]bool, len(mounts))
	for _, m := range mounts {
		ids[m.ID] = true
	}
	return ids
}
