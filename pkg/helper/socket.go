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

// maxFDs is how many descriptors a request can bring before the kernel drops the rest; all but one are refused anyway.
const maxFDs = 4

// Listen makes a helper's listening socket at path, for its owner only (mode 0600), close-on-exec. In a container it
// has to be called in the host's mount namespace. A path that exists is an error: names are never reused.
//
// The caller hands the file to a launcher and then closes its own copy: while that is open, the socket accepts
// connections that nobody serves after the helper's death.
func Listen(path string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the helper's socket %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	// bind gives the file the socket's own mode less the umask, so it is never open to others, not even for a moment.
	if err := errors.Join(unix.Fchmod(fd, 0o600), unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 64)); err != nil {
		return nil, errors.Join(fmt.Errorf("make the helper's socket %s: %w", path, err), f.Close())
	}
	return f, nil
}

// peerUID is the uid at the other end of a connection or, of a listening socket, of the process that called listen.
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
		return 0, fmt.Errorf("who is at the other end of the socket: %w", inner)
	}
	return cred.Uid, nil
}

// receive reads a request and the descriptors that came with its first byte. The caller closes the files, in the error
// case too.
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
		return nil, files, fault.Errorf(fault.Invalid, "the request brings more than %d descriptors", maxFDs)
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
	// A plain read: the kernel closes descriptors that come with later bytes.
	if _, err := io.ReadFull(conn, body); err != nil {
		return nil, files, err
	}
	return body, files, nil
}

// filesOf takes the descriptors out of control messages; they are close-on-exec already (net sets MSG_CMSG_CLOEXEC).
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

// send writes a message, a descriptor with its first byte if there is one.
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

// checkFuse refuses a descriptor that is not an open /dev/fuse: Mountpoint wants it to have exactly this name.
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
		return fmt.Errorf("look at the descriptor: %w", inner)
	}
	// 10:229 is the device number of /dev/fuse (the kernel's Documentation/admin-guide/devices.txt).
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != 10 || unix.Minor(st.Rdev) != 229 || link != "/dev/fuse" {
		return fault.Errorf(fault.Invalid, "the descriptor that came with the request is not /dev/fuse but %q", link)
	}
	return nil
}
