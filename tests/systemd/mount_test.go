package systemd_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// copies are the mounts of a volume in the mount namespace of a process; "" is any volume, and process a pattern.
func copies(t *testing.T, process, volume string) (found []string) {
	t.Helper()
	tables, err := filepath.Glob("/proc/" + process + "/mountinfo")
	if err != nil || len(tables) == 0 {
		t.Fatalf("process %s: %v, %v", process, tables, err)
	}
	for _, table := range tables {
		body, _ := os.ReadFile(table) // one may have ended
		for line := range strings.Lines(string(body)) {
			if _, source, ok := strings.Cut(line, " s3csi:"); ok && (volume == "" || strings.HasPrefix(source, volume+":")) {
				found = append(found, table+": "+strings.Fields(line)[4])
			}
		}
	}
	return found
}

// TestNoServiceHoldsAMount ends mounts of which services have copies: services of the host that have nothing to do with volumes and,
// without Landlock, units of other mounts. On a host where nothing propagates, those units must do without a namespace.
func TestNoServiceHoldsAMount(t *testing.T) {
	for _, c := range []struct {
		what        string
		propagation uintptr
		landlock    bool
	}{
		{"shared root", unix.MS_SHARED, true}, {"private root", unix.MS_PRIVATE, true},
		{"shared root, no Landlock", unix.MS_SHARED, false}, {"private root, no Landlock", unix.MS_PRIVATE, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			n, propagation := newRig(t), c.propagation
			if c.landlock {
				needsLandlock(t)
			} else {
				n.Wrapper = withoutLandlock()
			}
			if err := unix.Mount("", "/", "", propagation, ""); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Mount("", "/", "", unix.MS_SHARED, "") }()
			d, first, second := n.Drive(t, "node"), static("first"), static("second")
			rigtest.Publish(t, d, first, n.Target("first"))
			if err := os.WriteFile(filepath.Join(n.Target("first"), "file"), []byte("content"), 0o644); err != nil {
				t.Fatal(err)
			}
			rigtest.Publish(t, d, second, n.Target("second"))
			if propagation == unix.MS_SHARED {
				systemctl(t, "reset-failed")
				if out, err := exec.Command("systemd-run", "--unit=stranger", "-p", "Type=exec", "-p", "ProtectSystem=strict", "/bin/sleep",
					"1000").CombinedOutput(); err != nil {
					t.Fatalf("%v %s", err, out)
				}
				defer systemctl(t, "stop", "stranger")
				_, helper := unitOf(t, "second")
				for who, pid := range map[string]string{"the second unit": fmt.Sprint(helper), "the stranger": show(t, "stranger", "MainPID")} {
					if len(copies(t, pid, "first")) == 0 {
						t.Errorf("%s holds nothing of the first mount: this test shows nothing", who)
					}
				}
				if own := namespace(t, helper) != namespace(t, 1); own == c.landlock {
					t.Errorf("the second unit has a mount namespace of its own: %v", own)
				}
			}
			if metrics := rigtest.Get(t, d, "/metrics"); strings.Contains(metrics,
				`s3csi_sandbox_missing{property="ProtectSystem"} 1`) != (propagation == unix.MS_PRIVATE && !c.landlock) {
				t.Errorf("/metrics:\n%s", metrics)
			}
			rigtest.Unpublish(t, d, first, n.Target("first"))
			if got := n.Object(t, rigtest.Bucket, "first/file"); got != "content" {
				t.Errorf("the object is %q", got)
			}
			rigtest.Unpublish(t, d, second, n.Target("second"))
			n.NothingLeft(t)
			if left := copies(t, "[0-9]*", ""); len(left) > 0 {
				t.Errorf("mounts are left: %v", left)
			}
		})
	}
}

// namespace is the mount namespace of a process.
func namespace(t *testing.T, pid int) string {
	t.Helper()
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// TestHungClientKeepsNoUnitFromStarting stops a client whose mount is in the namespace that a new unit's is copied from.
func TestHungClientKeepsNoUnitFromStarting(t *testing.T) {
	n := newRig(t)
	d, hung, other := n.Drive(t, "node"), static("hung"), static("other")
	rigtest.Publish(t, d, hung, n.Target("hung"))
	frozen := n.Running(filepath.Base(rclone))
	if len(frozen) != 1 {
		t.Fatalf("clients: %v", frozen)
	}
	rigtest.Freeze(t, frozen[0].PID)
	began := pressure.Now()
	rigtest.Publish(t, d, other, n.Target("other"))
	if took := began.Since(); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	if err := os.WriteFile(filepath.Join(n.Target("other"), "file"), []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	rigtest.Unpublish(t, d, other, n.Target("other"))
	kill(t, frozen[0].PID, unix.SIGCONT)
	rigtest.Unpublish(t, d, hung, n.Target("hung"))
	n.NothingLeft(t)
}
