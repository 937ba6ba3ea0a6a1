//go:build !lane || ordinary

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A directory of the driver's that clients cannot get to is refused at the start, and the element that is closed is named.
func TestDirectoriesThatClientsCannotReachAreRefused(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"--state-dir", "--cache-dir", "--host-dir"} {
		for what, dir := range map[string]string{"below": "closed/open/s", "behind a link": "link/s"} {
			t.Run(flag+" "+what, func(t *testing.T) {
				e := newEnv(t)
				if flag == "--host-dir" && e.Launcher != "systemd" {
					t.Skip("needs launcher systemd: helpers that are plain processes run where the driver's program is")
				}
				closed := filepath.Join(e.Dir, "closed")
				if err := os.Mkdir(closed, 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.Mkdir(filepath.Join(closed, "open"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("closed/open", filepath.Join(e.Dir, "link")); err != nil {
					t.Fatal(err)
				}
				d, err := e.Start(t.Context(), "node", "--default-client="+rclone, flag+"="+filepath.Join(e.Dir, dir))
				if err == nil {
					d.Kill()
					t.Fatal("the driver starts")
				}
				if log := e.Logs(); !strings.Contains(log, flag) || !strings.Contains(log, closed+" ") || !strings.Contains(log, "(mode 0700, owner root)") {
					t.Errorf("it does not say what is closed:\n%s", log)
				}
			})
		}
	}
}
