package launcher

import (
	"context"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// sleeper starts a process of a uid and returns its pid. It is reaped when it has exited.
func sleeper(t *testing.T, uid uint32) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaped := make(chan struct{})
	go func() { defer close(reaped); _ = cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-reaped })
	return cmd.Process.Pid
}

func TestKillReturnsWhenTheProcessesHaveExited(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it starts processes as another user")
	}
	const uid = 2_123_458
	p := NewProcess(plainDoer{}, "/bin/true", Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	sleeper(t, uid)
	sleeper(t, uid)
	began := time.Now()
	if err := new(processScan).killAll(ctx, uid, time.Minute, func() {}); err != nil || time.Since(began) > 30*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	if alive, err := p.Alive(ctx, uid); err != nil || alive {
		t.Errorf("alive %t, %v", alive, err)
	}
}
