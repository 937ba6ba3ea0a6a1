// Package systemd gives a test binary a host of its own: a real systemd as PID 1 of new PID, mount, UTS, IPC and cgroup
// namespaces on an overlay of this machine's root, with the machine's network. The binary's tests run in there (Main). When
// they have ended nothing is left: no process, no mount, no cgroup, no file.
package systemd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
)

// The roles of a test binary.
const (
	envRole    = "S3CSI_SYSTEMD_ROLE"
	envDir     = "S3CSI_SYSTEMD_DIR"
	envCgroup  = "S3CSI_SYSTEMD_CGROUP"
	envSkip    = "S3CSI_SYSTEMD_SKIP"
	envOptions = "S3CSI_SYSTEMD_OPTIONS"
	roleInit   = "init"
	roleInside = "inside"

	// EnvLayout chooses the layout of the cgroups, "hybrid" or "unified". Without it, it is the one of the machine: only
	// that has controllers which enforce anything.
	EnvLayout = "S3CSI_SYSTEMD_LAYOUT"
)

const (
	manager      = "/lib/systemd/systemd"
	target       = "s3csi-test.target"
	startTimeout = time.Minute
	stopTimeout  = 20 * time.Second
	// powerOff is what systemd takes for an order to power off (systemd(1): SIGRTMIN+4).
	powerOff = unix.Signal(34 + 4)
)

// Install says what to have on the host: paths there, and the files of this machine that they are copies of, executable.
// dir is for files that it makes.
type Install func(dir string) (map[string]string, error)

// Main is the body of a TestMain: it boots the host and runs the tests on it; it returns the exit code. Where that cannot
// be, the tests run here, and Host skips them.
func Main(m *testing.M, install Install) int {
	Init()
	if Inside() {
		return m.Run()
	}
	if why := unusable(); why != "" {
		if err := os.Setenv(envSkip, why); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}
	code, err := run(install)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// Init is the beginning of every TestMain of a binary that boots hosts: it does not return where the process is to become a
// host's systemd.
func Init() {
	if os.Getenv(envRole) == roleInit {
		fmt.Fprintln(os.Stderr, "starting systemd:", becomeInit())
		os.Exit(1)
	}
}

// Inside reports whether this process runs the tests on the host.
func Inside() bool { return os.Getenv(envRole) == roleInside }

// Host skips a test that does not run on a host of its own.
func Host(t testing.TB) {
	t.Helper()
	if why := os.Getenv(envSkip); why != "" {
		t.Skip(why)
	}
}

// Need skips a test on a machine that cannot boot hosts.
func Need(t testing.TB) {
	t.Helper()
	if why := unusable(); why != "" {
		t.Skip(why)
	}
}

func unusable() string {
	if os.Getuid() != 0 {
		return "needs root: it boots a systemd in namespaces"
	}
	for _, file := range []string{manager, "/usr/bin/dbus-daemon", "/usr/bin/systemctl"} {
		if _, err := os.Stat(file); err != nil {
			return "needs the packages systemd and dbus: " + err.Error()
		}
	}
	return ""
}

// machine is a running host.
type machine struct {
	dir    string
	cgroup string // the name of its directory in every hierarchy
	opts   Options
	init   *exec.Cmd
	exited chan struct{}
}

func run(install Install) (code int, err error) {
	h := &machine{}
	if h.dir, err = os.MkdirTemp("", "s3csi-systemd-"); err != nil {
		return 1, err
	}
	h.cgroup = filepath.Base(h.dir) // process IDs repeat from one PID namespace to the next
	defer func() { err = errors.Join(err, h.stop(stopTimeout), os.RemoveAll(h.dir)) }()
	files, err := install(h.dir)
	if err != nil {
		return 1, fmt.Errorf("preparing the host's programs: %w", err)
	}
	if err := h.prepare(files); err != nil {
		return 1, err
	}
	if err := h.boot(); err != nil {
		return 1, err
	}
	return h.tests()
}

// prepare writes down what a host is made of.
func (h *machine) prepare(files map[string]string) error {
	if err := os.MkdirAll(filepath.Join(h.dir, "host"), 0o755); err != nil {
		return err
	}
	var list strings.Builder
	for to, from := range files {
		fmt.Fprintf(&list, "%s\t%s\n", to, from)
	}
	return os.WriteFile(filepath.Join(h.dir, "files"), []byte(list.String()), 0o600)
}

// boot starts systemd and waits until it is up.
func (h *machine) boot() error {
	opts, err := json.Marshal(h.opts)
	if err != nil {
		return err
	}
	flags := uintptr(syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC)
	if h.opts.Network {
		flags |= syscall.CLONE_NEWNET
	}
	started := make(chan error, 1)
	h.exited = make(chan struct{})
	go func() {
		runtime.LockOSThread() // PDEATHSIG follows the thread
		defer runtime.UnlockOSThread()
		h.init = exec.CommandContext(context.Background(), "/proc/self/exe")
		h.init.Env = append(os.Environ(), envRole+"="+roleInit, envDir+"="+h.dir, envCgroup+"="+h.cgroup, envOptions+"="+string(opts))
		h.init.Stderr, h.init.Dir = os.Stderr, "/"
		h.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: syscall.SIGKILL, Setsid: true}
		err := h.init.Start()
		started <- err
		if err != nil {
			close(h.exited)
			return
		}
		_ = h.init.Wait() // how it ends is what stop decides
		close(h.exited)
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("starting systemd: %w", err)
	}
	var state []byte
	for end := time.Now().Add(startTimeout); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		select {
		case <-h.exited:
			return errors.New("systemd ended while it started")
		default:
		}
		if _, err := os.Lstat(fmt.Sprintf("/proc/%d/root/run/systemd/private", h.init.Process.Pid)); err != nil {
			continue
		}
		state, err = h.output("/usr/bin/systemctl", "is-system-running")
		if err == nil {
			return nil
		}
	}
	failed, _ := h.output("/usr/bin/systemctl", "--no-pager", "list-units", "--failed")
	return fmt.Errorf("systemd is not up after %s: %w: %s\n%s", startTimeout, err, state, failed)
}

// tests runs this binary's tests on the host.
func (h *machine) tests() (int, error) {
	var args []string
	for _, a := range os.Args[1:] {
		switch name, _, _ := strings.Cut(strings.TrimLeft(a, "-"), "="); name {
		case "test.testlogfile", "test.outputdir", "test.gocoverdir": // paths of this machine
		default:
			args = append(args, a)
		}
	}
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", args...) //nolint:gosec // this binary with its own arguments
	cmd.Env = append(os.Environ(), envRole+"="+roleInside)
	cmd.Stdout, cmd.Stderr, cmd.Dir = os.Stdout, os.Stderr, "/"
	err := h.enter(cmd)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}

func (h *machine) output(argv ...string) ([]byte, error) {
	var out strings.Builder
	cmd := exec.CommandContext(context.Background(), argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = &out, &out, "/"
	err := h.enter(cmd)
	return []byte(out.String()), err
}

// enter runs a command on the host, and is killed with the host's init.
func (h *machine) enter(cmd *exec.Cmd) error {
	namespaces := unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP
	if h.opts.Network {
		namespaces |= unix.CLONE_NEWNET
	}
	return isolate.Enter(h.init.Process.Pid, namespaces, cmd.Run)
}

// stop powers the host off, at once where it may not take any time, and takes away what is left of it.
func (h *machine) stop(within time.Duration) error {
	var errs []error
	if h.init != nil && h.init.Process != nil {
		if within > 0 {
			_ = unix.Kill(h.init.Process.Pid, powerOff) // it may have ended
		}
		select {
		case <-h.exited:
		case <-time.After(within):
			if within > 0 {
				errs = append(errs, fmt.Errorf("the host's systemd has not powered off within %s", within))
			}
			_ = unix.Kill(h.init.Process.Pid, unix.SIGKILL)
			<-h.exited
		}
	}
	h.init = nil
	return errors.Join(append(errs, removeCgroups(h.cgroup, h.opts.Kubelet))...)
}
