package state

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func locked(t *testing.T, f *os.File, err error) *os.File {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// refusedFor fails unless an error names a flag and the driver that has the lock.
func refusedFor(t *testing.T, err error, flag string, other *Store) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), flag) || !strings.Contains(err.Error(), "pid ") || !strings.Contains(err.Error(), other.Dir) {
		t.Errorf("%v, want one that names %s and the driver of %s", err, flag, other.Dir)
	}
}

func TestLocks_DirectoriesOfAnotherDriverAreRefused(t *testing.T) {
	first, second := testStore(t), testStore(t)
	held, err := first.lockDirs()
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	own := second.Cache
	second.Cache = first.Cache
	_, err = second.lockDirs()
	refusedFor(t, err, "--cache-dir", first)
	second.Dir, second.Cache = first.Dir, own
	_, err = second.lockDirs()
	refusedFor(t, err, "--state-dir", first)
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := second.lockDirs()
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func TestLocks_OverlappingUIDsOfAnotherDriverAreRefused(t *testing.T) {
	first, second := testStore(t), testStore(t)
	dir := t.TempDir() + "/uids"
	lock := func(s *Store, from, to uint32) (*os.File, error) { return s.lockUIDs(t.Context(), dir, from, to) }
	f, err := lock(first, 5000, 5999)
	held := locked(t, f, err)
	for _, r := range [][2]uint32{{5999, 7000}, {5100, 5200}, {4000, 7000}} {
		_, err := lock(second, r[0], r[1])
		refusedFor(t, err, "--uid-range", first)
	}
	for _, r := range [][2]uint32{{6000, 6999}, {4000, 4999}} {
		f, err := lock(second, r[0], r[1])
		locked(t, f, err)
	}
	// Once a driver has exited, its uids are free, in any range.
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	f, err = lock(second, 5500, 5599)
	locked(t, f, err)
	entries, err := os.ReadDir(dir)
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"4000-4999", "5500-5599", "6000-6999"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("%q, %v, want %q", names, err, want)
	}
}
