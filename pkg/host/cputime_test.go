//go:build linux

package host

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

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
