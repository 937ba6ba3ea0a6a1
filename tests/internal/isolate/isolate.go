// Package isolate runs a test binary in namespaces of its own, so that packages whose tests start drivers, clients and mounts do
// not see each other's and can run at the same time. What the tests leave behind, processes and mounts, ends with the namespaces.
package isolate

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// The roles of a test binary: the first process of the namespaces, and the one that runs the tests.
const (
	envRole    = "S3CSI_ISOLATE_ROLE"
	roleInit   = "init"
	roleInside = "inside"
)

const namespaces = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

// uidLocks is the driver's directory with the uids in use.
const uidLocks = "/run/s3-csi-uids"

// Main is the body of a TestMain: it runs the tests in PID, mount, network, IPC and UTS namespaces of their own, and returns the
// exit code. Without root, where such tests are skipped, they run as they are.
func Main(run func() int) int {
	if os.Getuid() != 0 {
		return run()
	}
	var code int
	var err error
	switch os.Getenv(envRole) {
	case roleInside:
		return run()
	case roleInit:
		code, err = beInit()
	default:
		code, err = spawn()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "isolating the tests:", err)
		return max(code, 1)
	}
	return code
}

// Inside reports whether this process runs in namespaces that Main made.
func Inside() bool { return os.Getenv(envRole) == roleInside }

func self(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...) //nolint:gosec,noctx // this binary with its own arguments
	cmd.Env = append(os.Environ(), envRole+"="+role)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd
}

// spawn runs this binary as the first process of new namespaces.
func spawn() (int, error) {
	runtime.LockOSThread() // PDEATHSIG follows the thread
	defer runtime.UnlockOSThread()
	cmd := self(roleInit)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

// beInit sets the namespaces up, runs the tests in a child, and reaps whatever loses its parent meanwhile.
func beInit() (int, error) {
	if err := errors.Join(
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		detachClients(),
		unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
		// Where drivers of one host look for each other: those beside this one are of other hosts.
		os.MkdirAll(uidLocks, 0o700),
		unix.Mount("uids", uidLocks, "tmpfs", 0, ""),
		configureLoopback(),
	); err != nil {
		return 0, err
	}
	tests := self(roleInside)
	if err := tests.Start(); err != nil {
		return 0, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("waiting for the tests: %w", err)
		case pid == tests.Process.Pid && status.Signaled():
			return 0, fmt.Errorf("the tests were killed: %s", status.Signal())
		case pid == tests.Process.Pid:
			return status.ExitStatus(), nil
		}
	}
}

// detachClients detaches the copies of FUSE file systems that tests beside this one have mounted: a client does not end before them.
func detachClients() error {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "fuse" && !strings.HasPrefix(m.FSType, "fuse."), false
	})
	for _, m := range mounts {
		if uerr := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); uerr != nil && !errors.Is(uerr, unix.EINVAL) {
			err = errors.Join(err, fmt.Errorf("detaching %s: %w", m.Mountpoint, uerr))
		}
	}
	return err
}

// configureLoopback brings the loopback interface up and adds the address 192.0.2.1 to it: the C library looks no name up on a machine
// that has loopback addresses only.
func configureLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	up.SetUint16(unix.IFF_UP)
	alias, err := unix.NewIfreq("lo:1")
	if err != nil {
		return err
	}
	if err := errors.Join(alias.SetInet4Addr([]byte{192, 0, 2, 1}), unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, up),
		unix.IoctlIfreq(fd, unix.SIOCSIFADDR, alias)); err != nil {
		return fmt.Errorf("the loopback interface: %w", err)
	}
	if err := alias.SetInet4Addr([]byte{255, 255, 255, 255}); err != nil {
		return err
	}
	return unix.IoctlIfreq(fd, unix.SIOCSIFNETMASK, alias)
}
