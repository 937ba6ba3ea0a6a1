package podclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

const (
	// startingEvery and servingEvery are the times between two looks at a client, when it has got its descriptor and after its first answer.
	// One that exits is noticed at once if its successor connects.
	startingEvery = 50 * time.Millisecond
	servingEvery  = 5 * time.Second
	// answerBound bounds one look at a client.
	answerBound = time.Second
	// sendBound bounds the passing of a descriptor.
	sendBound = 5 * time.Second
	// takeoverBound is how long a program waits for the connection of a client that is exiting to end.
	takeoverBound = 3 * time.Second
	// Containers that were starting while mounts were replaced are found by further looks, whose interval doubles.
	firstReplace, lastReplace = time.Second, time.Minute
	// unresponsiveAfter is how long a client that served may not answer before it is shown as unresponsive.
	unresponsiveAfter = 10 * time.Second
	// stepBound bounds the work of one step.
	stepBound = time.Minute
	// Programs of the pod can connect again and again, and each time costs the driver a mount, lines in its log, and a look at the mount
	// namespaces of all processes: after a burst, one is answered in each interval, which is the first one of kubelet's own backoff.
	handoverBurst, handoverEvery = 10, 10 * time.Second
)

// pace admits handoverBurst events at once, and then one every handoverEvery.
type pace struct{ next time.Time }

// wait is the time until the next event is admitted.
func (p *pace) wait(now time.Time) time.Duration {
	return p.next.Add(-(handoverBurst - 1) * handoverEvery).Sub(now)
}

func (p *pace) countEvent(now time.Time) {
	if p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(handoverEvery)
}

// reconciler serves one volume: it listens, passes descriptors, and shows the file systems of clients. What it remembers it can find
// again: it begins with what is mounted.
type reconciler struct {
	s      *Server
	volume podvolume.Volume

	cancel context.CancelFunc // guarded by Server.mu; nil until it is launched or stopped
	done   chan struct{}

	progressMu sync.Mutex
	progress   progress

	mu     sync.Mutex // is held during calls
	socket listener   // nil inside: none
	// listening receives something when there is a new listener.
	listening chan struct{}

	// The rest belongs to run.
	client      uint64    // the current client; 0: none
	left        uint64    // the client whose exit was dealt with
	serving     bool      // the current client has answered
	aborted     bool      // its connection was aborted, and that it has ended was not seen yet
	answered    time.Time // when it did last, or got the descriptor
	asked       uint64    // the client that a call of an earlier look was waiting for; 0: none
	pace        pace      // of handovers
	replaceWait time.Duration
	replaceAt   time.Time
	replaced    bool // the target showed the client's file system before the last replacement
}

func newReconciler(s *Server, v podvolume.Volume) *reconciler {
	return &reconciler{
		s: s, volume: v, progress: progress{state: status.Unknown, since: time.Now().UTC()},
		done: make(chan struct{}), listening: make(chan struct{}, 1),
	}
}

// awaitEnd waits until run has returned.
func (r *reconciler) awaitEnd(ctx context.Context) error {
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return fault.Errorf(fault.Busy, "the volume's client is being connected: %w", context.Cause(ctx))
	}
}

// listen makes sure that the driver listens on the volume's socket.
func (r *reconciler) listen(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, root := r.volume, r.s.opts.TargetRoot
	if old := r.socket; old.accepts != nil {
		bound, err := host.Call(ctx, r.s.ns, "looking at the socket of "+v.Target, nil, func() (bool, error) { return old.isBound(root, v), nil })
		if err != nil || bound {
			return err
		}
		r.socket.close()
	}
	socket, err := host.Call(ctx, r.s.ns, "listening for the client of "+v.Target, func(late listener) { late.close() }, func() (l listener, err error) {
		if r.s.ns.Foreign() {
			return listen(root, v) // on such a thread
		}
		proc.OnThrowawayThread(func() { l, err = listen(root, v) })
		return l, err
	})
	if err != nil {
		return err
	}
	r.socket = socket
	select {
	case r.listening <- struct{}{}:
	default:
	}
	return nil
}

func (r *reconciler) closeListener() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.socket.close()
}

// run attends to the volume until ctx ends.
func (r *reconciler) run(ctx context.Context) {
	defer context.AfterFunc(ctx, r.closeListener)()
	defer r.closeListener()
	r.answered = time.Now()
	for ctx.Err() == nil {
		r.step(ctx)
		every, wait := r.interval(), r.pace.wait(time.Now())
		if wait > 0 {
			select {
			case <-time.After(min(every, wait)):
			case <-ctx.Done():
			}
			continue
		}
		if conn := r.acceptWithin(ctx, every); conn != nil {
			r.pace.countEvent(time.Now())
			r.handOver(ctx, conn)
		}
	}
}

// interval returns the time until the next step.
func (r *reconciler) interval() time.Duration {
	switch hang := r.s.opts.HangTimeout; {
	case r.client != r.left && !r.serving: // it is starting
		return min(max(time.Since(r.answered)/8, startingEvery), servingEvery)
	case r.aborted:
		return startingEvery
	case hang > 0:
		return min(max(hang/8, startingEvery), servingEvery)
	}
	return servingEvery
}

// acceptWithin returns the next connection, nil if there is none in time.
func (r *reconciler) acceptWithin(ctx context.Context, within time.Duration) *net.UnixConn {
	r.mu.Lock()
	l := r.socket.accepts
	r.mu.Unlock()
	if l != nil {
		err := l.SetDeadline(time.Now().Add(within))
		if err == nil {
			var conn *net.UnixConn
			if conn, err = l.AcceptUnix(); err == nil {
				return conn
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		within = startingEvery // it was replaced
	}
	select {
	case <-r.listening:
	case <-time.After(within):
	case <-ctx.Done():
	}
	return nil
}

// step looks at the socket and at the client. Each step begins with what is mounted, so it also completes what an earlier driver began.
//
// Only the calls that wait for the client are on its account: when that is exhausted, the others can still abort the connection.
func (r *reconciler) step(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepBound)
	defer cancel()
	if err := r.listen(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("Cannot listen for client in pod, will retry", "error", err)
		r.recordFailure(ReasonSocket, time.Now().Add(servingEvery), fmt.Sprintf("cannot listen for the client: %v", err))
	}
	if err := r.lookAtClient(ctx); err != nil && ctx.Err() == nil {
		r.recordFailure(status.ReasonReconcile, time.Now().Add(servingEvery), err.Error())
		klog.FromContext(ctx).Error(err, "Cannot look at client in pod, will retry")
	}
}

// lookAtClient finds out whether the current client serves, and shows what there is to show.
func (r *reconciler) lookAtClient(ctx context.Context) error {
	mounts, err := r.s.ns.KnownMounts(ctx)
	if err != nil {
		return err
	}
	id := idOf(r.volume.Target)
	current, ok := r.s.records.current(mounts, id)
	if !ok {
		r.client, r.left, r.aborted = 0, 0, false
		if r.currentProgress().state != Exited { // whose file system was removed
			r.setState(Waiting)
		}
		return nil
	}
	if current.n != r.client { // of an earlier driver
		r.client, r.serving, r.answered, r.asked = current.n, false, time.Now(), 0
	}
	top, _ := host.TopAt(mounts, r.volume.Target)
	switch r.askClient(ctx, current) {
	case silent:
		limit := r.s.opts.HangTimeout
		if !r.serving {
			limit = r.s.opts.ReadyTimeout
		}
		silence := time.Since(r.answered)
		switch unresponsive := silence >= unresponsiveAfter || limit > 0 && silence >= limit; {
		case !r.serving:
			r.setState(status.Starting)
		case unresponsive:
			r.setState(status.Unresponsive)
			var next time.Time
			if limit > 0 {
				next = r.answered.Add(limit)
			}
			r.recordFailure(status.ReasonUnresponsive, next, "the client does not answer")
		}
		if limit > 0 && silence >= limit {
			klog.FromContext(ctx).Info("Client in pod is unresponsive, aborting its connection", "client", current.n, "after", limit, "answered", r.serving)
			return r.abortClient(ctx, current)
		}
	case gone:
		return r.showEmpty(ctx, mounts, current)
	case answered:
		if !r.serving {
			r.serving, r.replaceWait, r.replaceAt = true, firstReplace, time.Time{}
			klog.FromContext(ctx).Info("Client in pod serves the volume", "client", current.n)
		}
		r.answered = time.Now()
		r.setState(Serving)
		// At once if the target has lost the client's file system. A client can have one that cannot be shown, and each try costs the driver
		// a look at the mount namespaces of all processes.
		shown := top.Minor == current.mount.Minor
		if time.Now().Before(r.replaceAt) && (shown || !r.replaced) {
			return nil
		}
		r.replaced = shown
		failpoint.Here("podclient.answered")
		again, err := r.s.replaceShown(ctx, r.volume, current, everywhere)
		if !again && err == nil {
			err = r.s.pruneFormer(ctx, r.volume, current.n)
		}
		r.replaceAt = time.Now().Add(r.replaceWait)
		r.replaceWait = min(2*r.replaceWait, lastReplace)
		return err
	}
	return nil
}

// abortClient ends the connection of a client that does not answer. Until its end is seen, the reconciler looks more often.
func (r *reconciler) abortClient(ctx context.Context, m fileSystem) error {
	if err := r.s.abortConnection(ctx, m); err != nil {
		r.aborted = false
		return err
	}
	r.aborted = true
	what := "it did not answer"
	if !r.serving {
		what = "it did not answer after it had got the descriptor"
	}
	r.recordFailure(status.ReasonUnresponsive, time.Time{}, "the client's connection was aborted: "+what)
	return nil
}

// showEmpty shows the empty file system at the target after the client has exited, and removes that of the client unless containers show it.
func (r *reconciler) showEmpty(ctx context.Context, mounts []host.Mount, current fileSystem) error {
	aborted := r.aborted
	r.aborted = false
	if r.left == current.n {
		return nil
	}
	r.recordExit(aborted)
	empty, ok := host.TopAt(mounts, r.s.records.empty(idOf(r.volume.Target)))
	if !ok {
		return fault.Errorf(fault.Unavailable, "the empty file system of %s was unmounted by another process", r.volume.Target)
	}
	klog.FromContext(ctx).Info("Client in pod has exited", "client", current.n, "answered", r.serving)
	r.serving = false
	// A client that the kernel does not understand still has its descriptor.
	if err := r.s.abortConnection(ctx, current); err != nil {
		return err
	}
	if again, err := r.s.replaceShown(ctx, r.volume, fileSystem{mount: empty}, atTarget); again || err != nil {
		return err
	}
	r.left = current.n
	return r.s.pruneFormer(ctx, r.volume, 0)
}

// finding is what a look at a client has found.
type finding int

const (
	silent   finding = iota // it has not answered in time
	answered                // also with an error
	gone                    // its connection has ended
)

// askClient looks at a client. The call of a client that never answers stays in the kernel until the connection is aborted; there is at most one.
// So if a call was started while an earlier look's was not answered in time, that one was answered late: the client is slow.
func (r *reconciler) askClient(ctx context.Context, m fileSystem) finding {
	bounded, cancel := context.WithTimeout(host.For(ctx, account(r.volume)), answerBound)
	defer cancel()
	err := r.s.ns.Answers(bounded, m.mount.Mountpoint)
	if started := errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil; started {
		late := r.asked == m.n
		r.asked = m.n
		if late {
			return answered
		}
		return silent
	}
	var errno unix.Errno
	switch {
	case err == nil:
		r.asked = 0
		return answered
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENODEV):
		return gone
	case errors.As(err, &errno):
		return answered
	}
	return silent
}

// handOver answers a program that has connected: with the descriptor of a new file system, or with the reason why not.
func (r *reconciler) handOver(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, stepBound)
	defer cancel()
	if err := conn.SetDeadline(time.Now().Add(takeoverBound + sendBound)); err != nil {
		return
	}
	_, podUID, _ := r.volume.Pod()
	p, err := peerOf(conn, podUID)
	if err == nil {
		err = r.awaitFreed(ctx)
	}
	if err == nil {
		err = r.passDescriptor(ctx, conn, p)
	}
	if err == nil || ctx.Err() != nil {
		return
	}
	klog.FromContext(ctx).Info("Refused the descriptor to a program", "pid", p.pid, "error", err)
	r.s.metrics.handovers.WithLabelValues(resultRefused).Inc()
	text := err.Error()
	if errors.Is(err, errForeignPeer) { // the log has which pod's it is
		text = errForeignPeer.Error()
	}
	r.recordFailure(ReasonRefused, time.Time{}, fmt.Sprintf("process %d did not get the descriptor: %s", p.pid, text))
	_, _ = conn.Write(osfile.FuseMessage{Error: text}.Encode()) // it may be gone
}

// awaitFreed returns nil if no client has the volume. It waits a moment for one that is exiting.
func (r *reconciler) awaitFreed(ctx context.Context) error {
	for began, pause := time.Now(), startingEvery; ; pause = min(2*pause, takeoverBound/4) { // a pod can have it wait all the time
		mounts, err := r.s.ns.KnownMounts(ctx)
		if err != nil {
			return err
		}
		current, ok := r.s.records.current(mounts, idOf(r.volume.Target))
		if !ok {
			return nil
		}
		if r.askClient(ctx, current) == gone {
			return r.showEmpty(ctx, mounts, current)
		}
		if time.Since(began) > takeoverBound {
			return fault.Errorf(fault.Busy, "another process of the pod has the volume's descriptor already")
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// passDescriptor mounts a new file system and passes its descriptor. The driver keeps no copy: the connection ends with the client.
func (r *reconciler) passDescriptor(ctx context.Context, conn *net.UnixConn, p peer) error {
	n, fuse, err := r.s.mountClient(ctx, r.volume, p)
	if err != nil {
		return err
	}
	r.client, r.left, r.serving, r.answered, r.asked = n, 0, false, time.Now(), 0
	message := osfile.FuseMessage{VolumeName: r.volume.VolumeID}.Encode()
	_, _, err = conn.WriteMsgUnix(message, unix.UnixRights(int(fuse.Fd())), nil)
	if cerr := fuse.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("passing the descriptor: %w", err)
	}
	r.recordHandover()
	klog.FromContext(ctx).Info("Passed the descriptor to a program in the pod", "pid", p.pid, "uid", p.uid)
	return nil
}
