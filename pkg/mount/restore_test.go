package mount

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// rebooted is a store whose state directory is gone, as a tmpfs is, with one mount's cache and its kept record.
func rebooted(t *testing.T) (s store, rec record) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: caches belong to mounts' own users")
	}
	s = newStore(t)
	rec = record{Name: strings.Repeat("a", 24) + "-7", Phase: phaseRunning, Client: "rclone", UID: 5000, Minor: 33, OOMKills: 2, Former: []string{"x"}}
	rec.Key = keyOf(rec.Name)
	if err := os.Mkdir(s.cacheDir(rec.Name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(s.cacheDir(rec.Name), 5000, 5000); err != nil {
		t.Fatal(err)
	}
	if err := s.keepRecord(rec); err != nil {
		t.Fatal(err)
	}
	return s, rec
}

func TestAMountComesBackAfterAReboot(t *testing.T) {
	s, rec := rebooted(t)
	// Cut short after any of its steps, it is done again.
	if err := os.Mkdir(s.mountDir(rec.Name), 0o700); err != nil {
		t.Fatal(err)
	}
	names, err := s.restore()
	if err != nil || !slices.Equal(names, []string{rec.Name}) {
		t.Fatalf("%q, %v", names, err)
	}
	back, ok, err := s.record(rec.Name)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	if back.Phase != phaseEnding || back.Minor != 0 || back.OOMKills != 0 || back.Former != nil || back.UID != 5000 || back.Client != "rclone" {
		t.Errorf("it came back as %+v", back)
	}
	if uid, err := s.owner(rec.Name); err != nil || uid != 5000 {
		t.Errorf("its state directory is of uid %d, %v", uid, err)
	}
	if names, err := s.restore(); err != nil || len(names) != 0 {
		t.Errorf("it comes back twice: %q, %v", names, err)
	}
	if err := s.remove(rec.Name); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(s.cache + "/*"); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

func TestARecordWithoutACacheIsForgotten(t *testing.T) {
	for what, spoil := range map[string]func(s store, rec record) error{
		"no cache":        func(s store, rec record) error { return os.Remove(s.cacheDir(rec.Name)) },
		"another's cache": func(s store, rec record) error { return os.Chown(s.cacheDir(rec.Name), 6000, 6000) },
		"damaged":         func(s store, rec record) error { return os.WriteFile(s.keptRecord(rec.Name), []byte("{"), 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			s, rec := rebooted(t)
			if err := spoil(s, rec); err != nil {
				t.Fatal(err)
			}
			names, err := s.restore()
			if err != nil || len(names) != 0 {
				t.Errorf("%q, %v", names, err)
			}
			if _, err := os.Lstat(s.mountDir(rec.Name)); err == nil {
				t.Error("a mount came back")
			}
			if _, err := os.Lstat(s.cacheDir(rec.Name)); err != nil && what != "no cache" {
				t.Error("the cache, whose files may be the only copy, is gone")
			}
		})
	}
}

// The salt is the node's for as long as its cache is: with another one a secret's mount would not be found again.
func TestTheSaltOutlivesTheStateDirectory(t *testing.T) {
	s := newStore(t)
	a, err := s.salt()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(s.dir, "salt")); err != nil {
		t.Fatal(err)
	}
	b, err := s.salt()
	if err != nil || string(a) != string(b) {
		t.Errorf("another salt after a reboot: %v", err)
	}
	if err := os.Remove(filepath.Join(s.cache, "salt")); err != nil {
		t.Fatal(err)
	}
	if c, err := s.salt(); err != nil || string(a) != string(c) { // of a driver that did not keep it in the cache
		t.Errorf("another salt after an upgrade: %v", err)
	}
}
