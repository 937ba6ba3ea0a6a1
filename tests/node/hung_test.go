//go:build !lane || timed

package node

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// hang makes a process hang in execve(2), with a file whose client is frozen meanwhile. The process exits when the client goes on.
func hang(t *testing.T, file string, freeze func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), stuckEnv+"="+file)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "open\n" {
		t.Fatalf("%q, %v", line, err)
	}
	freeze()
	in.Close()
	for end := time.Now().Add(eventually); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", cmd.Process.Pid))
		for _, file := range files {
			text, _ := os.ReadFile(file)
			child, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err == nil && hangs(child) {
				return
			}
		}
	}
	t.Fatal("no process hangs")
}

// clientAt is the process of a client that serves the volume at a target.
func (e *env) clientAt(client, target string) rig.Process {
	e.t.Helper()
	for _, m := range mountsAt(e.t, target) {
		for _, p := range e.Running(programs[client]) {
			if strings.Contains(m.VFSOptions+",", fmt.Sprintf("user_id=%d,", p.UID)) {
				return p
			}
		}
	}
	e.t.Fatalf("no client serves %s: %v", target, e.Processes())
	return rig.Process{}
}

// hangs reports whether a link of a process cannot be read.
func hangs(pid int) bool {
	done := make(chan struct{})
	go func() {
		_, _ = os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
		close(done)
	}()
	select {
	case <-done:
		return false
	case <-time.After(200 * time.Millisecond):
		return true
	}
}

// A process that hangs in execve(2), here of a pod whose own volume's client does not answer, delays nothing of others: neither healing in
// their containers, nor unpublishing and publishing, nor the start of a driver.
func TestHungProcess_DelaysNoOtherVolume(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "hung/file", "content")
		e.Put(t, bucket, "well/file", "content")
		well, leaving, hung := static("well", client), static("leaving", client), static("hung", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(well, target)
		gone := e.publish(leaving, "leaving")
		hungAt := e.podTarget(otherPodUID, "pv")
		e.publishAt(hung, hungAt)
		frozen := e.clientAt(client, hungAt).PID
		pod := containers.Start(t, containers.Options{PodUID: podUID, Mounts: []containers.Mount{{Source: target, Target: "/data"}}})
		agent := container(t)
		hang(t, filepath.Join(hungAt, "file"), func() {
			t.Cleanup(func() { _ = unix.Kill(frozen, unix.SIGCONT) })
			rigtest.Freeze(t, frozen)
		})

		watch := pod.Watch("/data/file")
		heals := func() {
			t.Helper()
			rigtest.Kill(t, e.clientAt(client, target))
			died := pressure.Now()
			look, ok := watch.Await(died.Time, eventually, containers.Reads("content"))
			if took := died.Until(look.End()); !ok || took > 2*soon {
				t.Errorf("the container reads again after %s (%t)", took, ok)
			}
		}
		heals()
		began := pressure.Now()
		e.unpublish(leaving, gone)
		e.publish(static("coming", client), "coming")
		if n := len(ours(t, agent, "leaving")); n != 0 {
			t.Errorf("another namespace has %d copies of what was unpublished", n)
		}
		if took := began.Since(); took > 5*time.Second {
			t.Errorf("unpublishing and publishing took %s", took)
		}
		e.restart("--hang-timeout=0")
		heals()
		watch.Stop()
		stop(t, pod)
		began = pressure.Now()
		e.unpublish(well, target)
		if took := began.Since(); took > 5*time.Second {
			t.Errorf("unpublishing took %s", took)
		}
		_ = unix.Kill(frozen, unix.SIGCONT)
		e.unpublish(hung, hungAt)
		e.unpublish(static("coming", client), e.Target("coming"))
		e.awaitNothingLeft(eventually)
	}, "--hang-timeout=0")
}

// A user namespace that was made with the host's mounts has copies of them that cannot be detached. They do not keep the mount: also if the
// driver waits for an unresponsive client without end.
func TestLockedCopy_DoesNotDelayUnpublish(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("locked-copy", client)
		target := e.publish(v, "t")
		write(t, filepath.Join(target, "file"), "content")
		for _, keeps := range []string{"exec sleep 1000", "cd " + target + " && exec sleep 1000"} {
			cmd := exec.CommandContext(t.Context(), "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "echo; "+keeps)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
			if _, err := out.Read(make([]byte, 1)); err != nil {
				t.Skipf("needs user namespaces: %v", err)
			}
		}
		began := pressure.Now()
		e.unpublish(v, target)
		if took := began.Since(); took > 6*time.Second {
			t.Errorf("unpublishing took %s", took)
		}
		if got := e.Object(t, bucket, "locked-copy/file"); got != "content" {
			t.Errorf("the object is %q", got)
		}
		e.logged("Aborting the connection of an unmounted volume")
	}, "--hang-timeout=0")
}
