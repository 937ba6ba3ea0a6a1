//go:build linux

package host

import (
	"errors"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"
)

// IsCorruptedMount reports whether an error of a file system call shows a mount that cannot be used any more, as kubelet judges
// it. Unlike kubelet's function it unwraps the error, and it knows ECONNABORTED, the answer of an aborted FUSE connection. EIO
// and EACCES are in the list: a client that is running can return those, too.
func IsCorruptedMount(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && (errno == unix.ECONNABORTED || mountutils.IsCorruptedMnt(errno))
}
