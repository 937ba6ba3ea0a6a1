package helper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A client that has filled the state directory must not keep its helper from leaving how it ended: the driver would take the
// client for one that may have something left to store.
func TestEnd_IsRecordedOnAFullDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("full", dir, "tmpfs", 0, "size=64k,nr_inodes=16"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	if err := os.Mkdir(filepath.Join(dir, "below"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "below", "large"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	var err error
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if err := writeEnd(dir, End{Expected: true, Starts: 1}); err != nil {
		t.Fatal(err)
	}
	if end, ok, err := ReadEnd(dir); err != nil || !ok || !end.Expected || end.Starts != 1 {
		t.Errorf("%+v, %v, %v", end, ok, err)
	}
}
