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

func TestProcessScanSeesProcessesStartedBeforeIt(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it starts a process as another user")
	}
	const uid = 2_123_456
	var s processScan
	if free, err := s.free(t.Context(), uid); err != nil || !free {
		t.Fatalf("an unused uid: free %t, %v", free, err)
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	// Each of many concurrent callers must see the processes that existed when it called.
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if uids, err := s.uids(t.Context()); err != nil || !uids[uid] {
				t.Errorf("the scan misses the process: %v", err)
			}
		})
	}
	wg.Wait()
	if free, err := s.free(t.Context(), uid); err != nil || free {
		t.Errorf("a uid in use: free %t, %v", free, err)
	}
	if err := errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait())); err != nil {
		t.Fatal(err)
	}
	if free, err := s.free(t.Context(), uid); err != nil || !free {
		t.Errorf("a uid whose process has ended: free %t, %v", free, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.uids(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}
