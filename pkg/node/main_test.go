package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// roleEnv tells a process what it is: PID 1 of the namespaces, or the one that runs the tests.
const roleEnv = "S3_CSI_TEST_NODE_ROLE"

// TestMain runs the tests, as root, in PID and mount namespaces of their own: the driver searches the whole host for copies of its mounts,
// and would find those that namespaces of other tests inherit.
func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); {
	case role == "tests" || os.Getuid() != 0:
		goleak.VerifyTestMain(m)
	case role == "init":
		err := errors.Join(
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
		)
		if err != nil {
			fmt.Fprintln(os.Stderr, "setting up the namespaces of the tests:", err)
			os.Exit(1)
		}
		os.Exit(respawn("tests", 0))
	default:
		os.Exit(respawn("init", syscall.CLONE_NEWPID|syscall.CLONE_NEWNS))
	}
}

func respawn(role string, namespaces uintptr) int {
	runtime.LockOSThread() // the death signal follows the thread
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, role+":", err)
		return 1
	}
	return 0
}
