package podclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
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

func (p *pace) admit(now time.Time) {
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
	progress   Progress

	mu       sync.Mutex // is held during calls
	listener *net.UnixListener
	bound    fileID
	// listening receives the listener, if it has changed.
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
	return &reconciler{s: s, volume: v, progress: Progress{State: Unknown, Since: time.Now()}, done: make(chan struct{}), listening: make(chan struct{}, 1)}
}

// wait waits until run has returned.
func (r *reconciler) wait(ctx context.Context) error {
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
	v, root := r.volume, r.s.TargetRoot
	if r.listener != nil {
		bound, err := host.Call(ctx, r.s.Namespace, "looking at the socket of "+v.Target, nil, func() (bool, error) { return isBound(root, v, r.bound), nil })
		if err != nil || bound {
			return err
		}
		r.listener.Close()
		r.listener = nil
	}
	type result struct {
		l  *net.UnixListener
		id fileID
	}
	got, err := onOwnThread(ctx, r.s.Namespace, "listening for the client of "+v.Target, func(late result) {
		if late.l != nil {
			late.l.Close()
		}
	}, func() (made result, err error) {
		made.l, made.id, err = listen(root, v)
		return made, err
	})
	if err != nil {
		return err
	}
	r.listener, r.bound = got.l, got.id
	select {
	case r.listening <- struct{}{}:
	default:
	}
	return nil
}

func (r *reconciler) closeListener() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.listener != nil {
		r.listener.Close()
		r.listener = nil
	}
}

func (r *reconciler) currentListener() *net.UnixListener {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.listener
}

// run attends to the volume until ctx ends.
func (r *reconciler) run(ctx context.Context) {
	conns := make(chan *net.UnixConn)
	var accepting sync.WaitGroup
	defer accepting.Wait()
	defer r.closeListener()
	accepting.Go(func() { r.accept(ctx, conns) })
	r.answered = time.Now()
	for {
		r.step(ctx)
		every := servingEvery
		if r.s.HangTimeout > 0 {
			every = min(every, max(r.s.HangTimeout/8, startingEvery))
		}
		if r.aborted {
			every = startingEvery
		}
		if r.client != r.left && !r.serving { // it is starting
			every = min(max(time.Since(r.answered)/8, startingEvery), servingEvery)
		}
		incoming := conns
		if wait := r.pace.wait(time.Now()); wait > 0 {
			incoming, every = nil, min(every, wait)
		}
		select {
		case <-ctx.Done():
			return
		case conn := <-incoming:
			r.pace.admit(time.Now())
			r.handOver(ctx, conn)
		case <-time.After(every):
		}
	}
}

// accept passes connections on until ctx ends.
func (r *reconciler) accept(ctx context.Context, conns chan<- *net.UnixConn) {
	stop := context.AfterFunc(ctx, r.closeListener)
	defer stop()
	for ctx.Err() == nil {
		l := r.currentListener()
		var conn *net.UnixConn
		err := errors.New("no listener")
		if l != nil {
			conn, err = l.AcceptUnix()
		}
		if err != nil { // it was replaced, or is to be made yet
			select {
			case <-r.listening:
			case <-time.After(startingEvery):
			case <-ctx.Done():
			}
			continue
		}
		select {
		case conns <- conn:
		case <-ctx.Done():
			conn.Close()
		}
	}
}

// step looks at the socket and at the client. Each step begins with what is mounted, so it also completes what an earlier driver began.
//
// Only the calls that wait for the client are on its account: when that is exhausted, the others can still abort the connection.
func (r *reconciler) step(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepBound)
	defer cancel()
	if err := r.listen(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("Cannot listen for client in pod, will retry", "error", err)
		r.fail(ReasonSocket, time.Now().Add(servingEvery), "cannot listen for the client: %v", err)
	}
	if err := r.look(ctx); err != nil && ctx.Err() == nil {
		r.fail(ReasonReconcile, time.Now().Add(servingEvery), "%v", err)
		klog.FromContext(ctx).Error(err, "Cannot look at client in pod, will retry")
	}
}

// look finds out whether the current client serves, and shows what there is to show.
func (r *reconciler) look(ctx context.Context) error {
	mounts, err := r.s.Namespace.KnownMounts(ctx)
	if err != nil {
		return err
	}
	id := idOf(r.volume.Target)
	current, ok := r.s.records.current(mounts, id)
	if !ok {
		r.client, r.left, r.aborted = 0, 0, false
		if r.current().State != Exited { // whose file system was removed
			r.set(Waiting)
		}
		return nil
	}
	if current.n != r.client { // of an earlier driver
		r.client, r.serving, r.answered, r.asked = current.n, false, time.Now(), 0
	}
	top, _ := host.TopAt(mounts, r.volume.Target)
	switch r.ask(ctx, current) {
	case silent:
		limit := r.s.HangTimeout
		if !r.serving {
			limit = r.s.ReadyTimeout
		}
		silence := time.Since(r.answered)
		switch unresponsive := silence >= unresponsiveAfter || limit > 0 && silence >= limit; {
		case !r.serving:
			r.set(Starting)
		case unresponsive:
			r.set(Unresponsive)
			var next time.Time
			if limit > 0 {
				next = r.answered.Add(limit)
			}
			r.fail(ReasonUnresponsive, next, "the client does not answer")
		}
		if limit > 0 && silence >= limit {
			klog.FromContext(ctx).Info("Client in pod is unresponsive, aborting its connection", "client", current.n, "after", limit, "answered", r.serving)
			return r.abort(ctx, current)
		}
	case gone:
		return r.leave(ctx, mounts, current)
	case answered:
		if !r.serving {
			r.serving, r.replaceWait, r.replaceAt = true, firstReplace, time.Time{}
			klog.FromContext(ctx).Info("Client in pod serves the volume", "client", current.n)
		}
		r.answered = time.Now()
		r.set(Serving)
		// At once if the target has lost the client's file system. A client can have one that cannot be shown, and each try costs the driver
		// a look at the mount namespaces of all processes.
		shown := top.Minor == current.Minor
		if time.Now().Before(r.replaceAt) && (shown || !r.replaced) {
			return nil
		}
		r.replaced = shown
		failpoint.Here("podclient.answered")
		again, err := r.s.replace(ctx, r.volume, current, false)
		if !again && err == nil {
			err = r.s.prune(ctx, r.volume, current.n)
		}
		r.replaceAt = time.Now().Add(r.replaceWait)
		r.replaceWait = min(2*r.replaceWait, lastReplace)
		return err
	}
	return nil
}

// abort ends the connection of a client that does not answer. Until its end is seen, the reconciler looks more often.
func (r *reconciler) abort(ctx context.Context, m own) error {
	if err := r.s.abort(ctx, m); err != nil {
		r.aborted = false
		return err
	}
	r.aborted = true
	what := "it did not answer"
	if !r.serving {
		what = "it did not answer after it had got the descriptor"
	}
	r.fail(ReasonUnresponsive, time.Time{}, "the client's connection was aborted: %s", what)
	return nil
}

// leave shows the empty file system at the target after the client has exited, and removes that of the client unless containers show it.
func (r *reconciler) leave(ctx context.Context, mounts []host.Mount, current own) error {
	aborted := r.aborted
	r.aborted = false
	if r.left == current.n {
		return nil
	}
	r.exited(aborted)
	empty, ok := host.TopAt(mounts, r.s.records.empty(idOf(r.volume.Target)))
	if !ok {
		return fault.Errorf(fault.Unavailable, "the empty file system of %s was unmounted by another process", r.volume.Target)
	}
	klog.FromContext(ctx).Info("Client in pod has exited", "client", current.n, "answered", r.serving)
	r.serving = false
	// A client that the kernel does not understand still has its descriptor.
	if err := r.s.abort(ctx, current); err != nil {
		return err
	}
	if again, err := r.s.replace(ctx, r.volume, own{empty, 0}, true); again || err != nil {
		return err
	}
	r.left = current.n
	return r.s.prune(ctx, r.volume, 0)
}

// finding is what a look at a client has found.
type finding int

const (
	silent   finding = iota // it has not answered in time
	answered                // also with an error
	gone                    // its connection has ended
)

// ask looks at a client. The call of a client that never answers stays in the kernel until the connection is aborted; there is at most one.
// So if a call was started while an earlier look's was not answered in time, that one was answered late: the client is slow.
func (r *reconciler) ask(ctx context.Context, m own) finding {
	bounded, cancel := context.WithTimeout(host.For(ctx, account(r.volume)), answerBound)
	defer cancel()
	err := r.s.Namespace.Answers(bounded, m.Mountpoint)
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
		err = r.free(ctx)
	}
	if err == nil {
		err = r.pass(ctx, conn, p)
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
	r.fail(ReasonRefused, time.Time{}, "process %d did not get the descriptor: %s", p.pid, text)
	_, _ = conn.Write(osfile.FuseMessage{Error: text}.Encode()) // it may be gone
}

// free returns nil if no client has the volume. It waits a moment for one that is exiting.
func (r *reconciler) free(ctx context.Context) error {
	for began, pause := time.Now(), startingEvery; ; pause = min(2*pause, takeoverBound/4) { // a pod can have it wait all the time
		mounts, err := r.s.Namespace.KnownMounts(ctx)
		if err != nil {
			return err
		}
		current, ok := r.s.records.current(mounts, idOf(r.volume.Target))
		if !ok {
			return nil
		}
		if r.ask(ctx, current) == gone {
			return r.leave(ctx, mounts, current)
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

// pass mounts a new file system and passes its descriptor. The driver keeps no copy: the connection ends with the client.
func (r *reconciler) pass(ctx context.Context, conn *net.UnixConn, p peer) error {
	n, fuse, err := r.s.mountClient(ctx, r.volume, p.uid, p.gid)
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
	r.handedOver()
	klog.FromContext(ctx).Info("Passed the descriptor to a program in the pod", "pid", p.pid, "uid", p.uid)
	return nil
}
