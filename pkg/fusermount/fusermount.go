// Package fusermount does what libfuse's fusermount3 and fusermount do for a file system that is mounted already: it passes the FUSE
// descriptor, which every process of the client inherits under a fixed number, over the socket of the client's library. It mounts
// and unmounts nothing, and needs no privilege.
//
// In a pod, the program gets the descriptor from the driver, see osfile.ReceiveFuse.
//
// The client chooses the arguments. They decide only whether the descriptor is sent, which the client has anyway.
package fusermount

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// EnvSocket is the variable with the number of the socket over which the descriptor is sent (libfuse, lib/mount.c).
const EnvSocket = "_FUSE_COMMFD"

// FuseFD is the number of the FUSE descriptor in a client and its children. It is above those that libraries give to their own
// descriptors when they execute this program: Go numbers them from 3 on.
const FuseFD = 200

// Names are those under which libraries execute this program.
func Names() []string { return []string{"fusermount3", "fusermount"} }

// Call is what the arguments ask for. If it is zero, there is nothing to do: the driver unmounts.
type Call struct {
	Version bool
	Mount   bool
	Socket  int // with Mount
}

// Parse reads the arguments of fusermount3 (libfuse, util/fusermount.c), without the program, and the value of EnvSocket.
func Parse(args []string, socket string) (Call, error) {
	for i := 0; i < len(args); i++ {
		name, value, given := strings.Cut(args[i], "=")
		switch {
		case name == "--":
			i = len(args)
		case name == "--version":
			return Call{Version: true}, nil
		case name == "--unmount":
			return Call{}, nil
		case name == "--comm-fd" && given:
			socket = value
		case name == "--comm-fd" && i+1 < len(args):
			i++
			socket = args[i]
		case name == "--options" && !given:
			i++
		case strings.HasPrefix(name, "--"), !strings.HasPrefix(name, "-"):
		default:
			call, takes, done := short(args[i][1:], &socket)
			if done {
				return call, nil
			}
			if takes { // its value is the next argument
				i++
				if strings.HasSuffix(args[i-1], "c") && i < len(args) {
					socket = args[i]
				}
			}
		}
	}
	fd, err := strconv.ParseUint(socket, 10, 16)
	if err != nil {
		return Call{}, fmt.Errorf("%s is %.32q, not the number of a socket: this program is executed by FUSE libraries", EnvSocket, socket)
	}
	return Call{Mount: true, Socket: int(fd)}, nil
}

// short reads a cluster of short options. takes is whether the last one has its value in the next argument, done that call is the result.
func short(cluster string, socket *string) (call Call, takes, done bool) {
	for i, letter := range cluster {
		switch letter {
		case 'V':
			return Call{Version: true}, false, true
		case 'u':
			return Call{}, false, true
		case 'o', 'c':
			rest := cluster[i+1:]
			if letter == 'c' && rest != "" {
				*socket = rest
			}
			return Call{}, rest == "", false
		}
	}
	return Call{}, false, false
}

// Send sends the FUSE descriptor that this process inherited over a socket of this process.
func Send(socket int) error {
	if target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", FuseFD)); err == nil && target != "/dev/fuse" {
		return fmt.Errorf("descriptor %d is %s, not /dev/fuse", FuseFD, target)
	}
	return SendFD(socket, FuseFD)
}

// SendFD sends a FUSE descriptor over a socket of this process.
func SendFD(socket, fd int) error {
	if err := unix.Sendmsg(socket, []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		return fmt.Errorf("send descriptor %d over socket %d: %w", fd, socket, err)
	}
	return nil
}
