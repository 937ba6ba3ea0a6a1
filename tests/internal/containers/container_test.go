package containers_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
)

func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

const podUID = "6f4b1c9e-0d7a-4a8f-9c36-2b1de00f7a55"

// volume is a mounted tmpfs with a file.
func volume(t *testing.T, content string) string {
	t.Helper()
	containers.Need(t)
	dir := filepath.Join(t.TempDir(), "volume")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Mount("volume", dir, "tmpfs", 0, "mode=777"), unix.Mount("", dir, "", unix.MS_PRIVATE, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	write(t, filepath.Join(dir, "file"), content)
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o777); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "sub", "file"), "sub")
	return dir
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := errors.Join(os.WriteFile(path, []byte(content), 0o666), os.Chmod(path, 0o666)); err != nil {
		t.Fatal(err)
	}
}

// A watch sees what becomes of a mount: here its file system goes, the directory below shows, and comes back.
func TestAWatchSeesWhatBecomesOfAMount(t *testing.T) {
	dir := volume(t, "content")
	c := containers.Start(t, containers.Options{
		PodUID: podUID, Mounts: []containers.Mount{{Source: dir, Target: "/data"}}, Own: map[string]string{"data/file": "own"},
	})
	w := c.Watch("/data/file")
	good := containers.Reads("content")
	if _, ok := w.Await(time.Time{}, 10*time.Second, good); !ok {
		t.Fatal("it never read the file")
	}
	if unwanted := w.Unwanted("content"); len(unwanted) != 0 {
		t.Errorf("it read %v", unwanted)
	}
	if err := os.Rename(filepath.Join(dir, "file"), filepath.Join(dir, "away")); err != nil {
		t.Fatal(err)
	}
	bad, ok := w.Await(time.Now(), 10*time.Second, containers.Fails)
	if !ok || !errors.Is(bad.Err(), unix.ENOENT) {
		t.Fatalf("the watch did not fail: %+v", bad)
	}
	later, _ := w.Await(bad.Ended.Add(50*time.Millisecond), 10*time.Second, containers.Fails)
	if err := os.Rename(filepath.Join(dir, "away"), filepath.Join(dir, "file")); err != nil {
		t.Fatal(err)
	}
	if _, ok := w.Await(bad.Ended, 10*time.Second, good); !ok {
		t.Fatal("the watch did not recover")
	}
	if gap, least := w.Gap(), bad.End().Until(later.End()); gap < least || gap > 10*time.Second {
		t.Errorf("the file was away for at least %s; the gap is %s", least, gap)
	}

	unmount(t, c, "/data")
	if own, ok := w.Await(time.Now(), 10*time.Second, containers.Reads("own")); !ok || len(w.Unwanted("content")) == 0 {
		t.Errorf("the container's own file was not seen: %+v", own)
	}
	w.Stop()
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(c.Root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its root directory is left: %v", err)
	}
}

// unmount unmounts a path in a container.
func unmount(t *testing.T, c *containers.Container, path string) {
	t.Helper()
	if err := isolate.Enter(c.PID, unix.CLONE_NEWNS, func() error { return unix.Unmount(path, unix.MNT_DETACH) }); err != nil {
		t.Fatal(err)
	}
}
