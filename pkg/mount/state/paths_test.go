package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// wantMode fails the test unless a directory has that mode.
func wantMode(t *testing.T, dir string, mode os.FileMode) {
	t.Helper()
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != mode {
		t.Errorf("%s has mode %v, %v; want %v", dir, fi.Mode(), err, mode)
	}
}

func TestPrepare_ClosesExistingDirectories(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a directory belongs to another user")
	}
	base := t.TempDir()
	s := newStore(host.Own(), Paths{Dir: filepath.Join(base, "state"), Cache: filepath.Join(base, "cache")})
	for _, dir := range []string{s.SourcesDir(), s.publicationsDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(s.SourcesDir(), 7002, 7002); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.prepare(); err != nil {
			t.Fatal(err)
		}
		for dir, mode := range map[string]os.FileMode{
			s.Dir: 0o711, s.Cache: 0o711, s.MountsDir(): 0o711, s.SourcesDir(): 0o700, s.publicationsDir(): 0o700,
		} {
			wantMode(t, dir, mode)
		}
	}
	if uid, err := ownerOf(s.SourcesDir()); err != nil || uid != 0 {
		t.Errorf("the sources are of uid %d, %v", uid, err)
	}
}

// An operator's stricter mode is not widened, and a directory that everybody uses is not the driver's to close.
func TestPrepare_KeepsStricterModesAndRefusesSharedDirectories(t *testing.T) {
	base := t.TempDir()
	s := newStore(host.Own(), Paths{Dir: filepath.Join(base, "state"), Cache: filepath.Join(base, "cache")})
	if err := os.Mkdir(s.Cache, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.prepare(); err != nil {
		t.Fatal(err)
	}
	wantMode(t, s.Cache, 0o700)
	if err := os.Chmod(s.Cache, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if err := s.prepare(); !fault.Is(err, fault.Precondition) {
		t.Errorf("a shared directory: %v", err)
	}
	wantMode(t, s.Cache, 0o777)
}

// What a client put aside has the mode that the client chose, and lies where every user passes.
func TestKeep_ClosesTheDirectory(t *testing.T) {
	s := testStore(t)
	name := strings.Repeat("b", 24) + "-1"
	if err := os.MkdirAll(filepath.Join(s.CacheDir(name), "lost"), 0o755); err != nil {
		t.Fatal(err)
	}
	kept, err := s.Keep(t.Context(), name, "lost")
	if err != nil {
		t.Fatal(err)
	}
	wantMode(t, kept, 0o700)
}
