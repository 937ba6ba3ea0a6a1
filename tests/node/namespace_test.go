//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// host makes a PID and a mount namespace whose PID 1 sleeps, as a small host, and gives PID 1's number out here. With its
// PID 1 all of it ends.
func host(t *testing.T) (pid int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid)
	for range 500 {
		b, _ := os.ReadFile(children)
		if _, err := fmt.Sscan(string(b), &pid); err == nil {
			if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); strings.TrimSpace(string(comm)) == "sleep" {
				return pid
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the namespaces' PID 1 did not come up")
	return 0
}

// A driver in a mount namespace of its own, as in a container, mounts in PID 1's: the host sees the volume, the container
// has no copy of it, and another container of the driver's takes over.
func TestADriverInAContainerMountsOnTheHost(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "the small hosts of this test have no systemd; tests/systemd has a container on one that has")
	eachContainerClient(t, func(t *testing.T, e *env, client string) {
		pid := host(t)
		e.Isolation = []string{"--allow-isolated"} // the small host's PID 1 is no init, and no runtime made the container
		// The container: a mount namespace below the host's, private to it.
		e.Wrapper = []string{"nsenter", "-t", fmt.Sprint(pid), "--mount", "--pid", "unshare", "--mount", "--propagation", "private",
			"setpriv", "--pdeathsig", "KILL"}
		e.drive()
		v := static("contained", client)
		target := e.publish(v, "t")
		if n := len(mountsAt(t, target)); n != 0 {
			t.Errorf("%d mounts are out here", n)
		}
		in(t, pid, "sh", "-c", "echo -n inside > "+target+"/file")
		if got := in(t, pid, "cat", target+"/file"); got != "inside" {
			t.Errorf("the host reads %q", got)
		}
		var found []int // a process that the driver starts has its program until it executes its own
		e.await(eventually, "one driver", func() bool { found = drivers(t, e); return len(found) == 1 })
		for _, p := range found {
			if table := read(t, fmt.Sprintf("/proc/%d/mountinfo", p)); strings.Contains(table, " "+target+" ") || strings.Contains(table, "s3csi:contained:") {
				t.Error("the container has a copy of the mount")
			}
		}
		clientMounts := read(t, fmt.Sprintf("/proc/%d/mountinfo", e.client(client).PID))
		if !strings.Contains(clientMounts, " "+target+" ") {
			t.Error("the client is not in the host's mount namespace")
		}
		before := e.client(client)
		e.Kill()
		e.await(10*time.Second, "the driver's end", func() bool { return len(drivers(t, e)) == 0 })
		e.drive()
		other := e.publish(v, "other")
		if got := in(t, pid, "cat", other+"/file"); got != "inside" {
			t.Errorf("after a restart the host reads %q", got)
		}
		if after := e.client(client); after != before {
			t.Errorf("the client was replaced: %v, %v", before, after)
		}
		e.unpublish(v, target)
		e.unpublish(v, other)
		if table := in(t, pid, "cat", "/proc/1/mountinfo"); strings.Contains(table, "s3csi:contained:") {
			t.Errorf("left on the host:\n%s", table)
		}
		e.NothingLeft(t)
		if got := e.Object(t, bucket, "contained/file"); got != "inside" {
			t.Errorf("the object is %q", got)
		}
	})
}

// drivers are the pids of the drivers that run from the rig's directory.
func drivers(t *testing.T, e *env) (pids []int) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if exe, _ := os.Readlink(link); exe == filepath.Join(e.Clients, "s3-csi-driver") {
			var pid int
			if _, err := fmt.Sscanf(link, "/proc/%d/exe", &pid); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func eachContainerClient(t *testing.T, test func(t *testing.T, e *env, client string)) {
	for _, c := range clients {
		t.Run(c, func(t *testing.T) { test(t, newEnv(t), c) })
	}
}
