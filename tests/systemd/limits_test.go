package systemd_test

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// enforced skips a test where the host has no memory controller.
func enforced(t *testing.T) {
	t.Helper()
	for _, file := range []string{"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/system.slice/memory.max"} {
		if _, err := os.Stat(file); err == nil {
			return
		}
	}
	t.Skip("no cgroup hierarchy of the host has a memory controller")
}

func TestClientThatWantsTooMuchMemoryIsKilledAloneAndThatIsTold(t *testing.T) {
	l := newLauncher(t)
	enforced(t)
	neighbour := start(t, l)
	neighbour.run("eat:8", "wait:/nowhere")
	u := prepare(t, l)
	u.Limits = launcher.Limits{MemoryMax: 64 << 20, TasksMax: 200, CPUWeight: 50}
	u.mustLaunch()
	before := u.result()
	u.run("eat:256", "wait:/nowhere")
	s := u.until("the client's end", exited)
	if s.Signal != "SIGKILL" {
		t.Errorf("the client's end: %+v", s)
	}
	after := u.result()
	if before.OOM() || !after.OOM() || after.OOMKills != 1 || after.Active != "active" {
		t.Errorf("before %+v, after %+v", before, after)
	}
	// It goes on: the helper has the keys and takes another client.
	u.run("eat:8", "wait:/nowhere")
	if u.said("eat:8") != "8" {
		t.Error("another client did not start")
	}
	if s := neighbour.hello(); s.State != helper.StateRunning {
		t.Errorf("the neighbour: %+v", s)
	}
}

func TestCrashIsNotTakenForWantOfMemory(t *testing.T) {
	u := prepare(t, newLauncher(t))
	u.Limits.MemoryMax = 64 << 20
	u.mustLaunch()
	kill(t, u.run("wait:/nowhere").ClientPID, unix.SIGKILL)
	u.until("the client's end", exited)
	if r := u.result(); r.OOM() {
		t.Errorf("%+v", r)
	}
}

func TestLimitsAreSetOnUnitAndSlice(t *testing.T) {
	l := newLauncher(t, launcher.WithSliceLimits(launcher.Limits{MemoryMax: 900 << 20}), launcher.WithDefaultLimits(launcher.Limits{MemoryMax: 200 << 20, TasksMax: 300}))
	u := prepare(t, l)
	u.Limits = launcher.Limits{TasksMax: 400, CPUWeight: 20, MemoryHigh: 150 << 20}
	u.mustLaunch()
	for name, want := range map[string]string{"MemoryMax": "209715200", "MemoryHigh": "157286400", "TasksMax": "400", "CPUWeight": "20"} {
		if got := show(t, u.name(), name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if got := show(t, launcher.Slice, "MemoryMax"); got != "943718400" {
		t.Errorf("the slice's MemoryMax is %s", got)
	}
	if body, err := os.ReadFile("/sys/fs/cgroup/memory/system.slice/system-s3csi.slice/memory.limit_in_bytes"); err == nil && strings.TrimSpace(string(body)) != "943718400" {
		t.Errorf("the slice's limit in the kernel is %s", body)
	}
}
