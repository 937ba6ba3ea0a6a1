package launcher

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
)

func TestACensusFindsWhoCameBeforeIt(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it starts a process as another user")
	}
	const uid = 2_123_456
	var c census
	if free, err := c.free(t.Context(), uid); err != nil || !free {
		t.Fatalf("nobody's uid: %t, %v", free, err)
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	// Each of many that ask at once must see what was there when it asked.
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if alive, err := c.take(t.Context()); err != nil || !alive[uid] {
				t.Errorf("its process is not seen: %v", err)
			}
		})
	}
	wg.Wait()
	if free, err := c.free(t.Context(), uid); err != nil || free {
		t.Errorf("somebody's uid: free %t, %v", free, err)
	}
	if err := errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait())); err != nil {
		t.Fatal(err)
	}
	if free, err := c.free(t.Context(), uid); err != nil || !free {
		t.Errorf("a uid whose process has ended: free %t, %v", free, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.take(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}
