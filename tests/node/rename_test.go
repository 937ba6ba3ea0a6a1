//go:build !lane || ordinary

package node

import (
	"errors"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// renaming is a volume of the client that is built here, at a node of its own. done unpublishes it.
func renaming(t *testing.T) (e *env, at func(...string) string, done func()) {
	t.Helper()
	own(t)
	e = start(t)
	target := e.publish(static("files", mountpoint), "t")
	at = func(parts ...string) string { return filepath.Join(append([]string{target}, parts...)...) }
	return e, at, func() {
		e.proxy.Set(faultproxy.Faults{})
		e.unpublish(static("files", mountpoint), target)
		e.NothingLeft(t)
	}
}

// stored fails the test if the volume has other objects.
func (e *env) stored(want map[string]string) {
	e.t.Helper()
	keys := e.Keys(e.t, bucket, "files/")
	for name, content := range want {
		if !slices.Contains(keys, "files/"+name) {
			e.t.Errorf("there is no object %q", name)
		} else if got := e.Object(e.t, bucket, "files/"+name); got != content {
			e.t.Errorf("object %q holds %d bytes (%.20q), want %d", name, len(got), got, len(content))
		}
	}
	if len(keys) != len(want) {
		e.t.Errorf("the objects are %q", keys)
	}
}

// Files are renamed by a copy in the service, directories by the programs that get EXDEV.
func TestRenameWithMountpoint(t *testing.T) {
	rigtest.ProcessOnly(t, "renaming is the client's own doing")
	t.Parallel()
	e, at, done := renaming(t)
	defer done()
	big := random(12 << 20)
	want := map[string]string{}
	for from, c := range map[string]struct{ to, content string }{
		"plain":               {"other", "content"},
		"empty":               {"empty too", ""},
		"in parts":            {"dir/in parts", big},
		"per%20cent & b+c=?#": {"dir/ümläut \"'<>\\", "odd"},
		"first":               {"over", "new"},
	} {
		write(t, at(from), c.content)
		if c.to == "over" {
			write(t, at(c.to), "old")
		}
		if err := os.MkdirAll(filepath.Dir(at(c.to)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(at(from), at(c.to)); err != nil {
			t.Errorf("renaming %q to %q: %v", from, c.to, err)
		}
		if got := read(t, at(c.to)); got != c.content {
			t.Errorf("%q reads %d bytes", c.to, len(got))
		}
		if _, err := os.Lstat(at(from)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q is still there: %v", from, err)
		}
		want[c.to] = c.content
	}
	e.stored(want)

	for what, err := range map[string]struct{ got, want error }{
		"a file that does not exist":         {os.Rename(at("nothing"), at("something")), unix.ENOENT},
		"a directory":                        {os.Rename(at("dir"), at("elsewhere")), unix.EXDEV},
		"onto a name that must not be taken": {unix.Renameat2(unix.AT_FDCWD, at("other"), unix.AT_FDCWD, at("over"), unix.RENAME_NOREPLACE), unix.EEXIST},
	} {
		if !errors.Is(err.got, err.want) {
			t.Errorf("renaming %s: %v, want %v", what, err.got, err.want)
		}
	}
	e.stored(want)
	if out, err := exec.CommandContext(t.Context(), "mv", at("dir"), at("moved")).CombinedOutput(); err != nil {
		t.Errorf("mv: %v\n%s", err, out)
	}
	for _, name := range []string{"in parts", "ümläut \"'<>\\"} {
		want["moved/"+name] = want["dir/"+name]
		delete(want, "dir/"+name)
	}
	e.stored(want)
}

// A directory does not vanish with the last file in it: programs that remove trees find it and remove it.
func TestDirectoriesOutliveTheirFilesWithMountpoint(t *testing.T) {
	t.Parallel()
	e, at, done := renaming(t)
	defer done()
	for _, name := range []string{"a/b/c/1", "a/b/2", "a/3", "kept/1", "kept/2"} {
		if err := os.MkdirAll(filepath.Dir(at(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, at(name), name)
	}
	if out, err := exec.CommandContext(t.Context(), "rm", "-r", at("a")).CombinedOutput(); err != nil {
		t.Errorf("rm -r: %v\n%s", err, out)
	}
	if _, err := os.Stat(at("a")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was removed is there: %v", err)
	}
	for _, name := range []string{"kept/1", "kept/2"} {
		if err := os.Remove(at(name)); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(time.Second) // longer than the kernel believes what it knows of the directory
	if names := list(t, at("kept")); len(names) != 0 {
		t.Errorf("the emptied directory has %q", names)
	}
	write(t, at("kept/3"), "again")
	e.stored(map[string]string{"kept/3": "again"})
	if err := os.Remove(at("kept")); err == nil {
		t.Error("a directory with a file is removed")
	}
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", at("kept"), at("copy")).CombinedOutput(); err != nil {
		t.Errorf("cp -a: %v\n%s", err, out)
	}
	e.stored(map[string]string{"kept/3": "again", "copy/3": "again"})
}

func TestRenameIsAnOption(t *testing.T) {
	rigtest.ProcessOnly(t, "renaming is the client's own doing")
	t.Parallel()
	e, _, done := renaming(t)
	defer done()
	v := static("files", mountpoint, "mountOptions", "rename=false")
	target := e.publish(v, "off")
	write(t, filepath.Join(target, "file"), "content")
	if err := os.Rename(filepath.Join(target, "file"), filepath.Join(target, "other")); !errors.Is(err, unix.EXDEV) {
		t.Errorf("it is renamed: %v", err)
	}
	e.stored(map[string]string{"file": "content"})
	e.unpublish(v, target)
}

// Whatever fails, and whatever another writer does, a file has its old name or both, and nothing is lost.
func TestARenameThatFailsLosesNothing(t *testing.T) {
	rigtest.ProcessOnly(t, "renaming is the client's own doing")
	t.Parallel()
	copies := func(r *http.Request) bool { return r.Header.Get("X-Amz-Copy-Source") != "" }
	deletes := func(r *http.Request) bool { return r.Method == http.MethodDelete }
	both := map[string]string{"file": "content", "other": "content"}
	for name, c := range map[string]struct {
		faults func(e *env) faultproxy.Faults
		want   map[string]string
	}{
		"the copy is refused":    {func(*env) faultproxy.Faults { return faultproxy.Faults{Deny: true, Match: copies} }, map[string]string{"file": "content"}},
		"the original must stay": {func(*env) faultproxy.Faults { return faultproxy.Faults{Deny: true, Match: deletes} }, both},
		"another writer replaces it": {func(e *env) faultproxy.Faults {
			return faultproxy.Faults{Deny: true, Match: func(r *http.Request) bool {
				if copies(r) {
					e.Put(e.t, bucket, "files/file", "newer content")
				}
				return false
			}}
		}, map[string]string{"file": "newer content", "other": "newer content"}},
	} {
		t.Run(name, func(t *testing.T) {
			e, at, done := renaming(t)
			defer done()
			write(t, at("file"), "content")
			e.proxy.Set(c.faults(e))
			if err := os.Rename(at("file"), at("other")); err == nil {
				t.Error("no error")
			}
			e.proxy.Set(faultproxy.Faults{})
			e.stored(c.want)
		})
	}
	t.Run("the client exits before it removes the original", func(t *testing.T) {
		e, at, done := renaming(t)
		defer done()
		write(t, at("file"), "content")
		e.proxy.Set(faultproxy.Faults{SlowDown: 1 << 20, Match: deletes}) // the client tries again
		renamed := make(chan error, 1)
		go func() { renamed <- os.Rename(at("file"), at("other")) }()
		e.await(20*time.Second, "the copy", func() bool { return len(e.Keys(t, bucket, "files/other")) == 1 })
		rigtest.Kill(t, e.client(mountpoint))
		if err := <-renamed; err == nil {
			t.Error("no error")
		}
		e.proxy.Set(faultproxy.Faults{})
		e.awaitRead(20*time.Second, at("file"), "content")
		e.stored(both)
	})
}
