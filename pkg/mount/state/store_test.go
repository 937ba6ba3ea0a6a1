package state

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// testStore returns an open store without locks.
func testStore(t *testing.T) *Store {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts file systems, and directories of mounts belong to users of their own")
	}
	s := newStore(host.Own(), Paths{Dir: t.TempDir(), Cache: t.TempDir()})
	if err := s.prepare(); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.root, err = os.OpenRoot(s.Dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		entries, _ := os.ReadDir(s.scratch())
		for _, e := range entries {
			_ = unix.Unmount(s.scratchDir(e.Name()), unix.MNT_DETACH)
		}
	})
	return s
}

// Two drivers on one machine that mount the same volume give their mounts different names: by these, copies are told apart.
func TestNextGeneration_DiffersBetweenDrivers(t *testing.T) {
	key := mount.NewSpec(request(), nil).Key()
	names := map[string]bool{}
	for range 20 {
		s := testStore(t)
		g, err := s.nextGeneration(key)
		if err != nil {
			t.Fatal(err)
		}
		name := mount.Name(key, g)
		if names[name] || !mount.ValidName(name) {
			t.Errorf("the name %s: another driver has it, or it is none", name)
		}
		names[name] = true
		if path := len("/") + maxDir - 1 + len(s.Socket(name)) - len(s.Dir); path > 107 {
			t.Errorf("a socket's path would have %d bytes", path)
		}
	}
}

func TestNextGeneration_OnlyGrows(t *testing.T) {
	s := testStore(t)
	key := mount.NewSpec(request(), nil).Key()
	if err := os.Mkdir(s.CacheDir(mount.Name(key, 2)), 0o700); err != nil { // what a reboot left
		t.Fatal(err)
	}
	if err := os.WriteFile(s.Dir+"/generation", []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var got []uint64
	for range 3 {
		g, err := s.nextGeneration(key)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, g)
	}
	if got[0] != 1 || got[1] != 3 || got[2] != 4 {
		t.Errorf("generations %v, want 1 3 4: never one whose cache is still there", got)
	}
	if err := os.WriteFile(s.Dir+"/generation", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.nextGeneration(key); err == nil {
		t.Error("a damaged counter starts again, and old names are used again")
	}
}

func TestSalt_Stays(t *testing.T) {
	s := testStore(t)
	a, err := s.readSalt()
	if err != nil || len(a) != 32 {
		t.Fatal(a, err)
	}
	if b, _ := s.readSalt(); string(a) != string(b) {
		t.Error("each start has another salt: every key changes with it")
	}
}

func TestMounts_RecordsComeBackUnchanged(t *testing.T) {
	s := testStore(t)
	spec := mount.NewSpec(request(), nil)
	r := Mount{Name: mount.Name(spec.Key(), 1), Key: spec.Key(), Generation: 1, Phase: Running, UID: uint32(os.Getuid()), Spec: spec,
		Command: client.Command{Argv: []string{"a"}, Env: []string{"B=c"}}}
	if err := s.Make(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	half := mount.Name(spec.Key(), 2)
	if err := os.Mkdir(s.MountDir(half), 0o700); err != nil {
		t.Fatal(err)
	}
	all, err := s.recordsOf(t.Context(), "")
	if err != nil || len(all) != 1 || all[0].Spec.Encode() != spec.Encode() {
		t.Fatalf("%+v %v", all, err)
	}
	if names, err := s.Names(t.Context()); err != nil || !slices.Contains(names, half) || !slices.Contains(names, r.Name) || len(names) != 2 {
		t.Errorf("names %v, %v", names, err)
	}
	for range 2 {
		if err := s.remove(t.Context(), r.Name); err != nil {
			t.Fatal(err)
		}
	}
	if all, _ := s.recordsOf(t.Context(), ""); len(all) != 0 {
		t.Error("a removed mount has a record")
	}
	if _, err := os.Lstat(s.CacheDir(r.Name)); !os.IsNotExist(err) {
		t.Error("a removed mount has a cache")
	}
}

// A record that cannot be read must never be taken for an absent one: its mount would be started twice or forgotten.
func TestRecords_DamagedOnesAreErrors(t *testing.T) {
	s := testStore(t)
	p := Publication{Target: "/t", VolumeID: "v", Mount: "m"}
	if err := s.Pubs.Write(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := s.Pubs.Get(t.Context(), "/t"); !ok || err != nil || got.VolumeID != "v" {
		t.Fatal(got, ok, err)
	}
	if err := os.WriteFile(filepath.Join(s.Dir, hashed(publicationsDir, "/t")), []byte(`{"target":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Pubs.Get(t.Context(), "/t"); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("error %v", err)
	}
	if _, err := s.Pubs.All(t.Context()); err == nil {
		t.Error("a list that lacks one is given")
	}
	damaged := mount.Name(mount.NewSpec(request(), nil).Key(), 3)
	if err := os.Mkdir(s.MountDir(damaged), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.Dir, recordFile(damaged)), []byte(`{`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.recordsOf(t.Context(), mount.KeyOf(damaged)); !errors.Is(err, ErrDamaged) {
		t.Errorf("a damaged record of the key: %v", err)
	}
	if _, err := s.recordsOf(t.Context(), ""); err != nil {
		t.Errorf("it is in the way of all others: %v", err)
	}
	if err := s.Pubs.Remove(t.Context(), "/t"); err != nil {
		t.Fatal(err)
	}
	if err := s.Pubs.Remove(t.Context(), "/t"); err != nil {
		t.Errorf("removing it twice: %v", err)
	}
}

// A uid that a directory of an earlier mount belongs to is not given to another mount: its client could read what is there,
// and the earlier one's processes, which are found by their uid, would be the other's.
func TestUIDs_IncludeLeftovers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it gives directories to other users")
	}
	s := testStore(t)
	name := mount.Name(mount.NewSpec(request(), nil).Key(), 1)
	for dir, uid := range map[string]int{s.CacheDir("of-a-reboot"): 7001, s.MountDir(name): 0, s.HelperDir(name): 7002} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.Chown(dir, uid, uid)); err != nil {
			t.Fatal(err)
		}
	}
	used, err := s.UIDs(t.Context())
	if err != nil || !used[7001] || !used[7002] {
		t.Errorf("taken: %v, %v", used, err)
	}
}

// What a client put aside for a human does not go with its cache, and nothing else is taken for it.
func TestKeep_QuarantineOutlivesTheCache(t *testing.T) {
	s := testStore(t)
	name := mount.Name(mount.NewSpec(request(), nil).Key(), 1)
	if err := errors.Join(os.Mkdir(s.MountDir(name), 0o700), os.MkdirAll(s.CacheDir(name)+"/lost/dir", 0o700),
		os.WriteFile(s.CacheDir(name)+"/lost/dir/file", []byte("x"), 0o600)); err != nil {
		t.Fatal(err)
	}
	kept, err := s.Keep(t.Context(), name, "lost")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.Keep(t.Context(), name, "lost"); again != "" || err != nil {
		t.Errorf("again: %q, %v", again, err)
	}
	if err := os.Symlink("/", s.CacheDir(name)+"/lost"); err != nil {
		t.Fatal(err)
	}
	if link, err := s.Keep(t.Context(), name, "lost"); link != "" || err != nil {
		t.Errorf("a link: %q, %v", link, err)
	}
	if err := s.remove(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(kept + "/dir/file"); err != nil || string(b) != "x" {
		t.Errorf("kept: %q, %v", b, err)
	}
	if err := errors.Join(os.MkdirAll(s.MountDir(name), 0o700), os.Mkdir(s.CacheDir(name), 0o700)); err != nil {
		t.Fatal(err)
	}
	if left, err := s.OrphanedCaches(t.Context()); err != nil || !slices.Equal(left, []string{kept}) {
		t.Errorf("caches of no mount: %v, %v", left, err)
	}
}

// TestRemove_DeepCacheNeedsFewDescriptors removes and discards caches with more levels than the process may have descriptors.
func TestRemove_DeepCacheNeedsFewDescriptors(t *testing.T) {
	s := testStore(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 64
	for what, remove := range map[string]func(name string) error{
		"mount": func(name string) error { return s.remove(t.Context(), name) },
		"spare": func(name string) error { return s.removeSpare(t.Context(), name) },
	} {
		deep := s.CacheDir(what) + strings.Repeat("/d", 500)
		if err := errors.Join(os.MkdirAll(deep, 0o700), unix.Setrlimit(unix.RLIMIT_NOFILE, &low)); err != nil {
			t.Fatal(err)
		}
		err := remove(what)
		if err := errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := os.Lstat(s.CacheDir(what)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
