package helper

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// requestTimeout bounds reading a request and writing its answer.
	requestTimeout = 10 * time.Second
	// maxRequests bounds concurrent requests, waiting ones included; more wait in the socket's queue.
	maxRequests = 32
)

// serve answers requests until ctx ends, and closes the listener. Only uid 0 and uid may send requests.
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
			h.log.printf("accepting a request failed: %v", err)
			time.Sleep(100 * time.Millisecond) // usually out of descriptors
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
		h.log.printf("request refused: uid=%d", uid)
		h.reply(conn, Status{}, fault.Errorf(fault.Denied, "uid %d is not allowed to send requests to this helper", uid))
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
	h.noteRequest(0)
	req, err := decodeRequest(body)
	if err == nil {
		var take *os.File
		if take, files, err = takeFile(req, files); err == nil {
			err = h.handle(ctx, conn, req, take)
		}
	}
	if errors.Is(err, errCallerGone) {
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

// takeFile returns the descriptor of a start request. The caller closes those in left.
func takeFile(req request, files []*os.File) (take *os.File, left []*os.File, err error) {
	want := 0
	if req.Op == opStart {
		want = 1
	}
	if len(files) != want {
		return nil, files, fault.Errorf(fault.Invalid, "request %s has %d descriptors, but needs %d", req.Op, len(files), want)
	}
	if want == 1 {
		return files[0], nil, nil
	}
	return nil, nil, nil
}

// errCallerGone means that the caller has closed the connection.
var errCallerGone = errors.New("the caller closed the connection")

// handle carries out a request. It closes fuse.
func (h *helper) handle(ctx context.Context, conn *net.UnixConn, req request, fuse *os.File) error {
	switch req.Op {
	case opHello:
		return nil
	case opAssign:
		if req.Assign == nil {
			return fault.Errorf(fault.Invalid, "the request does not describe the mount")
		}
		return h.assign(*req.Assign)
	case opStart:
		if req.Start == nil {
			_ = fuse.Close()
			return fault.Errorf(fault.Invalid, "the request does not describe the client to start")
		}
		req.Start.Keys, req.Start.Order, req.Start.ProxyCredentials = req.Keys, req.Order, req.Proxy
		return h.start(*req.Start, fuse)
	case opStatus:
		return h.await(ctx, conn, req.Since)
	case opCredentials:
		return h.credentials(req.Keys, req.Order)
	case opForget:
		h.forget()
		return nil
	case opFlush:
		return h.flush()
	case opEnd:
		h.end()
		return nil
	case opKill:
		h.kill()
		return nil
	case opQuit:
		return nil // after the answer is sent
	}
	return fault.Errorf(fault.Unsupported, "this helper was started by an older driver and does not support the request %.20q; "+
		"unpublish and republish the volume", req.Op)
}

// await returns when the revision differs from since, or the helper exits.
func (h *helper) await(ctx context.Context, conn *net.UnixConn, since uint64) error {
	status, changed := h.snapshot()
	if status.Revision != since {
		return nil
	}
	h.noteRequest(+1)
	defer h.noteRequest(-1)
	_ = conn.SetReadDeadline(time.Time{})
	if ctx.Err() != nil {
		return nil
	}
	// Nothing more can come but the end of the connection.
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
			return errCallerGone
		}
	}
	return nil
}

// reply sends an answer and reports whether that succeeded.
func (h *helper) reply(conn *net.UnixConn, status Status, err error) bool {
	rep := reply{Protocol: 1, Status: &status}
	if err != nil {
		rep = reply{Protocol: 1, Error: fault.MessageOf(err)}
	}
	message, err := encode(rep)
	if err != nil {
		h.log.printf("answering a request failed: %v", err)
		return false
	}
	_ = conn.SetWriteDeadline(time.Now().Add(requestTimeout))
	_, err = conn.Write(message)
	return err == nil
}
