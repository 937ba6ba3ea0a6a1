package launcher_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// containerLevel tells the processes of TestHelperOfAContainerRunsOnTheHost apart.
const containerLevel = "S3_CSI_TEST_CONTAINER"

// respawn runs one test of this binary again in new namespaces.
func respawn(level, test string, namespaces uintptr) (string, error) {
	runtime.LockOSThread() // the death signal follows the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(os.Environ(), containerLevel+"="+level)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestHelperOfAContainerRunsOnTheHost makes a host of its own (PID and mount namespaces) and in it a container (another
// mount namespace) where the program's path on the host leads elsewhere.
func TestHelperOfAContainerRunsOnTheHost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	switch os.Getenv(containerLevel) {
	case "":
		out, err := respawn("host", t.Name(), syscall.CLONE_NEWPID|syscall.CLONE_NEWNS)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if strings.Contains(out, "--- SKIP") {
			t.Skip(out)
		}
	case "host":
		for _, err := range []error{
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
			// Only a unified hierarchy is moved in, so that the test leaves every limit of this machine in force.
			ignore(unix.Unmount("/sys/fs/cgroup", unix.MNT_DETACH), unix.EINVAL),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		out, err := respawn("guest", t.Name(), syscall.CLONE_NEWNS)
		fmt.Print(out)
		if err != nil {
			t.Error(err)
		}
	case "guest":
		inContainer(t)
	}
}

func ignore(err, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

func inContainer(t *testing.T) {
	u := prepare(t, firstUID+20)
	hidden := filepath.Join(u.dir, "hidden")
	if err := os.Mkdir(hidden, 0o700); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(hidden, "s3-csi-driver")
	helpertest.Copy(t, program, 0o755)
	for _, err := range []error{
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("tmpfs", hidden, "tmpfs", 0, ""),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = unix.Unmount(hidden, unix.MNT_DETACH) })
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	if !ns.Foreign() {
		t.Fatal("this is not another mount namespace")
	}
	p := launcher.NewProcess(ns, program, launcher.Options{UIDs: launcher.UIDRange{First: u.uid, Last: u.uid}})
	if ok, why := p.SurvivesDriver(); ok || !strings.Contains(why, "no cgroup file system") {
		t.Errorf("without cgroups on the host: %v, %q", ok, why)
	}
	var socket *os.File
	if err := ns.Do(bounded(t), "making a socket", func() (err error) {
		socket, err = helper.Listen(filepath.Join(u.dir, "sock"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer socket.Close()

	// A unified hierarchy for this host alone, with this process somewhere below its root, as a container's is.
	cgroups := filepath.Join(u.dir, "cgroups")
	if err := ns.Do(bounded(t), "mounting cgroups", func() error {
		if err := os.Mkdir(cgroups, 0o755); err != nil {
			return err
		}
		return unix.Mount("cgroup2", cgroups, "cgroup2", 0, "")
	}); err != nil {
		t.Skipf("cgroups cannot be mounted: %v", err)
	}
	t.Cleanup(func() {
		_ = ns.Do(bounded(t), "unmounting cgroups", func() error {
			_ = os.WriteFile(filepath.Join(cgroups, "cgroup.procs"), []byte(fmt.Sprint(os.Getpid())), 0)
			_ = os.Remove(filepath.Join(cgroups, "s3-csi-test-container"))
			_ = os.Remove(filepath.Join(cgroups, "s3-csi-helpers"))
			return errors.Join(unix.Unmount(cgroups, 0), os.Remove(cgroups))
		})
	})
	if err := ns.Do(bounded(t), "entering a cgroup", func() error {
		dir := filepath.Join(cgroups, "s3-csi-test-container")
		if err := ignore(os.Mkdir(dir, 0o755), os.ErrExist); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(os.Getpid())), 0)
	}); err != nil {
		t.Skipf("a cgroup cannot be entered: %v", err)
	}
	if ok, why := p.SurvivesDriver(); !ok {
		t.Errorf("with cgroups, before a start: %s", why)
	}
	if err := p.Start(bounded(t), launcher.Unit{Name: "test-1", UID: u.uid, GID: u.uid, StateDir: u.state(), Socket: socket}); err != nil {
		t.Fatal(err)
	}
	s := u.hello()
	hostNS, err := os.Readlink("/proc/1/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", s.PID)); err != nil || its != hostNS {
		t.Errorf("the helper's mount namespace is %s, the host's %s (%v)", its, hostNS, err)
	}
	if got := field(t, s.PID, "CapBnd") + field(t, s.PID, "NoNewPrivs"); got != "00000000000000001" {
		t.Errorf("privileges: %s", got)
	}
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", s.PID))
	if err != nil || !strings.Contains(string(cgroup), "0::/s3-csi-helpers\n") {
		t.Errorf("the helper's cgroup: %s %v", cgroup, err)
	}
	if _, err := u.peer.Quit(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(bounded(t), u.uid); err != nil {
		t.Fatal(err)
	}
}

// TestHelperSurvivesTheEndOfADriversTask makes a host of its own, and in it a task of an orchestrator that is only a cgroup, as a task of
// Nomad's raw_exec is. The task's end kills all processes of the cgroup.
func TestHelperSurvivesTheEndOfADriversTask(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	const cgroups = "/sys/fs/cgroup"
	if os.Getenv(containerLevel) == "" {
		out, err := respawn("host", t.Name(), syscall.CLONE_NEWPID|syscall.CLONE_NEWNS)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if strings.Contains(out, "--- SKIP") {
			t.Skip(out)
		}
		return
	}
	for _, err := range []error{
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
		ignore(unix.Unmount(cgroups, unix.MNT_DETACH), unix.EINVAL),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("cgroup2", cgroups, "cgroup2", 0, ""); err != nil {
		t.Skipf("cgroups cannot be mounted: %v", err)
	}
	task, err := os.MkdirTemp(cgroups, "s3-csi-test-task-*.plugin.scope") //nolint:usetesting // it must be a cgroup
	if err != nil {
		t.Skipf("a cgroup cannot be created: %v", err)
	}
	t.Cleanup(func() { _ = os.Remove(task) })
	if _, err := os.Stat(filepath.Join(task, "cgroup.kill")); err != nil {
		t.Skipf("needs Linux 5.14: %v", err)
	}
	u := prepare(t, firstUID+21)
	driver := exec.Command("/proc/self/exe", "driver", "test-1", u.dir, fmt.Sprint(u.uid))
	dir, err := os.Open(task)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	driver.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	var stderr strings.Builder
	driver.Stderr = &stderr
	stdout, err := driver.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := driver.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "started\n" {
		t.Fatalf("%q, %v: %v: %s", line, err, driver.Wait(), &stderr)
	}
	s := u.hello()
	if cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", s.PID)); err != nil || !strings.Contains(string(cgroup), "0::/s3-csi-helpers\n") {
		t.Errorf("the helper's cgroup: %s %v", cgroup, err)
	}
	if err := os.WriteFile(filepath.Join(task, "cgroup.kill"), []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if err := driver.Wait(); err == nil {
		t.Error("the driver's task was not killed")
	}
	if again := u.hello(); again.PID != s.PID {
		t.Errorf("the helper has pid %d, and had %d", again.PID, s.PID)
	}
	if _, err := u.peer.Quit(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if err := u.p.Kill(bounded(t), u.uid); err != nil {
		t.Fatal(err)
	}
}

// TestNetworkOfTheDriversPod makes a host of its own, and in it a container with a network of its own.
func TestNetworkOfTheDriversPod(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	switch level := os.Getenv(containerLevel); level {
	case "":
		if out, err := respawn("host", t.Name(), syscall.CLONE_NEWPID|syscall.CLONE_NEWNS); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	case "host":
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")); err != nil {
			t.Fatal(err)
		}
		for level, namespaces := range map[string]uintptr{"shared": syscall.CLONE_NEWNS, "own": syscall.CLONE_NEWNS | syscall.CLONE_NEWNET} {
			if out, err := respawn(level, t.Name(), namespaces); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		}
	default:
		ns, err := host.NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		_, why := launcher.NewProcess(ns, "/proc/self/exe", launcher.Options{}).SurvivesDriver()
		if blamed := strings.Contains(why, "hostNetwork"); blamed != (level == "own") {
			t.Errorf("a network %s: %q", level, why)
		}
	}
}
