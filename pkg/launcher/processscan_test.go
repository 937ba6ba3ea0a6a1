package launcher

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
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

// Mounts that end together, of which nothing is left, do not need a scan each.
func TestKillsShareScans(t *testing.T) {
	const uid, callers = 2_123_459, 50
	var scans, called atomic.Int32
	all := make(chan struct{})
	s := processScan{find: func(ctx context.Context, fn func(member) error) error {
		scans.Add(1)
		<-all // the others arrive meanwhile
		return findOnHost(ctx, fn)
	}}
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			if called.Add(1) == callers {
				close(all)
			}
			if err := s.killAll(t.Context(), uid, killPause, func() {}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := scans.Load(); n > callers/2 { // usually two or three
		t.Errorf("%d scans for %d callers", n, callers)
	}
}

func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}
