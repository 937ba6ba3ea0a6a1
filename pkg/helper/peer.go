package helper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ErrGone means that no helper serves the socket: it has exited, or has not started yet.
var ErrGone = errors.New("no helper answers on the socket")

// callTimeout bounds every request but a waiting status, in addition to the caller's context.
const callTimeout = 10 * time.Second

// Peer is the driver's client of a helper. It holds no connection and is safe for concurrent use.
//
// Errors wrap ErrGone if no helper serves the socket and the context's error if that ended first. Otherwise they have the
// fault kind that the helper set.
type Peer struct {
	dial func(ctx context.Context) (*net.UnixConn, error)
}

// NewPeer returns a peer that dials for every request.
func NewPeer(dial func(ctx context.Context) (*net.UnixConn, error)) *Peer { return &Peer{dial: dial} }

// Dial returns a dial function for NewPeer, for a socket that this process sees at path.
func Dial(path string) func(ctx context.Context) (*net.UnixConn, error) {
	return func(ctx context.Context) (*net.UnixConn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		return conn.(*net.UnixConn), nil //nolint:forcetypeassert // the type for "unix"
	}
}

// Status returns the helper's current status.
func (p *Peer) Status(ctx context.Context) (Status, error) {
	return p.call(ctx, &request{Op: opHello}, nil)
}

// Assign makes a spare the helper of a mount. A helper that is not a spare, or that has a mount, is Exists.
func (p *Peer) Assign(ctx context.Context, a Assignment) error {
	_, err := p.call(ctx, &request{Op: opAssign, Assign: &a}, nil)
	return err
}

// Start runs a client on the FUSE descriptor. The caller must close that: only then does the client's exit end the connection.
// Start returns when the program runs; it may not serve the file system yet. A program that cannot be started is
// Precondition, a client that is already running Exists. After a request with Await, Renew supplies the session.
func (p *Peer) Start(ctx context.Context, req StartRequest, fuse *os.File) (Status, error) {
	return p.call(ctx, &request{Op: opStart, Start: &req, Keys: req.Keys, Order: req.Order, Proxy: req.ProxyCredentials}, fuse)
}

// WaitStatus waits until the helper's revision differs from since and returns the status. It is bounded by ctx alone.
func (p *Peer) WaitStatus(ctx context.Context, since uint64) (Status, error) {
	return p.ask(ctx, &request{Op: opStatus, Since: since}, nil)
}

// Renew replaces the client's session and the order from which the helper makes the next ones. Zero keys keep the current
// session. Then the helper uses the order at once if there was none before, or if the session has expired or could not be
// renewed, and otherwise when the session is due. With a zero order it makes no further sessions.
func (p *Peer) Renew(ctx context.Context, keys credentials.Keys, order credentials.Order) error {
	_, err := p.call(ctx, &request{Op: opCredentials, Keys: keys, Order: order}, nil)
	return err
}

// Forget makes the helper drop the client's session and the order, until Renew brings others. The client may use the session that it
// was given for advertisedLifetime more.
func (p *Peer) Forget(ctx context.Context) error {
	_, err := p.call(ctx, &request{Op: opForget}, nil)
	return err
}

// Flush makes the client upload its queue at once. It does not wait for that: the flush has finished when the Done of a later
// status is no less than the Asked of this one, while the client is the same. A client that reports no flushes is fault.Unsupported.
func (p *Peer) Flush(ctx context.Context) (Status, error) {
	return p.call(ctx, &request{Op: opFlush}, nil)
}

// End announces that the mount is about to be unmounted, so that the client's exit is expected. It cannot be undone: after it
// another client can be started only if the last one exited abnormally.
func (p *Peer) End(ctx context.Context) error {
	_, err := p.call(ctx, &request{Op: opEnd}, nil)
	return err
}

// Kill makes the helper kill a running client and its process group. The helper keeps its keys, reports the exit like any
// other, and can then start another client. Kill returns when the signal is sent. A client that is blocked in the kernel
// exits only with its FUSE connection, so wait for the exit with Status.
func (p *Peer) Kill(ctx context.Context) error {
	_, err := p.call(ctx, &request{Op: opKill}, nil)
	return err
}

// Quit makes the helper kill a running client and exit. It returns when the helper has accepted the request, with its last status.
func (p *Peer) Quit(ctx context.Context) (Status, error) {
	return p.call(ctx, &request{Op: opQuit}, nil)
}

func (p *Peer) call(ctx context.Context, req *request, f *os.File) (Status, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return p.ask(ctx, req, f)
}

func (p *Peer) ask(ctx context.Context, req *request, f *os.File) (Status, error) {
	status, err := p.exchange(ctx, req, f)
	if err != nil {
		return Status{}, explain(ctx, req.Op, err)
	}
	return *status, nil
}

// explain returns the error of a request as Peer documents it.
func explain(ctx context.Context, op string, err error) error {
	switch {
	case ctx.Err() != nil && fault.KindOf(err) == fault.Unknown:
		return fmt.Errorf("ask the helper (%s): %w", op, ctx.Err())
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		return fmt.Errorf("ask the helper (%s): %w (%w)", op, ErrGone, err)
	}
	return fmt.Errorf("ask the helper (%s): %w", op, err)
}

// exchange takes and returns pointers, because a goroutine for each mount waits in it: with large frames its stack would have 16 KiB
// instead of 8.
func (p *Peer) exchange(ctx context.Context, req *request, f *os.File) (*Status, error) {
	req.Protocol = ProtocolVersion
	message, err := encode(req)
	if err != nil {
		return nil, err
	}
	conn, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	if err := checkPeer(conn); err != nil {
		return nil, err
	}
	// A helper that refuses a request answers without reading all of it, so read the answer even if sending failed.
	sendErr := send(conn, message, f)
	rep, err := readReply(conn)
	switch {
	case err != nil && sendErr != nil:
		return nil, sendErr
	case err != nil:
		return nil, err
	case rep.Error != nil:
		return nil, rep.Error.Err()
	case rep.Status == nil:
		return nil, errors.New("the helper's answer has no status")
	}
	return rep.Status, nil
}

// checkPeer refuses a socket on which neither root nor this user listens: credentials are not sent to others.
func checkPeer(conn *net.UnixConn) error {
	uid, err := peerUID(conn)
	if err != nil {
		return err
	}
	if uid != 0 && uid != uint32(os.Geteuid()) {
		return fault.Errorf(fault.Denied, "the helper's socket belongs to uid %d, neither root nor the driver's own; nothing was sent", uid)
	}
	return nil
}
