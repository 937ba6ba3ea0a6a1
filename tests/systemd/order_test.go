package systemd_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// TestContainersAreStoppedFirst stops everything, as a shutdown does: a container runtime and a container each take a
// second and then look whether the helper, which would go at once, is still there.
func TestContainersAreStoppedFirst(t *testing.T) {
	u := start(t, newLauncher(t, launcher.Options{}))
	pid := u.hello().PID
	dir := t.TempDir()
	lastLook := func(name string) (file, script string) {
		file = filepath.Join(dir, name)
		return file, fmt.Sprintf("sleep 1; if [ -d /proc/%d ]; then echo there > %s; else echo gone > %s; fi", pid, file, file)
	}
	runtime, look := lastLook("runtime")
	container, trap := lastLook("container")
	for _, argv := range [][]string{
		{"--unit=containerd.service", "-p", "Type=exec", "-p", "ExecStop=/bin/sh -c '" + look + "'", "/bin/sleep", "1000"},
		{"--unit=container.service", "-p", "Type=exec", "-p", "KillMode=mixed", "--slice=kubepods-pod1.slice", "/bin/sh", "-c",
			"trap '" + trap + "; exit 0' TERM; touch " + dir + "/ready; while :; do sleep 0.1; done"},
	} {
		if out, err := exec.CommandContext(bounded(t), "systemd-run", argv...).CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, out)
		}
	}
	await(t, "the container", func() bool { _, err := os.Stat(dir + "/ready"); return err == nil })
	// Each is a job of its own, begun in this order as long as none has to wait for another.
	systemctl(t, "stop", "containerd.service", "kubepods.slice", u.name())
	for _, file := range []string{runtime, container} {
		if body, err := os.ReadFile(file); err != nil || string(body) != "there\n" {
			t.Errorf("when %s ended the helper was %q (%v)", filepath.Base(file), body, err)
		}
	}
	await(t, "the unit's end", func() bool { return show(t, u.name(), "LoadState") == "not-found" })
}
