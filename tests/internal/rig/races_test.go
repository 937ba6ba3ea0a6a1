package rig_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// A rig that ends kills what runs as one of its users, in the PID namespaces below its own, too.
func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

// A race in any of the programs fails the test whose rig they belong to, also when they run as a mount's user.
func TestRacesAreReported(t *testing.T) {
	if os.Getenv(rig.EnvRace) == "" {
		t.Skip("needs programs that are built with the race detector: set " + rig.EnvRace)
	}
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	for program, uid := range map[string]uint32{"s3-csi-driver": 0, "s3-csi-helper": 65534, "s3-csi-rclone": 65534, "failpoints/s3-csi-driver": 0,
		"failpoints/s3-csi-helper": 65534} {
		t.Run(program, func(t *testing.T) {
			r, err := rig.New(rig.S3{})
			if err != nil {
				t.Fatal(err)
			}
			dir := r.Clients
			if of, _, other := strings.Cut(program, "/"); other {
				installed, err := r.InstallDriver(filepath.Join(os.Getenv(rig.EnvBin), "test", of))
				if err != nil {
					t.Fatal(err)
				}
				dir = filepath.Dir(installed)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(dir, filepath.Base(program)), "provoke-race")
			cmd.Env = []string{"PATH=/usr/bin"}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
			if out, err := cmd.CombinedOutput(); err == nil {
				t.Errorf("it exited with success: %s", out)
			}
			if err := r.Close(); err == nil || !strings.Contains(err.Error(), "WARNING: DATA RACE") {
				t.Errorf("the rig ends with %v, want the race", err)
			}
		})
	}
}
