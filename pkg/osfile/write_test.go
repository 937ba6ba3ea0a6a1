package osfile_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

func content(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// onlyFile fails the test if the file's directory holds anything else.
func onlyFile(t *testing.T, file string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(entries) != 1 || entries[0].Name() != filepath.Base(file) {
		t.Errorf("the directory holds %v, %v", entries, err)
	}
}

func TestWriteReplacesTheWholeFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	for _, w := range []osfile.Writer{{}, {Durable: true}, {Temp: ".tmp-x"}} {
		for _, want := range []string{"a longer content", "short", ""} {
			if err := w.Write(file, []byte(want)); err != nil {
				t.Fatal(err)
			}
			if got := content(t, file); got != want {
				t.Errorf("%+v: %q, want %q", w, got, want)
			}
			onlyFile(t, file)
		}
	}
}

func TestReadersSeeTheOldContentUntilTheRename(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := (osfile.Writer{}).Write(file, []byte("old")); err != nil {
		t.Fatal(err)
	}
	steps := 0
	w := osfile.Writer{BeforeRename: func() {
		steps++
		if got := content(t, file); got != "old" {
			t.Errorf("a reader sees %q", got)
		}
		if got := content(t, file+osfile.TempSuffix); got != "new" {
			t.Errorf("the temporary file holds %q", got)
		}
	}}
	if err := w.Write(file, []byte("new")); err != nil || steps != 1 || content(t, file) != "new" {
		t.Errorf("after %d steps: %v", steps, err)
	}
}

func TestModeDoesNotDependOnTheUmask(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	file := filepath.Join(t.TempDir(), "file")
	for mode, want := range map[fs.FileMode]fs.FileMode{0: 0o600, 0o755: 0o755, 0o444: 0o444} {
		if err := (osfile.Writer{Mode: mode}).Write(file, nil); err != nil {
			t.Fatal(err)
		}
		if fi, err := os.Stat(file); err != nil || fi.Mode() != want {
			t.Errorf("mode %o: %v, %v", mode, fi.Mode(), err)
		}
	}
}

func TestFailedWriteLeavesTheOldContent(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := (osfile.Writer{}).Write(file, []byte("old")); err != nil {
		t.Fatal(err)
	}
	want := errors.New("cannot fill it")
	err := osfile.Writer{}.WriteFrom(file, func(to io.Writer) error {
		_, err := io.WriteString(to, "half of it")
		return errors.Join(want, err)
	})
	if !errors.Is(err, want) || content(t, file) != "old" {
		t.Errorf("%q, %v", content(t, file), err)
	}
	onlyFile(t, file)
	if err := (osfile.Writer{}).Write(filepath.Join(file, "below"), nil); err == nil {
		t.Errorf("below a file: %v", err)
	}
	if err := (osfile.Writer{}).Write(filepath.Join(filepath.Dir(file), "missing", "file"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in a missing directory: %v", err)
	}
}

func TestLeftoverTemporaryIsNotWrittenThrough(t *testing.T) {
	for what, leave := range map[string]func(target, temp string) error{"a symbolic link": os.Symlink, "a hard link": os.Link} {
		dir := t.TempDir()
		other, file := filepath.Join(t.TempDir(), "other"), filepath.Join(dir, "file")
		if err := errors.Join(os.WriteFile(other, []byte("other"), 0o600), leave(other, file+osfile.TempSuffix)); err != nil {
			t.Fatal(err)
		}
		if err := (osfile.Writer{Mode: 0o644}).Write(file, []byte("new")); err != nil {
			t.Fatal(err)
		}
		if fi, err := os.Stat(other); err != nil || content(t, other) != "other" || fi.Mode() != 0o600 {
			t.Errorf("%s: the other file was changed: %v", what, err)
		}
		onlyFile(t, file)
	}
}
