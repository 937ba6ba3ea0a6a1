package launcher

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// plainDoer is the namespace of a driver that is not in a container.
type plainDoer struct{}

func (plainDoer) Foreign() bool { return false }
func (plainDoer) Do(_ context.Context, _ string, fn func() error) error {
	return fn()
}

// A container with user ids of its own has the host's in blocks, and some of them may be those of mounts: its processes are
// neither a mount's nor a stray's.
func TestUIDScan_SparesOtherUserNamespaces(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it maps user ids")
	}
	const uid = 2_124_567
	mapped := []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 10}}
	cmd := exec.CommandContext(t.Context(), "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: mapped, GidMappings: mapped, Credential: &syscall.Credential{Uid: 0, Gid: 0},
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("needs user namespaces: %v", err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if status, err := statusOf(cmd.Process.Pid); err != nil || !runsAs(status, uid) {
		t.Fatalf("the process is not of uid %d: %v", uid, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	p := NewProcess(plainDoer{}, "/bin/true", Options{})
	if alive, err := p.Alive(ctx, uid); err != nil || alive {
		t.Errorf("it is taken for a mount's: %v", err)
	}
	if list, err := p.List(ctx); err != nil || slices.ContainsFunc(list, func(u UnitInfo) bool { return u.UID == uid }) {
		t.Errorf("it is listed: %v", err)
	}
	if err := p.Kill(ctx, uid); err != nil {
		t.Fatal(err)
	}
	if status, err := statusOf(cmd.Process.Pid); err != nil || !runsAs(status, uid) {
		t.Errorf("it was killed: %v", err)
	}
}

// sleeperOf finds the process that sleeps so long, below which level of PID namespaces it is, and waits for it.
func sleeperOf(t *testing.T, uid uint32, seconds string, level int) int {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		found := 0
		if err := eachProcess(t.Context(), func(pid int, status proc.Status) {
			cmdline, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
			if runsAs(status, uid) && pidNamespaces(status) == level && strings.HasPrefix(string(cmdline), "sleep\x00"+seconds) {
				found = pid
			}
		}); err != nil {
			t.Fatal(err)
		}
		if found != 0 {
			return found
		}
	}
	t.Fatalf("no process of uid %d sleeps at level %d", uid, level)
	return 0
}

// as starts a program as a uid, in namespaces that root makes for it as a container runtime does.
func as(t *testing.T, uid uint32, namespaces uintptr, argv ...string) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it starts processes as other users")
	}
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Credential: &syscall.Credential{Uid: uid, Gid: uid}, Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); _ = cmd.Wait() })
	return cmd
}

// ownNamespaces is a command in a user and a PID namespace that its user makes.
func ownNamespaces(argv ...string) []string {
	return append([]string{"unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"}, argv...)
}

// needUserNamespaces skips a test where users without capabilities cannot make namespaces.
func needUserNamespaces(t *testing.T, uid uint32) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "unshare", "--user", "--pid", "--fork", "true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("needs user namespaces that every user can make: %v %s", err, out)
	}
}

// A pod chooses the uids of its processes freely: one of a mount's uid, in a PID namespace that the runtime made, is
// neither a mount's nor a leftover, also in namespaces that it makes itself inside.
func TestUIDScan_SparesProcessesOfPods(t *testing.T) {
	const uid = 2_124_568
	as(t, uid, syscall.CLONE_NEWPID, "sleep", "61")
	pids := []int{sleeperOf(t, uid, "61", 2)}
	t.Run("in namespaces of its own", func(t *testing.T) {
		needUserNamespaces(t, uid)
		as(t, uid, syscall.CLONE_NEWPID, ownNamespaces("sleep", "62")...)
		pid := sleeperOf(t, uid, "62", 3)
		leftAlone(t, uid, pid)
	})
	leftAlone(t, uid, pids...)
}

// leftAlone fails the test if processes count as a mount's, or are killed.
func leftAlone(t *testing.T, uid uint32, pids ...int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	p := NewProcess(plainDoer{}, "/bin/true", Options{})
	if alive, err := p.Alive(ctx, uid); err != nil || alive {
		t.Errorf("Alive: %v, %v", alive, err)
	}
	if list, err := p.List(ctx); err != nil || slices.ContainsFunc(list, func(u UnitInfo) bool { return u.UID == uid }) {
		t.Errorf("List: %v, %v", list, err)
	}
	if err := p.Kill(ctx, uid); err != nil {
		t.Errorf("Kill: %v", err)
	}
	for _, pid := range pids {
		if status, err := statusOf(pid); err != nil || !runsAs(status, uid) {
			t.Errorf("process %d was killed: %v", pid, err)
		}
	}
}

// A client that was taken over cannot escape by making namespaces of its own.
func TestUIDScan_KillsProcessesInTheirOwnNamespaces(t *testing.T) {
	const uid = 2_124_569
	if os.Getuid() != 0 {
		t.Skip("needs root: it starts processes as other users")
	}
	needUserNamespaces(t, uid)
	for name, tc := range map[string]struct {
		argv  []string
		level int
	}{
		"a user namespace":           {[]string{"unshare", "--user", "sleep", "63"}, 1},
		"a mapped user namespace":    {[]string{"unshare", "--user", "--map-root-user", "sleep", "63"}, 1},
		"a PID namespace":            {ownNamespaces("sleep", "63"), 2},
		"namespaces within the same": {ownNamespaces(ownNamespaces("sleep", "63")...), 3},
	} {
		t.Run(name, func(t *testing.T) {
			as(t, uid, 0, tc.argv...)
			pid := sleeperOf(t, uid, "63", tc.level)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			p := NewProcess(plainDoer{}, "/bin/true", Options{})
			status, err := statusOf(pid)
			if err != nil || !onHost(ctx, &p.scan.looks)(pid, uid, status) {
				t.Errorf("it does not count: %v", err)
			}
			if onHost(ctx, &p.scan.looks)(pid, uid+1, status) {
				t.Error("another user's namespaces count")
			}
			if alive, err := p.Alive(ctx, uid); err != nil || !alive {
				t.Errorf("Alive: %v, %v", alive, err)
			}
			if err := p.Kill(ctx, uid); err != nil {
				t.Errorf("Kill: %v", err)
			}
			if status, err := statusOf(pid); err != nil || runsAs(status, uid) {
				t.Errorf("it was not killed: %v", err)
			}
		})
	}
}

// The cgroups of units are told by their whole path from systemd's root on.
func TestCgroupsOfUnits(t *testing.T) {
	c := unitCgroups{slice: "/host/system.slice/" + Slice + "/"}
	for path, want := range map[string]bool{
		"/host/system.slice/system-s3csi.slice/s3csi-a-1.service":               true,
		"/host/system.slice/system-s3csi.slice/s3csi-a-1.service/below/this":    true,
		"/host/system.slice/system-s3csi.slice":                                 false,
		"/host/system.slice/system-s3csi.slice/other.service":                   false,
		"/host/system.slice/system-s3csi.slice/s3csi-a-1.scope":                 false,
		"/system.slice/system-s3csi.slice/s3csi-a-1.service":                    false,
		"/host/kubepods/host/system.slice/system-s3csi.slice/s3csi-a-1.service": false,
		"/host/system.slice/kubelet.service":                                    false,
		"/":                                                                     false,
	} {
		if got := c.hasUnit(path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
}
