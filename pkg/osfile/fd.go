package osfile

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// WithFD calls fn with the descriptor of a file or a connection, which stays open until fn returns.
func WithFD(c syscall.Conn, fn func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = fn(int(fd)) })
	if err != nil {
		return err
	}
	return inner
}

// Rights returns the descriptors in control messages, also with an error. The caller closes them.
func Rights(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("the control message: %w", err)
	}
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET || messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		more, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fds, fmt.Errorf("the control message: %w", err)
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

// IsFuse reports whether a descriptor is of the device of /dev/fuse, 10:229 (Documentation/admin-guide/devices.txt of the kernel).
func IsFuse(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Major(st.Rdev) == 10 && unix.Minor(st.Rdev) == 229
}
