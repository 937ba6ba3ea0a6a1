package osfile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// EnvFuseSocket is the variable with the socket's path (of meta-fuse-csi-plugin's fusermount3-proxy).
const EnvFuseSocket = "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"

const (
	maxMessage = 500
	maxText    = 300
	// maxRights is how many descriptors are received: more than one is an error, and all are closed.
	maxRights    = 8
	retryReceive = 100 * time.Millisecond
)

// FuseMessage passes the descriptor of a FUSE connection from the driver to a program in a pod.
//
// The driver listens on a stream socket in one of the pod's emptyDir volumes. It answers a connection with one message and closes it. The
// message is a JSON object; the descriptor comes with it (SCM_RIGHTS). The programs of meta-fuse-csi-plugin read the same message, in at
// most 500 bytes. Without a descriptor, the object has the reason.
type FuseMessage struct {
	VolumeName string `json:"volumeName,omitempty"`
	Error      string `json:"error,omitempty"`
}

// Encode returns the message's bytes.
func (m FuseMessage) Encode() []byte {
	if len(m.Error) > maxText {
		m.Error = m.Error[:maxText]
	}
	for {
		b, err := json.Marshal(m)
		if err == nil && len(b) <= maxMessage {
			return b
		}
		m.VolumeName, m.Error = "", m.Error[:len(m.Error)/2]
	}
}

// errClosed means that the driver closed the connection without a message: it was stopped, or is not ready.
var errClosed = errors.New("the driver closed the connection")

// decode reads a message.
func decode(b []byte) (m FuseMessage, err error) {
	if len(b) == 0 {
		return m, errClosed
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("the driver's message %.60q: %w", b, err)
	}
	return m, nil
}

// ReceiveFuse connects to the driver and returns the FUSE descriptor, which is close-on-exec. Until ctx ends it tries again while the driver
// does not listen. It needs no poller, timer or goroutine of the runtime, so no descriptor of theirs is made.
func ReceiveFuse(ctx context.Context, path string) (fd int, err error) {
	for {
		fd, err := receive(ctx, path)
		switch {
		case err == nil:
			return fd, nil
		case !isAny(err, unix.ENOENT, unix.ECONNREFUSED, unix.EAGAIN, unix.ECONNRESET, errClosed):
			return -1, fmt.Errorf("receiving the FUSE descriptor from %s: %w", path, err)
		case ctx.Err() != nil:
			return -1, fmt.Errorf("receiving the FUSE descriptor from %s: %w: "+
				"is the socket's emptyDir volume mounted in this container, with the names in the volume's attributes? %w", path, err, ctx.Err())
		}
		pause := unix.NsecToTimespec(retryReceive.Nanoseconds())
		_ = unix.Nanosleep(&pause, nil)
	}
}

func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

func receive(ctx context.Context, path string) (int, error) {
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(socket)
	if deadline, ok := ctx.Deadline(); ok {
		left := unix.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
		for _, timeout := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
			if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, timeout, &left); err != nil {
				return -1, err
			}
		}
	}
	if err := uninterrupted(func() error { return unix.Connect(socket, &unix.SockaddrUnix{Name: path}) }); err != nil {
		return -1, err
	}
	message, oob := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(4*maxRights))
	var n, oobn int
	if err := uninterrupted(func() (err error) {
		n, oobn, _, _, err = unix.Recvmsg(socket, message, oob, unix.MSG_CMSG_CLOEXEC)
		return err
	}); err != nil {
		return -1, err
	}
	return take(message[:n], oob[:oobn])
}

func uninterrupted(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// take returns the descriptor of a message that was received.
func take(message, oob []byte) (int, error) {
	fds, err := Rights(oob)
	fd := -1
	defer func() {
		for _, other := range fds {
			if other != fd {
				unix.Close(other)
			}
		}
	}()
	if err != nil {
		return -1, err
	}
	m, err := decode(message)
	switch {
	case err != nil:
		return -1, err
	case m.Error != "":
		return -1, errors.New(m.Error)
	case len(fds) != 1:
		return -1, fmt.Errorf("the driver's message has %d descriptors, not one", len(fds))
	}
	if !IsFuse(fds[0]) {
		return -1, errors.New("the descriptor is not of /dev/fuse")
	}
	fd = fds[0]
	return fd, nil
}
