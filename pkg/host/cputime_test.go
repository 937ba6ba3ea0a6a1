//go:build linux

package host

import (
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
