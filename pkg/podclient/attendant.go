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
	"github.com/s3-csi/s3-csi-driver/pkg/fdpass"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
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
	// stepBound bounds the work of one step.
	stepBound = time.Minute
	// Programs of the pod can connect again and again, and each time costs the driver a mount and lines in its log: after a burst, one is
	// answered in each interval.
	meetBurst, meetEvery = 10, time.Second
)

// pace admits meetBurst events at once, and then one every meetEvery.
type pace struct{ next time.Time }

// wait is the time until the next event is admitted.
func (p *pace) wait(now time.Time) time.Duration {
	return p.next.Add(-(meetBurst - 1) * meetEvery).Sub(now)
}

func (p *pace) admit(now time.Time) {
	if p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(meetEvery)
}

// attendant attends to one volume: it listens, passes descriptors, and shows the file systems of clients. What it remembers it can find
// again: it begins with what is mounted.
type attendant struct {
	s      *Server
	volume podvolume.Volume

	launched bool // guarded by Server.mu, like cancel
	cancel   context.CancelFunc
	done     chan struct{}

	mu       sync.Mutex
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
	pace        pace      // of meetings
	replaceWait time.Duration
	replaceAt   time.Time
}

func newAttendant(s *Server, v podvolume.Volume) *attendant {
	return &attendant{s: s, volume: v, done: make(chan struct{}), listening: make(chan struct{}, 1)}
}

// listen makes sure that the driver listens on the volume's socket.
func (a *attendant) listen(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	v, root := a.volume, a.s.TargetRoot
	if a.listener != nil {
		bound, err := host.Call(ctx, a.s.Namespace, "looking at the socket of "+v.Target, nil, func() (bool, error) { return isBound(root, v, a.bound), nil })
		if err != nil || bound {
			return err
		}
		a.listener.Close()
		a.listener = nil
	}
	type result struct {
		l  *net.UnixListener
		id fileID
	}
	r, err := onOwnThread(ctx, a.s.Namespace, "listening for the client of "+v.Target, func(r result) {
		if r.l != nil {
			r.l.Close()
		}
	}, func() (r result, err error) {
		r.l, r.id, err = listen(root, v)
		return r, err
	})
	if err != nil {
		return err
	}
	a.listener, a.bound = r.l, r.id
	select {
	case a.listening <- struct{}{}:
	default:
	}
	return nil
}

func (a *attendant) closeListener() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.listener != nil {
		a.listener.Close()
		a.listener = nil
	}
}

func (a *attendant) currentListener() *net.UnixListener {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.listener
}

// run attends to the volume until ctx ends.
func (a *attendant) run(ctx context.Context) {
	conns := make(chan *net.UnixConn)
	var accepting sync.WaitGroup
	defer accepting.Wait()
	defer a.closeListener()
	accepting.Go(func() { a.accept(ctx, conns) })
	a.answered = time.Now()
	for {
		a.step(ctx)
		every := servingEvery
		if a.s.HangTimeout > 0 {
			every = min(every, max(a.s.HangTimeout/8, startingEvery))
		}
		if a.aborted {
			every = startingEvery
		}
		if a.client != a.left && !a.serving { // it is starting
			every = min(max(time.Since(a.answered)/8, startingEvery), servingEvery)
		}
		incoming := conns
		if wait := a.pace.wait(time.Now()); wait > 0 {
			incoming, every = nil, min(every, wait)
		}
		select {
		case <-ctx.Done():
			return
		case conn := <-incoming:
			a.pace.admit(time.Now())
			a.meet(ctx, conn)
		case <-time.After(every):
		}
	}
}

// accept passes connections on until ctx ends.
func (a *attendant) accept(ctx context.Context, conns chan<- *net.UnixConn) {
	stop := context.AfterFunc(ctx, a.closeListener)
	defer stop()
	for ctx.Err() == nil {
		l := a.currentListener()
		var conn *net.UnixConn
		err := errors.New("no listener")
		if l != nil {
			conn, err = l.AcceptUnix()
		}
		if err != nil { // it was replaced, or is to be made yet
			select {
			case <-a.listening:
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
func (a *attendant) step(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepBound)
	defer cancel()
	if err := a.listen(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("Cannot listen for client in pod, will retry", "error", err)
	}
	if err := a.look(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot look at client in pod, will retry")
	}
}

// look finds out whether the current client serves, and shows what there is to show.
func (a *attendant) look(ctx context.Context) error {
	mounts, err := a.s.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	id := idOf(a.volume.Target)
	current, ok := a.s.records.current(mounts, id)
	if !ok {
		a.client, a.left, a.aborted = 0, 0, false
		return nil
	}
	if current.n != a.client { // of an earlier driver
		a.client, a.serving, a.answered, a.asked = current.n, false, time.Now(), 0
	}
	top, _ := host.TopAt(mounts, a.volume.Target)
	switch a.ask(ctx, current) {
	case silent:
		limit := a.s.HangTimeout
		if !a.serving {
			limit = a.s.ReadyTimeout
		}
		if limit > 0 && time.Since(a.answered) >= limit {
			klog.FromContext(ctx).Info("Client in pod is unresponsive, aborting its connection", "client", current.n, "after", limit, "answered", a.serving)
			return a.abort(ctx, current)
		}
	case gone:
		return a.leave(ctx, mounts, current)
	case answered:
		if !a.serving {
			a.serving, a.replaceWait = true, firstReplace
			klog.FromContext(ctx).Info("Client in pod serves the volume", "client", current.n)
		}
		a.answered = time.Now()
		if top.Minor == current.Minor && time.Now().Before(a.replaceAt) {
			return nil
		}
		failpoint.Here("podclient.answered")
		again, err := a.s.replace(ctx, a.volume, current, false)
		if !again && err == nil {
			err = a.s.prune(ctx, a.volume, current.n)
		}
		a.replaceAt = time.Now().Add(a.replaceWait)
		a.replaceWait = min(2*a.replaceWait, lastReplace)
		return err
	}
	return nil
}

// abort ends the connection of a client that does not answer. Until its end is seen, the attendant looks more often.
func (a *attendant) abort(ctx context.Context, m own) error {
	err := a.s.abort(ctx, m)
	a.aborted = err == nil
	return err
}

// leave shows the empty file system at the target after the client has exited, and removes that of the client unless containers show it.
func (a *attendant) leave(ctx context.Context, mounts []host.Mount, current own) error {
	a.aborted = false
	if a.left == current.n {
		return nil
	}
	empty, ok := host.TopAt(mounts, a.s.records.empty(idOf(a.volume.Target)))
	if !ok {
		return fault.Errorf(fault.Unavailable, "the empty file system of %s was unmounted by another process", a.volume.Target)
	}
	klog.FromContext(ctx).Info("Client in pod has exited", "client", current.n, "answered", a.serving)
	a.serving = false
	// A client that the kernel does not understand still has its descriptor.
	if err := a.s.abort(ctx, current); err != nil {
		return err
	}
	if again, err := a.s.replace(ctx, a.volume, own{empty, 0}, true); again || err != nil {
		return err
	}
	a.left = current.n
	return a.s.prune(ctx, a.volume, 0)
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
func (a *attendant) ask(ctx context.Context, m own) finding {
	bounded, cancel := context.WithTimeout(host.For(ctx, account(a.volume)), answerBound)
	defer cancel()
	err := a.s.Namespace.Answers(bounded, m.Mountpoint)
	if started := errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil; started {
		late := a.asked == m.n
		a.asked = m.n
		if late {
			return answered
		}
		return silent
	}
	var errno unix.Errno
	switch {
	case err == nil:
		a.asked = 0
		return answered
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENODEV):
		return gone
	case errors.As(err, &errno):
		return answered
	}
	return silent
}

// meet answers a program that has connected: with the descriptor of a new file system, or with the reason why not.
func (a *attendant) meet(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, stepBound)
	defer cancel()
	if err := conn.SetDeadline(time.Now().Add(takeoverBound + sendBound)); err != nil {
		return
	}
	_, podUID, _ := a.volume.Pod()
	p, err := peerOf(conn, podUID)
	if err == nil {
		err = a.free(ctx)
	}
	if err == nil {
		err = a.pass(ctx, conn, p)
	}
	if err == nil || ctx.Err() != nil {
		return
	}
	klog.FromContext(ctx).Info("Refused the descriptor to a program", "pid", p.pid, "error", err)
	text := err.Error()
	if errors.Is(err, errForeignPeer) {
		text = errForeignPeer.Error()
	}
	_, _ = conn.Write(fdpass.Message{Error: text}.Encode()) // it may be gone
}

// free returns nil if no client has the volume. It waits a moment for one that is exiting.
func (a *attendant) free(ctx context.Context) error {
	for began := time.Now(); ; {
		mounts, err := a.s.Namespace.Mounts(ctx)
		if err != nil {
			return err
		}
		current, ok := a.s.records.current(mounts, idOf(a.volume.Target))
		if !ok {
			return nil
		}
		if a.ask(ctx, current) == gone {
			return a.leave(ctx, mounts, current)
		}
		if time.Since(began) > takeoverBound {
			return fault.Errorf(fault.Busy, "another process of the pod has the volume's descriptor already")
		}
		select {
		case <-time.After(startingEvery):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pass mounts a new file system and passes its descriptor. The driver keeps no copy: the connection ends with the client.
func (a *attendant) pass(ctx context.Context, conn *net.UnixConn, p peer) error {
	n, fuse, err := a.s.mountClient(ctx, a.volume, p.uid, p.gid)
	if err != nil {
		return err
	}
	a.client, a.left, a.serving, a.answered, a.asked = n, 0, false, time.Now(), 0
	message := fdpass.Message{VolumeName: a.volume.VolumeID}.Encode()
	_, _, err = conn.WriteMsgUnix(message, unix.UnixRights(int(fuse.Fd())), nil)
	if cerr := fuse.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("passing the descriptor: %w", err)
	}
	klog.FromContext(ctx).Info("Passed the descriptor to a program in the pod", "pid", p.pid, "uid", p.uid)
	return nil
}
