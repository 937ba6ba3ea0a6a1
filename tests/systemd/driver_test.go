package systemd_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// newRig is a node with an S3 server; its drivers are the built ones.
func newRig(t *testing.T) *rigtest.Node {
	t.Helper()
	systemd.Host(t)
	for _, file := range []string{built + "/s3-csi-driver", rclone, built + "/test/s3server", "/dev/fuse"} {
		if !exists(file) {
			t.Skip("needs the built programs and FUSE (make test)")
		}
	}
	t.Setenv(rig.EnvBin, built)
	t.Setenv(s3server.EnvBinary, built+"/test/s3server")
	t.Setenv(rig.EnvLauncher, rig.LauncherSystemd)
	n := rigtest.New(t)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("journalctl", "--no-pager", "-o", "cat", "-u", "s3csi-*").CombinedOutput()
			t.Logf("the journal of helpers:\n%s", out)
		}
	})
	return n
}

func static(name string) *csi.Volume { return rigtest.Static(name, rigtest.Client) }

// unitOf is the unit of a volume's mount, and its helper. One that was a spare gets its description after the publication.
func unitOf(t *testing.T, volume string) (name string, pid int) {
	t.Helper()
	await(t, "the unit of volume "+volume, func() bool {
		for line := range strings.Lines(systemctl(t, "list-units", "--plain", "--no-legend", "s3csi-*.service")) {
			if strings.Contains(line, "running S3 volume "+volume+" (rclone)") {
				name, _, _ = strings.Cut(line, " ")
				return true
			}
		}
		return false
	})
	if _, err := fmt.Sscan(show(t, name, "MainPID"), &pid); err != nil {
		t.Fatal(err)
	}
	return name, pid
}

// container starts the rig's drivers as a node's container: in a mount namespace of their own that has nothing of the host's
// /run, /opt and cgroups, also not below what it shows in their place.
func container(n *rigtest.Node) {
	n.Wrapper = []string{"unshare", "--mount", "--propagation", "private", "sh", "-c",
		`umount --recursive --lazy /run /sys/fs/cgroup && for d in /run /opt /sys/fs/cgroup; do mount -t tmpfs tmpfs $d; done && exec "$@"`, "container"}
}

// TestVolumeOutlivesTheDriver is the promise from one end to the other, on the host and out of a container.
func TestVolumeOutlivesTheDriver(t *testing.T) {
	for where, prepare := range map[string]func(*rigtest.Node){"on the host": func(*rigtest.Node) {}, "in a container": container} {
		t.Run(where, func(t *testing.T) {
			n := newRig(t)
			prepare(n)
			d := n.Drive(t, "node")
			v, target := static("promise"), n.Target("a")
			rigtest.Publish(t, d, v, target)
			file := filepath.Join(target, "file")
			if err := os.WriteFile(file, []byte("content"), 0o644); err != nil {
				t.Fatal(err)
			}
			name, pid := unitOf(t, "promise")
			if units, err := n.Units(); err != nil || len(units) != 1 || units[name] != "active" {
				t.Errorf("units: %v, %v", units, err)
			}
			if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || !strings.HasPrefix(program, n.HostDir+"/s3.csi.driver/") ||
				filepath.Base(program) != "s3-csi-helper" {
				t.Errorf("the helper is %s (%v)", program, err)
			}
			for property, want := range map[string]string{"MemoryMax": "1073741824", "TasksMax": "1024", "Slice": "system-s3csi.slice"} {
				if got := show(t, name, property); got != want {
					t.Errorf("%s is %s, want %s", property, got, want)
				}
			}
			if got := show(t, "system-s3csi.slice", "MemoryMax"); got == "infinity" {
				t.Error("the slice has no limit")
			}

			d.Kill()
			if got, err := os.ReadFile(file); err != nil || string(got) != "content" {
				t.Errorf("without a driver: %q %v", got, err)
			}
			d = n.Drive(t, "node")
			rigtest.Publish(t, d, v, target) // as kubelet does after a restart of its own
			if _, now := unitOf(t, "promise"); now != pid {
				t.Errorf("the helper was %d and is %d", pid, now)
			}
			rigtest.Kill(t, n.Running(filepath.Base(rclone))...)
			await(t, "the volume without its first client", func() bool {
				got, err := os.ReadFile(file)
				return err == nil && string(got) == "content"
			})
			await(t, "a crash, which is no want of memory, to be counted", func() bool {
				return strings.Contains(rigtest.Get(t, d, "/metrics"), `s3csi_mount_restarts_total{client="rclone",reason="crash"} 1`)
			})
			if ready := rigtest.Get(t, d, "/readyz"); !strings.Contains(ready, "note: the launcher is systemd 2") || strings.Contains(ready, "do not survive") {
				t.Errorf("/readyz:\n%s", ready)
			}
			if m := rigtest.Get(t, d, "/metrics"); !strings.Contains(m, `s3csi_launcher_info{launcher="systemd",systemd_version="2`) {
				t.Errorf("/metrics:\n%s", m)
			}
			rigtest.Unpublish(t, d, v, target)
			if got := n.Object(t, rigtest.Bucket, "promise/file"); got != "content" {
				t.Errorf("the object is %q", got)
			}
			n.NothingLeft(t)
		})
	}
}

// TestMountsKeepTheirProgramsOverAnUpgrade replaces a client program between two drivers, as a new image does.
func TestMountsKeepTheirProgramsOverAnUpgrade(t *testing.T) {
	n := newRig(t)
	versions := func() []string {
		t.Helper()
		dirs, err := filepath.Glob(filepath.Join(n.HostDir, "s3.csi.driver", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return dirs
	}
	running := func() []string {
		t.Helper()
		var dirs []string
		links, _ := filepath.Glob("/proc/[0-9]*/exe")
		for _, link := range links {
			program, _ := os.Readlink(link) // a process that has just ended
			if dir, name := filepath.Split(program); name == "s3-csi-rclone" {
				dirs = append(dirs, filepath.Clean(dir))
			}
		}
		slices.Sort(dirs)
		return slices.Compact(dirs)
	}
	d := n.Drive(t, "node")
	first := versions()
	old, fresh := static("old"), static("fresh")
	rigtest.Publish(t, d, old, n.Target("old"))
	d.Kill()

	path := filepath.Join(n.Clients, "s3-csi-rclone")
	program, err := os.ReadFile(path)
	if err := errors.Join(err, rig.WriteProgram(path, append(program, "newer"...))); err != nil {
		t.Fatal(err)
	}
	d = n.Drive(t, "node")
	rigtest.Publish(t, d, fresh, n.Target("fresh"))
	if both := versions(); len(first) != 1 || len(both) != 2 || !slices.Equal(running(), both) {
		t.Fatalf("there was %v, there is %v, of which run %v", first, both, running())
	}
	rigtest.Unpublish(t, d, old, n.Target("old"))
	d.Kill()
	n.Drive(t, "node") // which looks at once at what is left
	await(t, "the old version's end", func() bool { return !exists(first[0]) })
	if now := versions(); len(now) != 1 || !slices.Equal(running(), now) {
		t.Errorf("there is %v, of which run %v", now, running())
	}
}

// TestMountsOutliveAChangeOfTheLauncher has the driver started with the other launcher, both ways.
func TestMountsOutliveAChangeOfTheLauncher(t *testing.T) {
	for from, to := range map[string]string{"systemd": "process", "process": "systemd"} {
		t.Run("from "+from, func(t *testing.T) {
			n := newRig(t)
			hostDir := "--host-dir=" + n.HostDir
			n.Launcher = from
			d := n.Drive(t, "node", hostDir)
			kept, ended := static("kept"), static("ended")
			for _, v := range []*csi.Volume{kept, ended} {
				rigtest.Publish(t, d, v, n.Target(v.GetVolumeId()))
				if err := os.WriteFile(filepath.Join(n.Target(v.GetVolumeId()), "file"), []byte(from), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			before := n.Processes()
			d.Kill()
			n.Launcher = to
			d = n.Drive(t, "node", hostDir)
			rigtest.Publish(t, d, kept, n.Target("kept"))
			if after := n.Processes(); !slices.Equal(before, after) {
				t.Errorf("processes were %v and are %v", before, after)
			}
			fresh := static("fresh")
			rigtest.Publish(t, d, fresh, n.Target("fresh"))
			for _, v := range []*csi.Volume{kept, ended, fresh} {
				rigtest.Unpublish(t, d, v, n.Target(v.GetVolumeId()))
			}
			if got := n.Object(t, rigtest.Bucket, "ended/file"); got != from {
				t.Errorf("the object is %q", got)
			}
			n.NothingLeft(t)
		})
	}
}

// TestAutoTakesSystemdAndWaitsForIt starts a driver while systemd cannot be called, as it cannot while it executes itself
// again: that is no reason to take another launcher.
func TestAutoTakesSystemdAndWaitsForIt(t *testing.T) {
	n := newRig(t)
	n.Launcher = "auto"
	for _, socket := range []string{systemBus, private} {
		if err := os.Rename(socket, socket+".away"); err != nil {
			t.Fatal(err)
		}
	}
	back := time.AfterFunc(time.Second, func() {
		for _, socket := range []string{systemBus, private} {
			if err := os.Rename(socket+".away", socket); err != nil {
				t.Error(err)
			}
		}
	})
	defer back.Stop()
	d := n.Drive(t, "node", "--host-dir="+n.HostDir)
	if m := rigtest.Get(t, d, "/metrics"); !strings.Contains(m, `s3csi_launcher_info{launcher="systemd"`) {
		t.Errorf("/metrics:\n%s", m)
	}
}

// TestWithoutSystemd starts drivers where nothing is to be called and nothing says that the host was booted with systemd.
func TestWithoutSystemd(t *testing.T) {
	n := newRig(t)
	for _, path := range []string{systemBus, private, booted} {
		if err := os.Rename(path, path+".away"); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := os.Rename(path+".away", path); err != nil {
				t.Error(err)
			}
		}()
	}
	began := pressure.Now()
	if d, err := n.Start(t.Context(), "node"); err == nil {
		d.Kill()
		t.Error("--launcher=systemd starts without a systemd")
	} else if took := began.Since(); took > 5*time.Second {
		t.Errorf("it took %s to say so", took)
	} else if log := n.Logs(); !strings.Contains(log, "--launcher=systemd: the host has no suitable systemd to launch helpers") {
		t.Errorf("it does not say why it ended:\n%s", log)
	}
	n.Launcher = "auto"
	d := n.Drive(t, "node", "--host-dir="+n.HostDir, "--memory-limit=2Gi")
	if m := rigtest.Get(t, d, "/metrics"); !strings.Contains(m, `s3csi_launcher_info{launcher="process",systemd_version=""} 1`) {
		t.Errorf("/metrics:\n%s", m)
	}
	ready := rigtest.Get(t, d, "/readyz")
	for _, note := range []string{"note: the launcher is process: the host has no suitable systemd", "does not enforce limits, so these flags have no effect: " +
		"--memory-limit"} {
		if !strings.Contains(ready, note) {
			t.Errorf("/readyz does not say %q:\n%s", note, ready)
		}
	}
	if exists(n.HostDir) {
		t.Error("programs were installed that run in place")
	}
}

// withoutLandlock is a wrapper for drivers on a kernel without Landlock.
func withoutLandlock() []string { return []string{standIn, "--without-landlock"} }

func needsLandlock(t *testing.T) {
	t.Helper()
	if _, err := sandbox.ABI(); err != nil {
		t.Skip(err)
	}
}

// TestTheSandboxIsReported serves a volume with and without Landlock, and compares what the driver reports with what its helper has.
func TestTheSandboxIsReported(t *testing.T) {
	abi, _ := sandbox.ABI()
	for _, c := range []struct {
		launcher string
		landlock bool
		kind     string
	}{
		{"systemd", true, "landlock"}, {"process", true, "landlock"}, {"systemd", false, "unit"}, {"process", false, "none"},
	} {
		t.Run(c.launcher+", "+c.kind, func(t *testing.T) {
			n, version := newRig(t), 0
			n.Launcher = c.launcher
			if c.landlock {
				needsLandlock(t)
				version = abi
			} else {
				n.Wrapper = withoutLandlock()
			}
			row := checkNode(t, n, "--launcher="+c.launcher)["sandbox"]
			complete := c.landlock
			if c.launcher == "systemd" { // units have further properties, and not every host has all of them
				complete = !strings.Contains(row.Why, "missing: ")
			}
			if (row.Result == check.Yes) != complete || !strings.HasPrefix(row.Why, c.kind) {
				t.Errorf("check: %+v", row)
			}
			d := n.Drive(t, "node", "--host-dir="+n.HostDir)
			v, target := static("sandboxed"), n.Target("a")
			rigtest.Publish(t, d, v, target)
			info := fmt.Sprintf(`s3csi_sandbox_info{landlock_abi="%d",sandbox=%q} 1`, version, c.kind)
			if m := rigtest.Get(t, d, "/metrics"); !strings.Contains(m, info) {
				t.Errorf("no %s in /metrics:\n%s", info, m)
			}
			note := fmt.Sprintf("note: the sandbox of mounts is %q", c.kind)
			if ready := rigtest.Get(t, d, "/readyz"); strings.Contains(ready, note) == c.landlock {
				t.Errorf("/readyz:\n%s", ready)
			}
			helpers := n.Running("s3-csi-helper")
			if len(helpers) != 1 {
				t.Fatalf("helpers: %v", helpers)
			}
			argv, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", helpers[0].PID))
			if err != nil || strings.Contains(string(argv), "--landlock") != c.landlock {
				t.Errorf("the helper is %q (%v)", argv, err)
			}
			if own := namespace(t, helpers[0].PID) != namespace(t, 1); own != (c.kind == "unit") {
				t.Errorf("the helper has a mount namespace of its own: %v", own)
			}
			rigtest.Unpublish(t, d, v, target)
			n.NothingLeft(t)
		})
	}
}
