package helper

import (
	"context"
	"errors"
	"net"
	"os"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// ProtocolVersion is the protocol of this package.
const ProtocolVersion = 1

// ErrGone: nobody serves the socket; the helper has ended or is not up yet.
var ErrGone = errors.New("no helper answers on the socket")

var errTODO = errors.New("not written yet")

// Peer is the driver's end of a helper's socket.
type Peer struct {
	dial func(ctx context.Context) (*net.UnixConn, error)
}

// NewPeer makes a peer that dials anew for every request.
func NewPeer(dial func(ctx context.Context) (*net.UnixConn, error)) *Peer { return &Peer{dial: dial} }

// Listen makes the socket of a helper.
func Listen(path string) (*os.File, error) { return nil, errTODO }

// Hello asks for the status.
func (p *Peer) Hello(ctx context.Context) (Status, error) { return Status{}, errTODO }

// Start starts a client.
func (p *Peer) Start(ctx context.Context, req StartRequest, fuse *os.File) (Status, error) {
	return Status{}, errTODO
}

// Status waits for a revision beyond since.
func (p *Peer) Status(ctx context.Context, since uint64) (Status, error) { return Status{}, errTODO }

// Credentials replaces the client's keys.
func (p *Peer) Credentials(ctx context.Context, keys credentials.Keys) error { return errTODO }

// End says that the mount is about to go.
func (p *Peer) End(ctx context.Context) error { return errTODO }

// Quit ends the helper.
func (p *Peer) Quit(ctx context.Context) error { return errTODO }

// Run is the helper.
func Run(ctx context.Context, args []string) error { return errTODO }
