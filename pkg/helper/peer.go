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

// ErrGone tells that nobody serves the socket: the helper has ended, or is not up yet.
var ErrGone = errors.New("no helper answers on the socket")

// callTimeout bounds every request but a waiting status, beside the caller's context.
const callTimeout = 10 * time.Second

// Peer is the driver's end of a helper's socket. It holds no connection and can be used by several goroutines.
//
// Errors wrap ErrGone when nobody serves the socket, the context's error when it ended first, and otherwise carry the
// fault kind that the helper gave them.
type Peer struct {
	dial func(ctx context.Context) (*net.UnixConn, error)
}

// NewPeer makes a peer that dials anew for every request.
func NewPeer(dial func(ctx context.Context) (*net.UnixConn, error)) *Peer { return &Peer{dial: dial} }

// Dial is a dial function for NewPeer, for a socket that this process sees at path.
func Dial(path string) func(ctx context.Context) (*net.UnixConn, error) {
	return func(ctx context.Context) (*net.UnixConn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		return conn.(*net.UnixConn), nil //nolint:forcetypeassert // what a dialer of "unix" gives
	}
}

// Hello is the helper's status right now.
func (p *Peer) Hello(ctx context.Context) (Status, error) {
	return p.call(ctx, request{Op: opHello}, nil, true)
}

// Start runs a client on the FUSE descriptor, which stays the caller's to close: only after that does the client's death
// end the connection. It returns when the program runs, which does not mean that it serves the file system yet. A
// program that cannot be started is Precondition, a client that runs already Exists.
func (p *Peer) Start(ctx context.Context, req StartRequest, fuse *os.File) (Status, error) {
	return p.call(ctx, request{
		Op:    opStart,
		Start: &wireStart{Client: req.Client, Argv: req.Command.Argv, Env: req.Command.Env},
		Keys:  newWireKeys(req.Keys),
		Order: newWireOrder(req.Order),
	}, fuse, true)
}

// Status waits until the helper's revision is beyond since and gives the status then. It is bounded by ctx alone. A
// since that this helper has not reached yet was another's and is answered at once.
func (p *Peer) Status(ctx context.Context, since uint64) (Status, error) {
	return p.call(ctx, request{Op: opStatus, Since: since}, nil, false)
}

// Credentials replaces the keys that the client is given from now on. A helper that makes sessions makes no more: these are
// all until others come.
func (p *Peer) Credentials(ctx context.Context, keys credentials.Keys) error {
	_, err := p.call(ctx, request{Op: opCredentials, Keys: newWireKeys(keys)}, nil, true)
	return err
}

// Renew replaces what the helper has: the session that the client is given from now on, and the order that the next ones are
// made from. Keys that are zero leave the present session in use; then the order is tried at once if the present session
// was not made from one, is over or could not be renewed, and otherwise when the session is due. An order that is zero is
// Credentials.
//
// It is for helpers whose status has a Session: others ignore the order, and refuse (Invalid) a request without keys.
func (p *Peer) Renew(ctx context.Context, keys credentials.Keys, order credentials.Order) error {
	req := request{Op: opCredentials, Order: newWireOrder(order)}
	if !keys.IsZero() {
		req.Keys = newWireKeys(keys)
	}
	_, err := p.call(ctx, req, nil, true)
	return err
}

// End says that the mount is about to be unmounted, so that the client's exit is expected. It cannot be taken back: a
// further client is started only to finish what one that ended badly left undone.
func (p *Peer) End(ctx context.Context) error {
	_, err := p.call(ctx, request{Op: opEnd}, nil, true)
	return err
}

// Kill makes the helper kill the client that runs, with all of its process group; none: nothing happens. The helper lives
// on, keeps its keys, reports the exit as any other, and takes a new Start then. Kill returns when the signal is sent: a
// client that hangs in the kernel ends only with its connection, so wait for the exit with Status.
//
// A helper that was started by a driver too old to know the request is Unsupported, and nothing was done.
func (p *Peer) Kill(ctx context.Context) error {
	_, err := p.call(ctx, request{Op: opKill}, nil, true)
	return err
}

// Quit makes the helper kill a client that still runs and end itself. It returns when the helper has accepted that.
func (p *Peer) Quit(ctx context.Context) error {
	_, err := p.call(ctx, request{Op: opQuit}, nil, true)
	return err
}

func (p *Peer) call(ctx context.Context, req request, f *os.File, bounded bool) (Status, error) {
	if bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	status, err := p.exchange(ctx, req, f)
	switch {
	case err == nil:
		return status, nil
	case ctx.Err() != nil && fault.KindOf(err) == fault.Unknown:
		return Status{}, fmt.Errorf("ask the helper (%s): %w", req.Op, ctx.Err())
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		return Status{}, fmt.Errorf("ask the helper (%s): %w (%w)", req.Op, ErrGone, err)
	}
	return Status{}, fmt.Errorf("ask the helper (%s): %w", req.Op, err)
}

func (p *Peer) exchange(ctx context.Context, req request, f *os.File) (_ Status, err error) {
	req.Protocol = 1 // every request of this package can be understood by protocol 1
	message, err := encode(req)
	if err != nil {
		return Status{}, err
	}
	conn, err := p.dial(ctx)
	if err != nil {
		return Status{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	// Keys go only to a socket that root, or this very user, listens on.
	uid, err := peerUID(conn)
	if err != nil {
		return Status{}, err
	}
	if uid != 0 && uid != uint32(os.Geteuid()) {
		return Status{}, fault.Errorf(fault.Denied, "the helper's socket was made by uid %d, neither root nor the driver's own: nothing was sent to it", uid)
	}
	// A helper that refuses a request answers and closes without reading all of it, so look for the answer even when
	// the request did not go out whole.
	sendErr := send(conn, message, f)
	rep, err := readReply(conn)
	switch {
	case err != nil && sendErr != nil:
		return Status{}, sendErr
	case err != nil:
		return Status{}, err
	case rep.Error != nil:
		return Status{}, rep.Error.fault()
	case rep.Status == nil:
		return Status{}, errors.New("the helper's answer has no status")
	}
	return *rep.Status, nil
}
