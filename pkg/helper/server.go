package helper

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// requestTimeout bounds the reading of a request and the writing of its answer.
	requestTimeout = 10 * time.Second
	// maxRequests bounds requests that are open at once, waiting ones included; more wait in the socket's queue.
	maxRequests = 32
)

// serve answers requests until ctx ends and closes the listener. uid 0 and uid may ask, nobody else.
func (h *helper) serve(ctx context.Context, l *net.UnixListener, uid uint32) {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var open sync.WaitGroup
	defer open.Wait()
	slots := make(chan struct{}, maxRequests)
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			h.log.printf("accept a request: %v", err)
			time.Sleep(100 * time.Millisecond) // out of descriptors, as a rule
			continue
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			_ = conn.Close()
			return
		}
		open.Go(func() {
			defer func() { <-slots }()
			defer conn.Close()
			h.serveConn(ctx, conn, uid)
		})
	}
}

func (h *helper) serveConn(ctx context.Context, conn *net.UnixConn, allowed uint32) {
	_ = conn.SetDeadline(time.Now().Add(requestTimeout))
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	uid, err := peerUID(conn)
	if err != nil || uid != 0 && uid != allowed {
		h.log.printf("refused a request of uid %d", uid)
		h.reply(conn, Status{}, fault.Errorf(fault.Denied, "uid %d may not talk to this helper", uid))
		return
	}
	body, files, err := receive(conn)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil {
		if fault.KindOf(err) != fault.Unknown {
			h.reply(conn, Status{}, err)
		}
		return
	}
	h.talked(0)
	req, err := decodeRequest(body)
	if err == nil {
		var take *os.File
		if take, files, err = takeFile(req, files); err == nil {
			err = h.handle(ctx, conn, req, take)
		}
	}
	if errors.Is(err, errHungUp) {
		return
	}
	status, _ := h.snapshot()
	sent := h.reply(conn, status, err)
	if !sent || err != nil {
		return
	}
	switch req.Op {
	case opHello, opStatus:
		h.delivered(status)
	case opQuit:
		h.quit()
	}
}

// takeFile gives the one descriptor of a start request to its handler. What is left is to be closed.
func takeFile(req request, files []*os.File) (take *os.File, left []*os.File, err error) {
	want := 0
	if req.Op == opStart {
		want = 1
	}
	if len(files) != want {
		return nil, files, fault.Errorf(fault.Invalid, "%d descriptors came with the request (%s); it needs %d", len(files), req.Op, want)
	}
	if want == 1 {
		return files[0], nil, nil
	}
	return nil, nil, nil
}

// errHungUp: the one who asked does not wait any more.
var errHungUp = errors.New("the caller hung up")

// handle does what a request asks for; it owns fuse.
func (h *helper) handle(ctx context.Context, conn *net.UnixConn, req request, fuse *os.File) error {
	switch req.Op {
	case opHello:
		return nil
	case opStart:
		if req.Start == nil {
			_ = fuse.Close()
			return fault.Errorf(fault.Invalid, "the request says nothing about the client to start")
		}
		return h.start(StartRequest{Client: req.Start.Client, Command: client.Command{Argv: req.Start.Argv, Env: req.Start.Env}, Keys: req.Keys.keys(), Order: req.order()}, fuse)
	case opStatus:
		return h.await(ctx, conn, req.Since)
	case opCredentials:
		return h.credentials(req.Keys.keys(), req.order())
	case opEnd:
		h.end()
		return nil
	case opKill:
		h.kill()
		return nil
	case opQuit:
		return nil // once the answer is out
	}
	return fault.Errorf(fault.Unsupported, "this helper does not know the request %.20q: it was started by an older driver; end the mount and publish it again", req.Op)
}

// await returns when the revision is another than since, or the helper ends.
func (h *helper) await(ctx context.Context, conn *net.UnixConn, since uint64) error {
	status, changed := h.snapshot()
	if status.Revision != since {
		return nil
	}
	h.talked(+1)
	defer h.talked(-1)
	_ = conn.SetReadDeadline(time.Time{})
	if ctx.Err() != nil {
		return nil
	}
	// The only thing that can come now is the caller's end.
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = conn.Read(make([]byte, 1))
	}()
	defer func() {
		_ = conn.SetReadDeadline(time.Unix(1, 0))
		<-gone
	}()
	select {
	case <-changed:
	case <-ctx.Done():
	case <-gone:
		if ctx.Err() == nil {
			return errHungUp
		}
	}
	return nil
}

// reply sends an answer; false: it could not be.
func (h *helper) reply(conn *net.UnixConn, status Status, err error) bool {
	rep := reply{Protocol: 1, Status: &status}
	if err != nil {
		rep = reply{Protocol: 1, Error: newWireError(err)}
	}
	message, err := encode(rep)
	if err != nil {
		h.log.printf("answer a request: %v", err)
		return false
	}
	_ = conn.SetWriteDeadline(time.Now().Add(requestTimeout))
	_, err = conn.Write(message)
	return err == nil
}
