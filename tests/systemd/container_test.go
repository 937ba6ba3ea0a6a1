package systemd_test

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/tests/systemd"
)

const envContainer = "S3CSI_SYSTEMD_CONTAINER"

// TestContainerNeedsNoMountOfTheSockets runs itself again in a mount namespace that has neither the host's sockets nor its
// programs nor its cgroups, as a node's container has.
func TestContainerNeedsNoMountOfTheSockets(t *testing.T) {
	systemd.Host(t)
	if os.Getenv(envContainer) == "" {
		runtime.LockOSThread() // the death signal follows the thread
		defer runtime.UnlockOSThread()
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), envContainer+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	l := newLauncher(t)
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	if !ns.Foreign() {
		t.Fatal("this is the host's mount namespace")
	}
	const uid = firstUID + 9000
	u := &unit{t: t, s: l, dir: "/run/s3csi-test-contained"}
	u.Unit = launcher.Unit{Name: "contained-1", UID: uid, GID: uid, StateDir: u.dir + "/state", Limits: launcher.Limits{MemoryMax: 64 << 20}}
	onHost := func(fn func() error) {
		t.Helper()
		if err := ns.Do(bounded(t), "test", fn); err != nil {
			t.Fatal(err)
		}
	}
	onHost(func() (err error) {
		if err := os.MkdirAll(u.StateDir, 0o700); err != nil {
			return err
		}
		if err := os.Chmod(u.dir, 0o711); err != nil {
			return err
		}
		if err := os.Chown(u.StateDir, uid, uid); err != nil {
			return err
		}
		u.Socket, err = helper.Listen(u.socket())
		return err
	})
	for _, dir := range []string{"/run", "/opt", "/sys/fs/cgroup"} {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	box, err := l.Check(bounded(t))
	if err != nil || len(box.Present) == 0 {
		t.Fatal(box, err)
	}
	if err := l.Start(bounded(t), u.Unit); err != nil {
		t.Fatal(err)
	}
	u.Socket.Close()
	list, err := l.List(bounded(t))
	if err != nil || len(list) != 1 || list[0].Name != u.Name || list[0].UID != uid {
		t.Errorf("the list: %+v %v", list, err)
	}
	if r, err := l.Result(bounded(t), u.Name); err != nil || r.Active != "active" || r.OOM() {
		t.Errorf("%+v %v", r, err)
	}
	if err := l.Kill(bounded(t), uid); err != nil {
		t.Error(err)
	}
	if list, err := l.List(bounded(t)); err != nil || len(list) != 0 {
		t.Errorf("the list: %+v %v", list, err)
	}
	onHost(func() error { return os.RemoveAll(u.dir) })
}

func TestCallsLeaveNothingOpen(t *testing.T) {
	l := newLauncher(t)
	u := start(t, l)
	before := goleak.IgnoreCurrent()
	fds := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	open := fds()
	for range 20 {
		if _, err := l.List(bounded(t)); err != nil {
			t.Fatal(err)
		}
		u.result()
		if err := u.launch(bounded(t)); err == nil || !strings.Contains(err.Error(), "exists") {
			t.Fatal(err)
		}
	}
	goleak.VerifyNone(t, before)
	await(t, fmt.Sprintf("there to be %d descriptors", open), func() bool { return fds() <= open })
}
