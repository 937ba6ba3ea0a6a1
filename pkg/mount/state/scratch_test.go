package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// mustHaveScratch fails the test unless a mount has a file system of its own, or has none.
func (f *Store) mustHaveScratch(t *testing.T, name string, want bool) {
	t.Helper()
	is, err := isMountPoint(f.scratchDir(name))
	if err != nil && (want || !errors.Is(err, fs.ErrNotExist)) || is != want {
		t.Errorf("%s is a mount point: %v, %v; want %v", f.scratchDir(name), is, err, want)
	}
}

func TestScratch_ComesAndGoesWithItsMount(t *testing.T) {
	s := testStore(t)
	rec := Mount{Name: strings.Repeat("c", 24) + "-1", Phase: Starting, UID: 7100}
	rec.Key = mount.KeyOf(rec.Name)
	if err := s.Make(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	s.mustHaveScratch(t, rec.Name, true)
	if uid, err := ownerOf(s.HelperDir(rec.Name)); err != nil || uid != rec.UID {
		t.Errorf("its owner is %d, %v", uid, err)
	}
	if uid, err := ownerOf(s.scratchDir(rec.Name)); err != nil || uid != rec.UID {
		t.Errorf("its root is of %d, %v", uid, err)
	}
	wantMode(t, s.scratchDir(rec.Name), 0o700)
	if err := os.WriteFile(filepath.Join(s.HelperDir(rec.Name), "file"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveOrphans(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mustHaveScratch(t, rec.Name, true)
	for range 2 {
		if err := s.remove(t.Context(), rec.Name); err != nil {
			t.Fatal(err)
		}
		s.mustHaveScratch(t, rec.Name, false)
	}
	if left, _ := filepath.Glob(s.Dir + "/*/*"); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

func TestScratch_OrphanIsRemoved(t *testing.T) {
	s := testStore(t)
	name := strings.Repeat("c", 24) + "-2"
	if err := os.Mkdir(s.MountDir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a start that is cut short is taken up
		if err := s.makeHelperDir(name, 7100); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(s.MountDir(name)); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveOrphans(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mustHaveScratch(t, name, false)
}

func TestScratch_UnmountedOneComesBack(t *testing.T) {
	s := testStore(t)
	name := strings.Repeat("c", 24) + "-4"
	if err := errors.Join(os.Mkdir(s.MountDir(name), 0o700), s.makeHelperDir(name, 7100), unix.Unmount(s.scratchDir(name), 0)); err != nil {
		t.Fatal(err)
	}
	if err := s.RestoreHelperDir(t.Context(), Mount{Name: name, UID: 7100}); err != nil {
		t.Fatal(err)
	}
	s.mustHaveScratch(t, name, true)
}
