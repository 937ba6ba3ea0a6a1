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
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) { cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if inner != nil {
		return 0, fmt.Errorf("get the peer's uid: %w", inner)
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
	files, err = filesOf(oob[:oobn])
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
	size, err := bodySize(head)
	if err != nil {
		return nil, files, err
	}
	body = make([]byte, size)
	// With a plain read the kernel closes descriptors that come with later bytes.
	if _, err := io.ReadFull(conn, body); err != nil {
		return nil, files, err
	}
	return body, files, nil
}

// filesOf returns the descriptors in control messages; net has made them close-on-exec (MSG_CMSG_CLOEXEC).
func filesOf(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("read a request's control messages: %w", err)
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // not descriptors
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

// send writes a message, with a descriptor on its first byte if there is one.
func send(conn *net.UnixConn, message []byte, f *os.File) error {
	if f == nil {
		_, err := conn.Write(message)
		return err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("the FUSE descriptor: %w", err)
	}
	var inner error
	if err := raw.Control(func(fd uintptr) {
		_, _, inner = conn.WriteMsgUnix(message[:4], unix.UnixRights(int(fd)), nil)
	}); err != nil {
		return fmt.Errorf("the FUSE descriptor: %w", err)
	}
	if inner != nil {
		return inner
	}
	_, err = conn.Write(message[4:])
	return err
}

// checkFuse refuses a descriptor that is not an open /dev/fuse. Mountpoint requires exactly this name.
func checkFuse(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var st unix.Stat_t
	var link string
	var inner error
	if err := raw.Control(func(fd uintptr) {
		if inner = unix.Fstat(int(fd), &st); inner == nil {
			link, inner = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		}
	}); err != nil {
		return err
	}
	if inner != nil {
		return fmt.Errorf("stat the descriptor: %w", inner)
	}
	// 10:229 is the device number of /dev/fuse (the kernel's Documentation/admin-guide/devices.txt).
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != 10 || unix.Minor(st.Rdev) != 229 || link != "/dev/fuse" {
		return fault.Errorf(fault.Invalid, "the descriptor of the request is %q, not /dev/fuse", link)
	}
	return nil
}
