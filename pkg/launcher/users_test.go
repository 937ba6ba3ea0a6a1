package launcher

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"
)

// plainDoer is the namespace of a driver that is not in a container.
type plainDoer struct{}

func (plainDoer) Foreign() bool { return false }
func (plainDoer) Do(_ context.Context, _ string, fn func() error) error {
	return fn()
}

// A container with user ids of its own has the host's in blocks, and some of them may be those of mounts: its processes are
// neither a mount's nor a stray's.
func TestProcessesOfOtherUserNamespacesAreLeftAlone(t *testing.T) {
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
	if status, err := statusOf(cmd.Process.Pid); err != nil || !statusIsOf(status, uid) {
		t.Fatalf("the process is not of uid %d: %v", uid, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	p := NewProcess(plainDoer{}, "/bin/true")
	if alive, err := p.Alive(ctx, uid); err != nil || alive {
		t.Errorf("it is taken for a mount's: %v", err)
	}
	if list, err := p.List(ctx); err != nil || slices.ContainsFunc(list, func(u UnitInfo) bool { return u.UID == uid }) {
		t.Errorf("it is listed: %v", err)
	}
	if err := p.Kill(ctx, uid); err != nil {
		t.Fatal(err)
	}
	if status, err := statusOf(cmd.Process.Pid); err != nil || !statusIsOf(status, uid) {
		t.Errorf("it was killed: %v", err)
	}
}
