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
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// sleeperAs starts a process as another user, and returns what ends it.
func sleeperAs(t *testing.T, uid uint32) (kill func() error) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it starts a process as another user")
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceValue(func() error { return errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait())) })
	t.Cleanup(func() { _ = kill() })
	return kill
}

func TestProcessScan_SeesProcessesStartedBeforeIt(t *testing.T) {
	const uid = 2_123_456
	var s processScan
	if alive, err := s.alive(t.Context(), uid); err != nil || alive {
		t.Fatalf("an unused uid: alive %t, %v", alive, err)
	}
	kill := sleeperAs(t, uid)
	// Each of many concurrent callers must see the processes that existed when it called.
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if alive, err := s.alive(t.Context(), uid); err != nil || !alive {
				t.Errorf("the scan misses the process: %v", err)
			}
		})
	}
	wg.Wait()
	if err := kill(); err != nil {
		t.Fatal(err)
	}
	if alive, err := s.alive(t.Context(), uid); err != nil || alive {
		t.Errorf("a uid whose process has ended: alive %t, %v", alive, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.uids(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Where no process has a uid, nothing is scanned. Those that are no mount's, such as zombies and those of pods, are told apart by a scan.
func TestProcessScan_IsSkippedForUnusedUIDs(t *testing.T) {
	const uid = 2_123_461
	scans := 0
	var s processScan
	s.find = func(ctx context.Context, fn func(member) error) error {
		scans++
		return s.findOnHost(ctx, fn)
	}
	look := func(want bool, wantScans int) {
		t.Helper()
		scans = 0
		if alive, err := s.alive(t.Context(), uid); err != nil || alive != want || scans != wantScans {
			t.Errorf("alive %t after %d scans, %v; want %t after %d", alive, scans, err, want, wantScans)
		}
	}
	look(false, 0)
	kill := sleeperAs(t, uid)
	look(true, 1)
	if err := kill(); err != nil {
		t.Fatal(err)
	}
	look(false, 0)
	zombie := exec.CommandContext(t.Context(), "/bin/true")
	zombie.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := zombie.Start(); err != nil {
		t.Fatal(err)
	}
	var exited unix.Siginfo
	if err := unix.Waitid(unix.P_PID, zombie.Process.Pid, &exited, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	look(false, 1)
	if err := zombie.Wait(); err != nil {
		t.Fatal(err)
	}
	look(false, 0)
}

// Mounts that end together do not need a scan each, also if other processes have their uids.
func TestProcessScan_ConcurrentKillsShareScans(t *testing.T) {
	const uid, callers = 2_123_459, 50
	_ = sleeperAs(t, uid)
	var scans, called atomic.Int32
	all := make(chan struct{})
	s := processScan{find: func(_ context.Context, fn func(member) error) error {
		scans.Add(1)
		<-all // the others arrive meanwhile
		return fn(func(int, uint32, proc.Status) bool { return false })
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
	if n := scans.Load(); n == 0 || n > callers/2 { // usually two or three
		t.Errorf("%d scans for %d callers", n, callers)
	}
}

func TestProcessScan_KillReturnsWhenTheProcessesHaveExited(t *testing.T) {
	const uid = 2_123_458
	_, _ = sleeperAs(t, uid), sleeperAs(t, uid)
	var s processScan
	began := time.Now()
	if err := s.killAll(t.Context(), uid, time.Minute, func() {}); err != nil || time.Since(began) > 30*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	if alive, err := s.alive(t.Context(), uid); err != nil || alive {
		t.Errorf("alive %t, %v", alive, err)
	}
}

func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}
