package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A helper starts without a log where the client before it has left no space for one.
func TestHelperStartsOnAFullDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("full", dir, "tmpfs", 0, "nr_inodes=8"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	var err error
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	log, err := openLog(Unit{StateDir: dir, UID: 7100, GID: 7100})
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if log.Name() != os.DevNull {
		t.Errorf("it logs to %s", log.Name())
	}
}
