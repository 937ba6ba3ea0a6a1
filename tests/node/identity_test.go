//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// The uid is what stat of the volume shows, and a pod can have any. That must not hold up the volume's pods.
func TestAPodWithAMountsUIDHoldsNothingUp(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("held", rclone)
	target := e.publish(v, "t")
	write(t, filepath.Join(target, "file"), "stored")
	t.Run("while the pod runs", func(t *testing.T) {
		pod(t, e.client(rclone).UID)
		if err := e.tryUnpublish(20*time.Second, v, target); err != nil {
			t.Fatal(err)
		}
		if err := e.tryPublish(20*time.Second, v, target); err != nil {
			t.Fatal(err)
		}
		if got := read(t, filepath.Join(target, "file")); got != "stored" {
			t.Errorf("the volume reads %q", got)
		}
		if err := e.tryUnpublish(20*time.Second, v, target); err != nil {
			t.Fatal(err)
		}
	})
	e.NothingLeft(t)
}

// With systemd, a mount's processes are those of its unit. One of another unit is not, though it is on the host, as a pod's
// with hostPID is.
func TestAnotherUnitWithAMountsUIDHoldsNothingUp(t *testing.T) {
	t.Parallel()
	e := start(t)
	if e.Launcher != rig.LauncherSystemd {
		t.Skip("for the launcher systemd only: the other one has no cgroups to tell processes by")
	}
	v := static("other-unit", rclone)
	target := e.publish(v, "t")
	uid := e.client(rclone).UID
	unit := fmt.Sprintf("not-s3csi-%d.service", uid)
	out, err := exec.CommandContext(t.Context(), "systemd-run", "--unit="+unit,
		"setpriv", fmt.Sprintf("--reuid=%d", uid), fmt.Sprintf("--regid=%d", uid), "--clear-groups", "sleep", "1000").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	stop := func() { _ = exec.Command("systemctl", "stop", unit).Run() }
	defer stop()
	theirs := awaitProcess(t, uid, "sleep")
	if err := e.tryUnpublish(20*time.Second, v, target); err != nil {
		t.Fatal(err)
	}
	if rig.Ended(theirs) {
		t.Errorf("the other unit's process %d was killed", theirs)
	}
	stop()
	e.NothingLeft(t)
}

// What a crash left is killed, and a pod's process with a uid of the range is not.
func TestAPodWithAUIDOfTheRangeIsNotALeftover(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	as := func(uid int) *syscall.Credential { return &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)} }
	spawn(t, exec.CommandContext(t.Context(), "sleep", "1000"), syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Credential: as(e.FirstUID)})
	theirs := awaitProcess(t, e.FirstUID, "sleep")
	spawn(t, exec.CommandContext(t.Context(), "sleep", "1000"), syscall.SysProcAttr{Credential: as(e.FirstUID + 1)})
	leftover := awaitProcess(t, e.FirstUID+1, "sleep")
	e.drive()
	e.await(30*time.Second, "the end of the leftover", func() bool { return rig.Ended(leftover) })
	if rig.Ended(theirs) {
		t.Errorf("the pod's process %d was killed", theirs)
	}
	if strings.Contains(e.Logs(), fmt.Sprintf("uid=%d", e.FirstUID)+"\n") {
		t.Error("the pod's process was taken for a leftover")
	}
}

// A client that was taken over hides a process in namespaces of its own making. It counts as the mount's, as one that does not
// hide, because the next mount may get the same uid; and it is killed where it is left over.
func TestAProcessThatHidesIsItsMounts(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	leftover := hide(t, e.FirstUID+1)
	e.drive()
	e.await(30*time.Second, "the end of the leftover", func() bool { return rig.Ended(leftover) })
	v := static("hiding", rclone)
	target := e.publish(v, "t")
	hidden := hide(t, e.client(rclone).UID)
	// The driver waits for it, or kills it: that depends on which of helper and driver saw the client's end first.
	err := e.tryUnpublish(3*time.Second, v, target)
	switch code := status.Code(err); {
	case err == nil && !rig.Ended(hidden):
		t.Errorf("the volume is unpublished, and process %d of the mount's uid still runs", hidden)
	case err != nil && code != codes.Aborted && code != codes.DeadlineExceeded:
		t.Errorf("unpublishing while process %d of the mount's uid runs: %v", hidden, err)
	}
	if err := unix.Kill(hidden, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		t.Fatal(err)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// hide starts a process as a uid, in namespaces that it makes itself.
func hide(t *testing.T, uid int) (pid int) {
	t.Helper()
	namespaces := []string{"--user", "--map-root-user", "--pid", "--fork", "--kill-child"}
	for _, argv := range [][]string{{"true"}, {"sleep", "1000"}} {
		cmd := exec.CommandContext(t.Context(), "unshare", append(namespaces, argv...)...)
		as := syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		if argv[0] == "sleep" {
			spawn(t, cmd, as)
			continue
		}
		cmd.SysProcAttr = &as
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Skipf("needs user namespaces that every user can make: %v %s", err, out)
		}
	}
	return awaitProcess(t, uid, "sleep")
}
