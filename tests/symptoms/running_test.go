package symptoms

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

const (
	unpublishing = "docs/reference/errors.md#unpublishing"
	waits        = "docs/explanation/mounts.md#a-new-mount-waits-for-draining-mounts"
)

// kill ends all processes of mounts.
func (e *env) kill() {
	e.t.Helper()
	for _, p := range e.Running("") {
		rigtest.Kill(e.t, p)
	}
}

// awaitUnpublish repeats an unpublication until its error has the words, and returns it as an event would show it.
func (e *env) awaitUnpublish(target, volume string, words ...string) (text string) {
	e.t.Helper()
	rigtest.Await(e.t, time.Minute, "an unpublication that fails", func() bool {
		err := e.tryUnpublish(3*time.Second, plain(volume), target)
		if err == nil {
			e.t.Fatal("unpublished")
		}
		text = message(e.t, "unpublish", err)
		for _, w := range words {
			if !strings.Contains(text, w) {
				return false
			}
		}
		return true
	})
	return text
}

// The client of a running pod's volume fails: the status has the reason.
func TestAClientFails(t *testing.T) {
	t.Parallel()
	program := rig.Programs()[client]
	t.Run("it crashes again and again", func(t *testing.T) {
		t.Parallel()
		e := start(t)
		e.publish(plain("crash"), "t")
		shows := ""
		rigtest.Await(t, time.Minute, "a failed mount", func() bool {
			if shows = e.statusLine("crash: ", "next try"); shows != "" {
				return true
			}
			for _, p := range e.Running(program) {
				_ = unix.Kill(p.PID, unix.SIGKILL)
			}
			return false
		})
		leads(t, "crash loop", shows, shown)
	})
	t.Run("it does not answer", func(t *testing.T) {
		t.Parallel()
		e := start(t, "--hang-timeout=1m")
		target := e.publish(plain("hang"), "t")
		pid := e.Running(program)[0].PID
		rigtest.Freeze(t, pid)
		cmd := exec.CommandContext(t.Context(), "stat", "-f", target)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		leads(t, "unresponsive", e.awaitStatus("unresponsive: "), shown)
		if err := unix.Kill(pid, unix.SIGCONT); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait()
	})
	t.Run("its helper exits, too", func(t *testing.T) {
		t.Parallel()
		e := start(t)
		v := plain("helper")
		target := e.publish(v, "t", keys(e.owner))
		e.proxy.Set(faultproxy.Faults{Refuse: true})
		if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		e.awaitStatus("1, 1B")
		e.kill()
		e.proxy.Set(faultproxy.Faults{})
		leads(t, "client and helper exit", e.awaitStatus("exited: "), shown)
		leads(t, "unpublish without credentials", e.awaitUnpublish(target, "helper"), unpublishing)
	})
}

// The session of a running mount expires.
func TestASessionExpires(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := volume("session", "sessionDuration", "4s")
	token := e.workload(time.Hour)
	target := e.publish(v, "t", token)
	e.sts(s3server.STS{Fault: s3server.FaultRefuse})
	leads(t, "expired session", e.awaitStatus("session: "), shown)
	var err error
	rigtest.Await(t, time.Minute, "a refused republish", func() bool {
		err = e.tryPublish(time.Minute, v, target, token)
		return err != nil && strings.Contains(err.Error(), "expired at")
	})
	leads(t, "republish", message(t, "republish", err), sessions)
	e.sts(s3server.STS{})
}

// S3 is away while a pod ends, and when the next one starts.
func TestAPodDoesNotEnd(t *testing.T) {
	t.Parallel()
	e := start(t, "--mount-timeout=8s")
	t.Run("S3 is away", func(t *testing.T) {
		e.t = t
		target := e.publish(plain("away"), "t")
		e.proxy.Set(faultproxy.Faults{Refuse: true})
		if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		// The client's own words are the cause.
		leads(t, "draining", e.awaitUnpublish(target, "away", "draining: 1 upload", "last output of the client", "failed to upload"), unpublishing)
		// What the client sees depends on how far its request was.
		if log := e.Logs(); !regexp.MustCompile(`PutObject.*(EOF|connection reset by peer|broken pipe|server closed idle connection)`).MatchString(log) {
			t.Error("the driver's log does not have the cause")
		}
		e.awaitStatus("draining", "1, 1B")
		err := e.tryPublish(20*time.Second, plain("away"), e.Target("next"))
		if text := message(t, "overlap", err); !strings.Contains(text, waits) || !strings.Contains(text, "away") {
			t.Errorf("a mount that waits: %s", text)
		}
		e.proxy.Set(faultproxy.Faults{})
		rigtest.Unpublish(t, e.NodeClient, plain("away"), target)
	})
	t.Run("a shell is in it", func(t *testing.T) {
		e.t = t
		target := e.publish(plain("busy"), "busy")
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		cmd.Dir = target
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		leads(t, "in use", e.awaitUnpublish(target, "busy", "in use by sleep"), unpublishing)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		rigtest.Unpublish(t, e.NodeClient, plain("busy"), target)
	})
	e.t = t
	e.NothingLeft(t)
}
