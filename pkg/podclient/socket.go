package podclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// backlog is how many programs may wait for an answer.
const backlog = 8

// fileID identifies a file of the host.
type fileID struct{ device, inode uint64 }

// emptyDirReady returns nil if kubelet has made the emptyDir volume, fault.NotFound if not. It runs inside Do.
func emptyDirReady(root string, v podvolume.Volume) error {
	// kubelet owns the directories on the way, so only the volume itself is opened without following links.
	if _, err := os.Lstat(v.ReadyFile()); err != nil {
		return fault.Errorf(fault.NotFound, "%w", err)
	}
	dir, err := openSocketDir(root, v)
	if err == nil {
		dir.Close()
	}
	return err
}

// openSocketDir opens the emptyDir volume without following symbolic links.
func openSocketDir(root string, v podvolume.Volume) (*os.File, error) {
	dir, err := host.OpenTarget(root, v.SocketDir(), false)
	if err != nil {
		kind := fault.Precondition
		if fault.Is(err, fault.NotFound) || errors.Is(err, unix.ENOENT) {
			kind = fault.NotFound
		}
		return nil, fault.Errorf(kind, "opening the emptyDir volume %s of the pod: %w", v.EmptyDir, err)
	}
	return dir, nil
}

// listen makes the socket in the emptyDir volume, which every user in the pod may connect to, and replaces what has its name. The pod's
// containers can change the volume at any time; no step follows a link of theirs.
func listen(root string, v podvolume.Volume) (_ *net.UnixListener, id fileID, err error) {
	dir, err := openSocketDir(root, v)
	if err != nil {
		return nil, id, err
	}
	defer dir.Close()
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, id, err
	}
	file := os.NewFile(uintptr(socket), v.Socket)
	defer file.Close()
	if err := unlink(dir, v.Socket); err != nil {
		return nil, id, err
	}
	// The path of a socket is at most 107 bytes long, and kubelet's is longer. bind(2) follows no link in the last component.
	path := fmt.Sprintf("/proc/thread-self/fd/%d/%s", dir.Fd(), v.Socket)
	if err := bindOpen(socket, path); err != nil {
		return nil, id, fmt.Errorf("making the socket %s in the emptyDir volume %s: %w", v.Socket, v.EmptyDir, err)
	}
	if err := unix.Listen(socket, backlog); err != nil {
		return nil, id, err
	}
	if id, err = identify(dir, v.Socket); err != nil {
		return nil, id, err
	}
	l, err := net.FileListener(file)
	if err != nil {
		return nil, id, err
	}
	unixListener := l.(*net.UnixListener) //nolint:forcetypeassert // of a UNIX socket
	unixListener.SetUnlinkOnClose(false)
	return unixListener, id, nil
}

// bindOpen binds a socket whose file every user may write to. It runs on a thread that ends afterwards.
func bindOpen(socket int, path string) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	unix.Umask(0) // of this thread, which ends
	return unix.Bind(socket, &unix.SockaddrUnix{Name: path})
}

func unlink(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fault.Errorf(fault.Precondition, "replacing %s in the emptyDir volume %s: %w", name, dir.Name(), err)
	}
	return nil
}

func identify(dir *os.File, name string) (fileID, error) {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return fileID{st.Dev, st.Ino}, err
}

// isBound reports whether the name of the socket is still that of this file. It runs inside Do.
func isBound(root string, v podvolume.Volume, id fileID) bool {
	dir, err := openSocketDir(root, v)
	if err != nil {
		return false
	}
	defer dir.Close()
	now, err := identify(dir, v.Socket)
	return err == nil && now == id
}

// removeSocket removes the socket. The emptyDir volume may be gone. It runs inside Do.
func removeSocket(root string, v podvolume.Volume) error {
	dir, err := openSocketDir(root, v)
	if err != nil {
		return nil // there is no socket
	}
	defer dir.Close()
	err = unix.Unlinkat(int(dir.Fd()), v.Socket, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EISDIR) { // a directory is not the driver's
		return nil
	}
	return err
}

// errForeignPeer means that a program that connected is not of the pod.
var errForeignPeer = errors.New("it is not a process of the volume's pod")

// peer is the process that connected.
type peer struct {
	pid      int
	uid, gid uint32
}

// peerOf returns the process that connected and checks that it is of the pod. A pidfd holds the process while its cgroup is read, so that
// its number cannot be that of another one meanwhile.
func peerOf(conn *net.UnixConn, podUID string) (p peer, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return p, err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { p, inner = peerBehind(int(fd), podUID) })
	return p, errors.Join(err, inner)
}

func peerBehind(socket int, podUID string) (p peer, err error) {
	cred, err := unix.GetsockoptUcred(socket, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return p, err
	}
	p = peer{int(cred.Pid), cred.Uid, cred.Gid}
	if p.pid <= 0 {
		return p, fmt.Errorf("it runs in a PID namespace that the driver cannot see: %w", errForeignPeer)
	}
	pidfd, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if errors.Is(err, unix.ENOPROTOOPT) { // Linux before 6.5
		pidfd, err = unix.PidfdOpen(p.pid, 0)
	}
	if err != nil {
		return p, fmt.Errorf("process %d: %w", p.pid, err)
	}
	defer unix.Close(pidfd)
	cgroup, err := os.ReadFile(proc.Path(p.pid, "cgroup"))
	if err != nil {
		return p, err
	}
	// The process has not exited until now, so what was read is about it.
	ended := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	if n, err := unix.Poll(ended, 0); err != nil || n != 0 {
		return p, fmt.Errorf("process %d has exited: %w", p.pid, errors.Join(err, errForeignPeer))
	}
	if uid := host.PodOf(string(cgroup), host.NodeCgroup()); uid != podUID {
		return p, fmt.Errorf("process %d is of pod %q: %w", p.pid, uid, errForeignPeer)
	}
	return p, nil
}

// onOwnThread runs fn in the host's mount namespace, on a thread that ends afterwards.
func onOwnThread[T any](ctx context.Context, ns *host.Namespace, what string, drop func(T), fn func() (T, error)) (T, error) {
	return host.Call(ctx, ns, what, drop, func() (v T, err error) {
		if ns.Foreign() {
			return fn() // is on such a thread
		}
		proc.OnThrowawayThread(func() { v, err = fn() })
		return v, err
	})
}
