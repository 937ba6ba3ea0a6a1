package osfile_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

func gone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", path, err)
	}
}

// nest makes directories with names of 255 bytes, each in the one before it, and returns with the test's directory as the current one.
func nest(t *testing.T, dir string, depth int) {
	t.Helper()
	name := strings.Repeat("d", 255)
	at, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for range depth {
		if err == nil {
			err = unix.Mkdirat(at, name, 0o700)
		}
		var below int
		if err == nil {
			below, err = unix.Openat(at, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		unix.Close(at)
		at = below
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(at)
}

// TestRemove_DeepTreeNeedsFewDescriptors removes a tree that is deeper than the process may have descriptors, of each file system.
func TestRemove_DeepTreeNeedsFewDescriptors(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 64
	for name, parent := range map[string]string{"disk": t.TempDir(), "tmpfs": tmpfs(t)} {
		dir := filepath.Join(parent, "tree")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		nest(t, dir, 1000)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
			t.Fatal(err)
		}
		err := osfile.RemoveTree(t.Context(), dir)
		if err := errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		gone(t, dir)
	}
}

// tmpfs returns a directory on a tmpfs, or on a disk without the privilege to mount one.
func tmpfs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, ""); err != nil {
		t.Logf("without a tmpfs: %v", err)
		return dir
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestRemove_WideTree(t *testing.T) {
	for name, parent := range map[string]string{"disk": t.TempDir(), "tmpfs": tmpfs(t)} {
		dir := filepath.Join(parent, "tree")
		for i := range 300 { // several buffers of entries, each of a directory with entries
			below := filepath.Join(dir, fmt.Sprintf("%0200d", i))
			if err := errors.Join(os.MkdirAll(below+"/sub", 0o700), os.WriteFile(below+"/file", nil, 0o600), os.WriteFile(below+"-file", nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if err := osfile.RemoveTree(t.Context(), dir); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		gone(t, dir)
	}
}

func TestRemove_LinksAreNotFollowed(t *testing.T) {
	outside, dir := t.TempDir(), filepath.Join(t.TempDir(), "tree")
	file := filepath.Join(outside, "file")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.MkdirAll(dir+"/sub", 0o700), os.Symlink(outside, dir+"/sub/link"),
		os.Symlink(outside, dir+".link")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, dir + ".link", dir + ".missing"} {
		if err := osfile.RemoveTree(t.Context(), path); err != nil {
			t.Error(err)
		}
		gone(t, path)
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

func TestRemove_MountsAreNotEntered(t *testing.T) {
	outside, dir := t.TempDir(), filepath.Join(t.TempDir(), "tree")
	mounted := filepath.Join(dir, "sub", "mounted")
	if err := errors.Join(os.WriteFile(outside+"/file", nil, 0o600), os.MkdirAll(mounted, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(outside, mounted, "", unix.MS_BIND, ""); err != nil {
		t.Skip(err)
	}
	err := osfile.RemoveTree(t.Context(), dir)
	if uerr := unix.Unmount(mounted, 0); uerr != nil || !errors.Is(err, unix.EBUSY) {
		t.Errorf("%v, %v", err, uerr)
	}
	if _, err := os.Stat(outside + "/file"); err != nil {
		t.Error(err)
	}
	if err := osfile.RemoveTree(t.Context(), dir); err != nil {
		t.Error(err)
	}
	gone(t, dir)
}

func TestRemove_EndedContextStopsAndALaterCallContinues(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tree")
	if err := os.MkdirAll(dir+"/sub", 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := osfile.RemoveTree(ctx, dir); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := osfile.RemoveTree(t.Context(), dir); err != nil {
		t.Error(err)
	}
	gone(t, dir)
}
