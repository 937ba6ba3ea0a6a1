//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// dropper is closed when it is dropped.
type dropper chan struct{}

func (d dropper) Close() error { close(d); return nil }

// hungLook starts looks at a process that hang until the returned function is called.
func hungLook(t *testing.T, l *Looks, pid int) (end func()) {
	t.Helper()
	release, dropped := make(chan struct{}), make(dropper)
	_, err := lookAt(t.Context(), l, look{pid: pid, what: "hanging"}, func() (dropper, error) { <-release; return dropped, nil })
	if !fault.Is(err, fault.Timeout) {
		t.Fatalf("a look that hangs: %v", err)
	}
	return func() {
		close(release)
		<-dropped
	}
}

// sleepingChild starts a process and returns its pid and what ends it.
func sleepingChild(t *testing.T) (pid int, end func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
}

func TestLooks_BeginNoSecondLookAtAProcessThatHangs(t *testing.T) {
	var l Looks
	pid, kill := sleepingChild(t)
	again := func(pid int) error {
		_, err := lookAt(t.Context(), &l, look{pid: pid, what: "looking"}, func() (bool, error) { return true, nil })
		return err
	}
	if err := again(pid); err != nil || len(l.hungCalls()) != 0 {
		t.Errorf("%v, %q", err, l.hungCalls())
	}
	end := hungLook(t, &l, pid)
	began := time.Now()
	if err := again(pid); !fault.Is(err, fault.Timeout) || len(l.hungCalls()) != 1 {
		t.Errorf("%v, %q", err, l.hungCalls())
	}
	if took := time.Since(began); took >= lookBound {
		t.Errorf("the second look took %s", took)
	}
	if err := again(os.Getpid()); err != nil {
		t.Errorf("another process: %v", err)
	}
	kill()
	if err := again(pid); err != nil {
		t.Errorf("another process with its pid: %v", err)
	}
	end()
	for len(l.hungCalls()) > 0 {
		time.Sleep(time.Millisecond)
	}
}

func TestLooks_AreBoundedForEachCgroup(t *testing.T) {
	var l Looks
	var ends []func()
	for range maxHungEach {
		pid, kill := sleepingChild(t)
		ends = append(ends, hungLook(t, &l, pid), kill)
	}
	pid, kill := sleepingChild(t)
	if _, err := l.Program(t.Context(), pid); !fault.Is(err, fault.Exhausted) {
		t.Errorf("one more of the cgroup: %v", err)
	}
	l.mu.Lock()
	for h := range l.hung {
		h.account = "another"
	}
	l.mu.Unlock()
	if _, err := l.Program(t.Context(), pid); err != nil {
		t.Errorf("another cgroup's: %v", err)
	}
	for _, end := range append(ends, kill) {
		end()
	}
	for len(l.hungCalls()) > 0 {
		time.Sleep(time.Millisecond)
	}
}

func TestOpenNamespace_IsThatOfTheProcess(t *testing.T) {
	for _, noPidfds := range []bool{false, true} {
		l := Looks{noPidfds: noPidfds}
		for _, kind := range []string{"mnt", "pid", "user"} {
			fd, err := l.OpenNamespace(t.Context(), os.Getpid(), kind)
			if err != nil {
				t.Fatal(err)
			}
			var its, own unix.Stat_t
			if err := unix.Fstat(fd, &its); err != nil {
				t.Error(err)
			}
			if err := unix.Stat("/proc/self/ns/"+kind, &own); err != nil || its.Ino != own.Ino || its.Dev != own.Dev {
				t.Errorf("%s: %d, want %d, %v", kind, its.Ino, own.Ino, err)
			}
			unix.Close(fd)
		}
	}
}

func TestCPUTimeGrowsWithWork(t *testing.T) {
	uid := uint32(os.Getuid())
	before, err := CPUTime(os.Getpid(), uid)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		after, err := CPUTime(os.Getpid(), uid)
		if err != nil {
			t.Fatal(err)
		}
		if after >= before+50*time.Millisecond {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("from %s to %s in half a minute of work", before, after)
		}
	}
}

func TestCPUTimeIsOfThatPidAndUser(t *testing.T) {
	if _, err := CPUTime(os.Getpid(), uint32(os.Getuid())+1); fault.KindOf(err) != fault.NotFound {
		t.Errorf("of another user: %v", err)
	}
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := CPUTime(cmd.Process.Pid, uint32(os.Getuid())); fault.KindOf(err) != fault.NotFound {
		t.Errorf("of one that ended: %v", err)
	}
}

func TestAwaitExit(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	pid, uid := cmd.Process.Pid, uint32(os.Getuid())
	brief, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if AwaitExit(brief, pid, uid) || brief.Err() == nil {
		t.Error("it did not wait for a process that runs")
	}
	waits, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if AwaitExit(waits, pid, uid+1) {
		t.Error("a process of another user counts as exited")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if !AwaitExit(waits, pid, uid) {
		t.Error("a process that has exited does not count as exited")
	}
	_ = cmd.Wait()
	if AwaitExit(waits, pid, uid) {
		t.Error("a process that does not exist counts as exited")
	}
	if waits.Err() != nil {
		t.Error("it waited for longer than the process ran")
	}
}

func TestErrorsOfCorruptedMounts(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOTCONN, unix.ECONNABORTED, unix.ESTALE, unix.EIO} {
		for _, err := range []error{errno, &os.PathError{Err: errno}, fault.Errorf(fault.Unavailable, "x: %w", fmt.Errorf("y: %w", &os.PathError{Err: errno}))} {
			if !IsCorruptedMount(err) {
				t.Errorf("%v", err)
			}
		}
	}
	for _, err := range []error{nil, errors.New("x"), unix.ENOENT, unix.EBUSY, context.DeadlineExceeded, fmt.Errorf("x: %w", unix.ENOTEMPTY)} {
		if IsCorruptedMount(err) {
			t.Errorf("%v", err)
		}
	}
}

func TestMountWhoseClientHasExitedIsCorrupted(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := mkdir(t, hostDir(t, n), "mount")
	f := mountFake(t, n, dir, "s3csi:corrupted")
	if _, err := n.Statfs(within(t, 10*time.Second), dir); err != nil {
		t.Fatal(err)
	}
	f.exit()
	if _, err := n.Statfs(within(t, 10*time.Second), dir); !IsCorruptedMount(err) {
		t.Errorf("statfs: %v", err)
	}
	if err := n.ReadRoot(within(t, 10*time.Second), dir); !IsCorruptedMount(err) {
		t.Errorf("reading: %v", err)
	}
}
