package systemd_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
)

// checkNode runs s3-csi-driver check --node as the rig's drivers run, and gives the host's rows by name.
func checkNode(t *testing.T, n *rigtest.Node, flags ...string) map[string]check.Row {
	t.Helper()
	args := slices.Concat(n.Wrapper, []string{n.Program, "check", "--output=json", "--node", "--launcher=auto", "--default-client=rclone",
		"--state-dir=" + n.State, "--host-dir=" + n.HostDir,
		fmt.Sprintf("--uid-range=%d-%d", n.FirstUID, n.LastUID)}, flags)
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Env = n.Environment()
	out, _ := cmd.Output()
	var r check.Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	rows := map[string]check.Row{}
	for _, s := range r.Sections {
		for _, row := range s.Rows {
			if s.Name == "node" {
				rows[row.Check] = row
			}
			if row.Needed && row.Result != check.Yes {
				t.Logf("%s: %+v", s.Name, row)
			}
		}
	}
	if want := cmd.ProcessState.ExitCode() == 0; r.OK != want {
		t.Errorf("ok %t, exit code %d", r.OK, cmd.ProcessState.ExitCode())
	}
	rows["ok"] = check.Row{Result: map[bool]check.Result{true: check.Yes, false: check.No}[r.OK]}
	return rows
}

// TestACheckOfTheHostFindsItsSystemd looks from the host and out of a container.
func TestACheckOfTheHostFindsItsSystemd(t *testing.T) {
	for where, prepare := range map[string]func(*rigtest.Node){"on the host": func(*rigtest.Node) {}, "in a container": container} {
		t.Run(where, func(t *testing.T) {
			n := newRig(t)
			prepare(n)
			rows := checkNode(t, n)
			for _, name := range []string{"ok", "hostMounts", "isolation", "fuseDevice", "fuseMount", "launcher", "survivesDriver", "hostPrograms", "client.rclone",
				"dns.default"} {
				if rows[name].Result != check.Yes {
					t.Errorf("%s: %+v", name, rows[name])
				}
			}
			if l := rows["launcher"]; !strings.HasPrefix(l.Why, "systemd ") {
				t.Errorf("%+v", l)
			}
			for _, dir := range []string{n.State, n.HostDir} {
				if exists(dir) {
					t.Errorf("%s is left", dir)
				}
			}
		})
	}
}

// TestHostDirectoryWithoutExec_IsReportedByCheckAndDriver puts the host directory on a file system without programs.
func TestHostDirectoryWithoutExec_IsReportedByCheckAndDriver(t *testing.T) {
	n := newRig(t)
	if err := os.Mkdir(n.HostDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", n.HostDir, "tmpfs", unix.MS_NOEXEC, "mode=755"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(n.HostDir, unix.MNT_DETACH) }()
	rows := checkNode(t, n)
	if p := rows["hostPrograms"]; p.Result != check.No || !strings.Contains(p.Why, "mounted noexec; choose a --host-dir elsewhere") {
		t.Errorf("%+v", p)
	}
	if rows["ok"].Result != check.No {
		t.Error("the host is said to be good")
	}
	if left, err := os.ReadDir(n.HostDir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if d, err := n.Start(t.Context(), "node"); err == nil {
		d.Kill()
		t.Error("the driver starts")
	} else if log := n.Logs(); !strings.Contains(log, "mounted noexec; choose a --host-dir elsewhere") {
		t.Errorf("it does not say why it ended:\n%s", log)
	}
}
