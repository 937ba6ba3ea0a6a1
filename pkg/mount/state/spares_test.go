package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

const spareUID = 7300

// spared is a mount that takes a spare, before it is made.
func (f *Store) spared(t *testing.T) (Spare, Mount) {
	t.Helper()
	spare, err := f.makeSpare(t.Context(), spareUID)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.SpareSocket(spare.Name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	rec := Mount{Name: strings.Repeat("d", 24) + "-1", Phase: Starting, UID: spare.UID, Spare: spare.Name}
	rec.Key = mount.KeyOf(rec.Name)
	return spare, rec
}

// A mount gets the directories of its spare: the same ones, because Landlock's rules are for them.
func TestMake_TakesTheDirectoriesOfTheSpare(t *testing.T) {
	s := testStore(t)
	spare, rec := s.spared(t)
	write := func(path string) {
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	scratch, cache := inode(t, s.SpareHelperDir(spare.Name)), inode(t, s.CacheDir(spare.Name))
	if err := s.Make(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(inode(t, s.HelperDir(rec.Name)), scratch) || !os.SameFile(inode(t, s.CacheDir(rec.Name)), cache) {
		t.Error("the mount has other directories than its spare")
	}
	if _, err := os.Lstat(s.Socket(rec.Name)); err != nil {
		t.Errorf("the socket: %v", err)
	}
	file := filepath.Join(s.HelperDir(rec.Name), "file")
	write(file)
	write(filepath.Join(s.CacheDir(rec.Name), "file"))
	for range 2 {
		if err := s.removeSpare(t.Context(), spare.Name); err != nil {
			t.Fatal(err)
		}
	}
	s.mustHaveScratch(t, spare.Name, false)
	s.mustHaveScratch(t, rec.Name, true)
	for _, file := range []string{file, filepath.Join(s.CacheDir(rec.Name), "file")} {
		if b, err := os.ReadFile(file); err != nil || string(b) != "x" {
			t.Errorf("%s reads %q, %v after the spare was removed", file, b, err)
		}
	}
	if all, err := s.Spares(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("spares are left: %v, %v", all, err)
	}
	if err := s.remove(t.Context(), rec.Name); err != nil {
		t.Fatal(err)
	}
	s.mustHaveScratch(t, rec.Name, false)
}

// inode identifies a directory.
func inode(t *testing.T, dir string) os.FileInfo {
	t.Helper()
	fi, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	return fi
}

// No mount gets the uid of a spare, and what removes the leftovers of mounts leaves spares alone.
func TestUIDs_IncludeSpares(t *testing.T) {
	s := testStore(t)
	spare, _ := s.spared(t)
	if used, err := s.UIDs(t.Context()); err != nil || !used[spare.UID] {
		t.Errorf("the uids in use are %v, %v", used, err)
	}
	if err := s.RemoveOrphans(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mustHaveScratch(t, spare.Name, true)
	if dirs, err := s.OrphanedCaches(t.Context()); err != nil || len(dirs) != 0 {
		t.Errorf("caches without a mount: %v, %v", dirs, err)
	}
	if names, err := s.Names(t.Context()); err != nil || len(names) != 0 {
		t.Errorf("mounts: %v, %v", names, err)
	}
	if all, err := s.Spares(t.Context()); err != nil || len(all) != 1 || all[0] != spare {
		t.Errorf("spares: %v, %v", all, err)
	}
	if err := s.removeSpare(t.Context(), spare.Name); err != nil {
		t.Fatal(err)
	}
	if used, err := s.UIDs(t.Context()); err != nil || used[spare.UID] {
		t.Errorf("the uids in use are %v afterwards, %v", used, err)
	}
}
