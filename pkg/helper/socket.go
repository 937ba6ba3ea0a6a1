package helper

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// maxFDs is how many descriptors of a request are received; more than one are refused anyway.
const maxFDs = 4

// Listen creates a helper's listening socket at path, with mode 0600 and close-on-exec. In a container it must be called in
// the host's mount namespace. An existing path is an error: names are never reused.
//
// The caller passes the file to a launcher and then closes its own copy. While that is open, the socket still accepts
// connections after the helper has exited.
func Listen(path string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("create the helper's socket %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	// bind applies the socket's mode to the file, so it is never open to others.
	if err := errors.Join(unix.Fchmod(fd, 0o600), unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 64)); err != nil {
		return nil, errors.Join(fmt.Errorf("create the helper's socket %s: %w", path, err), f.Close())
	}
	return f, nil
}

// peerUID returns the uid of the peer or, for a listening socket, of the process that called listen.
func peerUID(c syscall.Conn) (uint32, error) {
	var cred *unix.Ucred
	err := osfile.WithFD(c, func(fd int) (err error) {
		cred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("get the peer's uid: %w", err)
	}
	return cred.Uid, nil
}

// receive reads a request and the descriptors that came with its first byte. The caller closes the files, even after an error.
func receive(conn *net.UnixConn) (body []byte, files []*os.File, err error) {
	var head [4]byte
	oob := make([]byte, unix.CmsgSpace(maxFDs*4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(head[:], oob)
	if err != nil {
		return nil, nil, err
	}
	fds, err := osfile.Rights(oob[:oobn])
	for _, fd := range fds { // close-on-exec (MSG_CMSG_CLOEXEC)
		files = append(files, os.NewFile(uintptr(fd), "received"))
	}
	if err != nil {
		return nil, files, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return nil, files, fault.Errorf(fault.Invalid, "the request has more than %d descriptors", maxFDs)
	}
	if n == 0 {
		return nil, files, io.EOF
	}
	if _, err := io.ReadFull(conn, head[n:]); err != nil {
		return nil, files, err
	}
	body, err = readBody(conn, head) // with a plain read the kernel closes descriptors that come with later bytes
	return body, files, err
}

// send writes a message, with a descriptor on its first byte if there is one.
func send(conn *net.UnixConn, message []byte, f *os.File) error {
	if f == nil {
		_, err := conn.Write(message)
		return err
	}
	err := osfile.WithFD(f, func(fd int) error {
		_, _, err := conn.WriteMsgUnix(message[:4], unix.UnixRights(fd), nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("send the FUSE descriptor: %w", err)
	}
	_, err = conn.Write(message[4:])
	return err
}

// checkFuse refuses a descriptor that is not an open /dev/fuse. Mountpoint requires exactly this name.
func checkFuse(f *os.File) error {
	return osfile.WithFD(f, func(fd int) error {
		link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err == nil && (link != "/dev/fuse" || !osfile.IsFuse(fd)) {
			err = fault.Errorf(fault.Invalid, "the descriptor of the request is %q, not /dev/fuse", link)
		}
		return err
	})
}
