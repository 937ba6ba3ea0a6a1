//go:build linux

package host

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLookReportsMountPoints(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system")
	}
	dir := t.TempDir()
	before, err := Inspect(dir)
	if err != nil || before.Mountpoint {
		t.Fatalf("%+v, %v", before, err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if p, err := Inspect(dir); err != nil || !p.Mountpoint || p.Minor == before.Minor && p.Major == before.Major {
		t.Errorf("a mount point: %+v, %v", p, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if p, err := Inspect(filepath.Join(dir, "sub")); err != nil || p.Mountpoint {
		t.Errorf("a directory of it: %+v, %v", p, err)
	}
	if err := os.Symlink(dir, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if p, err := Inspect(filepath.Join(dir, "link")); err != nil || p.Mountpoint {
		t.Errorf("a link to it: %+v, %v", p, err)
	}
	if _, err := Inspect(filepath.Join(dir, "none")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a missing path: %v", err)
	}
}
