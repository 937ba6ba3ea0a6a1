package rigtest

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// hostBin is where the programs are on a host of the tests' own.
const hostBin = "/opt/s3csi-built"

// Main is the body of a TestMain of a package whose tests hold for every launcher: they run in namespaces of their own, and,
// where S3CSI_LAUNCHER=systemd says so, there on a host with a real systemd. It returns the exit code.
func Main(m *testing.M) int { return isolate.Main(func() int { return run(m) }) }

func run(m *testing.M) int {
	if !onHost() {
		return m.Run()
	}
	if systemd.Inside() {
		for name, value := range map[string]string{rig.EnvBin: hostBin, s3server.EnvBinary: filepath.Join(hostBin, "test", "s3server")} {
			if err := os.Setenv(name, value); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
		if os.Getenv(rig.EnvMountpoint) != "" {
			if err := os.Setenv(rig.EnvMountpoint, filepath.Join(hostBin, rig.Programs()["mountpoint-s3"])); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
	}
	return systemd.Main(m, programs)
}

// onHost reports whether tests need a host of their own.
func onHost() bool { return os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd }

// ProcessOnly skips a test that makes sense for no other launcher than processes.
func ProcessOnly(t testing.TB, why string) {
	t.Helper()
	if onHost() {
		t.Skip("for the launcher of processes only: " + why)
	}
}

// programs are all built programs, and the client that is used in place of a built one. The host shows this machine's root
// file system, but the checkout may be on another.
func programs(string) (map[string]string, error) {
	files := map[string]string{}
	bin := os.Getenv(rig.EnvBin)
	if bin == "" {
		return files, nil // every test is skipped
	}
	err := filepath.WalkDir(bin, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (path == filepath.Join(bin, "race") || path == filepath.Join(bin, "image")) {
			return filepath.SkipDir // the same programs, for tests without a host
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(bin, path)
		files[filepath.Join(hostBin, name)] = path
		return err
	})
	if given := os.Getenv(rig.EnvMountpoint); given != "" {
		files[filepath.Join(hostBin, rig.Programs()["mountpoint-s3"])] = given
	}
	return files, err
}
