package state

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// rebooted is a store whose state directory is gone, as a tmpfs is, with one mount's cache and its kept record.
func rebooted(t *testing.T) (s *Store, rec Mount) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: caches belong to mounts' own users")
	}
	s = testStore(t)
	rec = Mount{Name: strings.Repeat("a", 24) + "-7", Phase: Running, Client: "rclone", UID: 5000, Minor: 33, OOMKills: 2, Predecessors: []string{"x"}}
	rec.Key = mount.KeyOf(rec.Name)
	if err := os.Mkdir(s.CacheDir(rec.Name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(s.CacheDir(rec.Name), 5000, 5000); err != nil {
		t.Fatal(err)
	}
	if err := s.WriteCopy(t.Context(), rec, true); err != nil {
		t.Fatal(err)
	}
	return s, rec
}

func keeping(Mount) bool { return true }

func TestRestore_MountWithPendingUploadsComesBack(t *testing.T) {
	s, rec := rebooted(t)
	// Cut short after any of its steps, it is done again.
	if err := os.Mkdir(s.MountDir(rec.Name), 0o700); err != nil {
		t.Fatal(err)
	}
	names, err := s.Restore(t.Context(), keeping)
	if err != nil || !slices.Equal(names, []string{rec.Name}) {
		t.Fatalf("%q, %v", names, err)
	}
	back, ok, err := s.Mount(t.Context(), rec.Name)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	if back.Phase != Ending || back.Minor != 0 || back.OOMKills != 0 || back.Predecessors != nil || back.UID != 5000 || back.Client != "rclone" {
		t.Errorf("it came back as %+v", back)
	}
	if uid, err := ownerOf(s.HelperDir(rec.Name)); err != nil || uid != 5000 {
		t.Errorf("its state directory is of uid %d, %v", uid, err)
	}
	if names, err := s.Restore(t.Context(), keeping); err != nil || len(names) != 0 {
		t.Errorf("it comes back twice: %q, %v", names, err)
	}
	if err := s.remove(t.Context(), rec.Name); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(s.Cache + "/*"); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

func TestRestore_RecordWithoutACacheIsRemoved(t *testing.T) {
	for what, spoil := range map[string]func(s *Store, rec Mount) error{
		"no cache":        func(s *Store, rec Mount) error { return os.Remove(s.CacheDir(rec.Name)) },
		"another's cache": func(s *Store, rec Mount) error { return os.Chown(s.CacheDir(rec.Name), 6000, 6000) },
		"damaged":         func(s *Store, rec Mount) error { return os.WriteFile(s.keptRecord(rec.Name), []byte("{"), 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			s, rec := rebooted(t)
			if err := spoil(s, rec); err != nil {
				t.Fatal(err)
			}
			names, err := s.Restore(t.Context(), keeping)
			if err != nil || len(names) != 0 {
				t.Errorf("%q, %v", names, err)
			}
			if _, err := os.Lstat(s.MountDir(rec.Name)); err == nil {
				t.Error("a mount came back")
			}
			if _, err := os.Lstat(s.CacheDir(rec.Name)); err != nil && what != "no cache" {
				t.Error("the cache, whose files may be the only copy, is gone")
			}
		})
	}
}

// TestRestore_CacheOfCopiesIsRemoved is about clients that store what is written before it is closed.
func TestRestore_CacheOfCopiesIsRemoved(t *testing.T) {
	s, rec := rebooted(t)
	if err := errors.Join(os.Mkdir(s.CacheDir(rec.Name)+"/blocks", 0o700), os.WriteFile(s.CacheDir(rec.Name)+"/blocks/1", []byte("a copy"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if names, err := s.Restore(t.Context(), func(rec Mount) bool { return rec.Client != "rclone" }); err != nil || len(names) != 0 {
		t.Errorf("%q, %v", names, err)
	}
	if left, _ := filepath.Glob(s.Cache + "/*"); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	if _, err := os.Lstat(s.MountDir(rec.Name)); err == nil {
		t.Error("a mount came back")
	}
}

func TestOrphanedCaches_EmptyOnesAreRemoved(t *testing.T) {
	s := testStore(t)
	empty, full, live := strings.Repeat("b", 24)+"-1", strings.Repeat("b", 24)+"-2", strings.Repeat("b", 24)+"-3"
	for _, dir := range []string{s.CacheDir(empty), s.CacheDir(full), s.CacheDir(full) + "/dir", s.MountDir(live), s.CacheDir(live)} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := s.OrphanedCaches(t.Context()); err != nil || !slices.Equal(left, []string{s.CacheDir(full)}) {
		t.Errorf("%q, %v", left, err)
	}
	for name, want := range map[string]bool{empty: false, full: true, live: true} {
		if _, err := os.Lstat(s.CacheDir(name)); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The salt is the node's for as long as its cache is: with another one a secret's mount would not be found again.
func TestSalt_OutlivesTheStateDirectory(t *testing.T) {
	s := testStore(t)
	a, err := s.readSalt()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(s.Dir, "salt")); err != nil {
		t.Fatal(err)
	}
	b, err := s.readSalt()
	if err != nil || string(a) != string(b) {
		t.Errorf("another salt after a reboot: %v", err)
	}
	if err := os.Remove(filepath.Join(s.Cache, "salt")); err != nil {
		t.Fatal(err)
	}
	if c, err := s.readSalt(); err != nil || string(a) != string(c) { // of a driver that did not keep it in the cache
		t.Errorf("another salt after an upgrade: %v", err)
	}
}
