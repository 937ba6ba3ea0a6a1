//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// The tests mount for real. As root they run in a PID and mount namespace of their own, whose PID 1 is the test
// process. That namespace is "the host" then, and ends with everything that a failure leaves. TestFromAnotherNamespace runs them
// again from a mount namespace below that one, so that every call goes through setns.
const (
	levelEnv   = "S3_CSI_TEST_HOST_LEVEL"
	levelHost  = "host"
	levelGuest = "guest"
	levelProbe = "probe" // says what NewNamespace says, and ends
	levelSwap  = "swap"  // replaces mounts, and is killed meanwhile
	levelTable = "table" // fills its mount table
	levelStuck = "stuck" // gets stuck in a call that waits for a FUSE client
)

func TestMain(m *testing.M) {
	if os.Getenv(levelEnv) == "" && os.Getuid() == 0 && !fuzzing() {
		os.Exit(respawn(levelHost, syscall.CLONE_NEWPID|syscall.CLONE_NEWNS, os.Args[1:]))
	}
	children := map[string]func(args []string) error{
		levelProbe: func([]string) error {
			n, err := NewNamespace()
			fmt.Printf("%v, error %v", err == nil && n.Foreign(), err)
			return nil
		},
		levelTable: func(args []string) error { return fillTable(args[0]) },
		levelStuck: func(args []string) error { return fmt.Errorf("not stuck: %w", getStuck(args[0], args[1])) },
		levelSwap:  func(args []string) error { return swapUntilKilled(args[0], args[1], args[2]) },
	}
	if child := children[os.Getenv(levelEnv)]; child != nil {
		if err := child(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(levelEnv) != "" {
		if err := isolate(); err != nil {
			fmt.Fprintln(os.Stderr, "setting up the tests' namespaces:", err)
			os.Exit(1)
		}
	}
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// fuzzing reports whether fuzz workers use inherited descriptors, which a respawned test would not have.
func fuzzing() bool {
	for _, arg := range os.Args[1:] {
		if strings.HasPrefix(arg, "-test.fuzz") && !strings.HasPrefix(arg, "-test.fuzzcachedir") {
			return true
		}
	}
	return false
}

// respawn runs this test binary again in new namespaces and returns its exit code.
func respawn(level string, namespaces uintptr, args []string) int {
	runtime.LockOSThread() // the death signal follows the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), levelEnv+"="+level)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "respawning the tests:", err)
		return 1
	}
	return 0
}

// isolate makes the new mount namespace private, with a /proc of the new PID namespace.
func isolate() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if os.Getenv(levelEnv) != levelHost {
		return nil
	}
	return unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// TestFromAnotherNamespace runs every test again from a mount namespace that is not PID 1's.
func TestFromAnotherNamespace(t *testing.T) {
	switch os.Getenv(levelEnv) {
	case "":
		t.Skip("needs root")
	case levelGuest:
		t.Skip("runs in this one")
	}
	args := []string{"-test.v=" + fmt.Sprint(testing.Verbose()), "-test.run=^Test", "-test.skip=^TestFromAnotherNamespace$", "-test.timeout=10m"}
	if code := respawn(levelGuest, syscall.CLONE_NEWNS, args); code != 0 {
		t.Errorf("the tests fail through setns: exit code %d", code)
	}
}

// needMounts skips a test that cannot mount.
func needMounts(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if _, err := os.Stat(FuseDevice); err != nil {
		t.Skip("needs " + FuseDevice)
	}
}

// testNamespace returns the namespace under test, and checks at the end that no call is overdue.
func testNamespace(t *testing.T) *Namespace {
	t.Helper()
	n, err := NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	if want := os.Getenv(levelEnv) == levelGuest; n.Foreign() != want {
		t.Fatalf("foreign is %v, want %v", n.Foreign(), want)
	}
	t.Cleanup(func() {
		for i := 0; n.Overdue() > 0; i++ {
			if i == 200 {
				t.Errorf("overdue in the end: %q", n.OverdueCalls())
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	return n
}

// within returns a context that ends after d, or with the test.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// do runs fn in the namespace and fails the test with its error.
func do(t *testing.T, n *Namespace, what string, fn func() error) {
	t.Helper()
	if err := n.Do(within(t, 10*time.Second), what, fn); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// hostDir returns a temporary directory whose mounts are removed with the test.
func hostDir(t *testing.T, n *Namespace) string {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() {
		err := n.Do(context.Background(), "cleaning up", func() error {
			mounts, err := readMounts(context.Background(), threadMountinfo)
			if err != nil {
				return err
			}
			for _, mnt := range slices.Backward(mounts) {
				if isBelow(mnt.Mountpoint, dir) {
					_ = unix.Unmount(mnt.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	return dir
}

// mkdir makes a directory below dir.
func mkdir(t *testing.T, dir, name string) string {
	t.Helper()
	path := dir + "/" + name
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// mountsAt returns the namespace's mounts on a path.
func mountsAt(t *testing.T, n *Namespace, path string) []Mount {
	t.Helper()
	mounts, err := n.Mounts(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	var at []Mount
	for _, m := range mounts {
		if m.Mountpoint == path {
			at = append(at, m)
		}
	}
	return at
}

// mountAt returns the only mount on a path.
func mountAt(t *testing.T, n *Namespace, path string) Mount {
	t.Helper()
	at := mountsAt(t, n, path)
	if len(at) != 1 {
		t.Fatalf("%d mounts on %s, want one: %+v", len(at), path, at)
	}
	return at[0]
}
