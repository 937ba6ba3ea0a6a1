package helper

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestKillEndsTheClientAndWhatItStartedAndNotTheHelper(t *testing.T) {
	r := newRig(t)
	if err := r.peer.Kill(bounded(t)); err != nil {
		t.Fatalf("without a client: %v", err)
	}
	s := r.start("ignore", "child", "wait:/nowhere")
	r.says("child <nil>")
	if err := r.peer.Kill(bounded(t)); err != nil {
		t.Fatal(err)
	}
	ended := r.until("the exit", exited)
	if ended.Signal != "SIGKILL" || ended.ExitCode != -1 || ended.Ending || ended.Starts != 1 {
		t.Errorf("status: %+v", ended)
	}
	if err := unix.Kill(-s.ClientPID, 0); !errors.Is(err, unix.ESRCH) && err != nil {
		t.Errorf("the client's process group: %v", err)
	}
	end, ok, err := ReadEnd(r.dir)
	if err != nil || !ok || end.Expected || end.Signal != "SIGKILL" || !strings.Contains(end.Reason, "kill request") {
		t.Errorf("record: %+v, %v, %v", end, ok, err)
	}
	if err := r.peer.Kill(bounded(t)); err != nil {
		t.Errorf("once more: %v", err)
	}
	r.mustLive()

	// The next client has the former keys, and is not killed.
	s, err = r.tryStartWithoutKeys("credentials", "exit:3")
	if err != nil || s.Starts != 2 {
		t.Fatalf("second start: %+v, %v", s, err)
	}
	if line := r.says("credentials "); !strings.HasPrefix(line, "credentials 200 "+testKeys.AccessKeyID) {
		t.Errorf("second client: %s", line)
	}
	r.until("the second exit", func(s Status) bool { return exited(s) && s.Starts == 2 })
	if end, ok, err := ReadEnd(r.dir); err != nil || !ok || end.Code != 3 || strings.Contains(end.Reason, "kill") {
		t.Errorf("second record: %+v, %v, %v", end, ok, err)
	}
}

// A mount that was ending when its client was killed may have data left: the helper stays, and takes another client.
func TestKillWhileEndingLeavesTheHelperToFinish(t *testing.T) {
	r := newRig(t)
	r.start("wait:/nowhere")
	if err := r.peer.End(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if err := r.peer.Kill(bounded(t)); err != nil {
		t.Fatal(err)
	}
	r.until("the exit", exited)
	r.mustLive()
	r.start("exit:0")
	r.until("the second exit", func(s Status) bool { return exited(s) && s.Starts == 2 })
	r.mustEnd()
}

func TestKill_ReportsAnExitedHelper(t *testing.T) {
	err := NewPeer(Dial(filepath.Join(t.TempDir(), "sock"))).Kill(context.Background())
	if !errors.Is(err, ErrGone) || fault.Is(err, fault.Unsupported) {
		t.Errorf("%v, want ErrGone", err)
	}
}
