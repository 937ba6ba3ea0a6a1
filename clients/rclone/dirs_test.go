package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/rclone/rclone/cmd/mount2"
	"github.com/rclone/rclone/cmd/mountlib"
	"github.com/rclone/rclone/fs"
)

// A working directory, and a directory that is mounted by itself, as with subPath, are the directories that their paths show, however
// long ago they were listed.
func TestADirectoryThatIsInUseStaysTheOneOfItsPath(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	s.put("vol/dir/sub/file", "content")
	const cached = 100 * time.Millisecond
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--write-back=1h", "--dir-cache-time=" + cached.String(), "--cache-poll-interval=" + cached.String()}})
	for _, name := range []string{"dir", "dir/sub"} {
		d, err := os.Open(m.path(name))
		check(t, err)
		defer d.Close()
		inside := func(file string) string { return filepath.Join(fmt.Sprintf("/proc/self/fd/%d", d.Fd()), file) }
		for i := range 3 {
			time.Sleep(5 * cached) // listings are old, and forgotten where they can be
			byHandle, byPath := fmt.Sprintf("handle-%d", i), fmt.Sprintf("path-%d", i)
			check(t, os.WriteFile(inside(byHandle), nil, 0o644))
			_, err := os.Stat(m.path(filepath.Join(name, byHandle)))
			check(t, err)
			check(t, os.WriteFile(m.path(filepath.Join(name, byPath)), nil, 0o644))
			_, err = os.Stat(inside(byPath))
			check(t, err)
			check(t, os.Rename(m.path(filepath.Join(name, byPath)), m.path(filepath.Join(name, byPath+"-renamed"))))
			check(t, os.Remove(inside(byPath+"-renamed")))
		}
		var opened, found syscall.Stat_t
		check(t, syscall.Fstat(int(d.Fd()), &opened))
		check(t, syscall.Stat(m.path(name), &found))
		if opened.Ino != found.Ino {
			t.Errorf("%s is inode %d by its path and %d by a descriptor", name, found.Ino, opened.Ino)
		}
	}
}

// A listing that the service answers before an upload ends is older than the upload.
func TestAListingDoesNotReplaceWhatIsUploadedMeanwhile(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	s.put("vol/file", "short")
	f := startFront(t, s)
	m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: []string{"--write-back=1h", "--dir-cache-time=1s"}})
	want := payload(100_000, 1)
	for _, name := range []string{"file", "new"} {
		check(t, os.WriteFile(m.path(name), want, 0o644))
	}
	m.awaitQueue(2)
	answered, pass := make(chan struct{}, 1), make(chan struct{})
	f.set(func(f *front) {
		f.answer = func(r *http.Request) bool {
			if r.URL.Query().Has("list-type") {
				select {
				case answered <- struct{}{}:
				default:
				}
				<-pass
			}
			return true
		}
	})
	time.Sleep(time.Second) // the former listing is old
	listed := make(chan error)
	go func() {
		_, err := os.ReadDir(m.dir)
		listed <- err
	}()
	<-answered
	check(t, m.cmd.Process.Signal(syscall.SIGTERM)) // starts the uploads
	for _, name := range []string{"file", "new"} {
		await(t, 30*time.Second, "the upload of "+name, func() bool {
			got, _ := s.get("vol/" + name)
			return len(got) == len(want)
		})
	}
	time.Sleep(200 * time.Millisecond) // the client has the responses
	close(pass)
	check(t, <-listed)
	for _, name := range []string{"file", "new"} {
		got, err := os.ReadFile(m.path(name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s has %d bytes, %v; want %d", name, len(got), err, len(want))
		}
	}
}

// kernel looks up names in a VFS as the kernel does, and counts listings.
type kernel struct {
	*guard
	t        *testing.T
	fs       fuse.RawFileSystem
	lookups  map[uint64]uint64 // by node
	listings map[string]int
	hold     func(dir string) // before a listing
}

func (k *kernel) List(ctx context.Context, dir string) (fs.DirEntries, error) {
	k.listings[dir]++
	k.hold(dir)
	return k.guard.List(ctx, dir)
}

func newKernel(t *testing.T, keep time.Duration, files ...string) *kernel {
	t.Helper()
	dir := t.TempDir()
	for _, name := range files {
		check(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		check(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	remote := localRemote(t, dir)
	k := &kernel{t: t, lookups: map[uint64]uint64{}, listings: map[string]int{}, hold: func(string) {}, guard: &guard{Fs: remote, features: remote.Features(), dirs: newDirectories(keep)}}
	v, err := newVFS(t.Context(), config{readOnly: true}, k)
	check(t, err)
	t.Cleanup(v.Shutdown)
	root, err := k.dirs.serve(mount2.NewFS(v, &mountlib.Options{}))
	check(t, err)
	k.fs = fusefs.NewNodeFS(root, &fusefs.Options{})
	return k
}

// lookup returns the number of a node.
func (k *kernel) lookup(parent uint64, name string) uint64 {
	k.t.Helper()
	var out fuse.EntryOut
	if status := k.fs.Lookup(nil, &fuse.InHeader{NodeId: parent}, name, &out); !status.Ok() {
		k.t.Fatalf("lookup of %s: %v", name, status)
	}
	k.lookups[out.NodeId]++
	return out.NodeId
}

func (k *kernel) forget(nodes ...uint64) {
	for _, n := range nodes {
		k.fs.Forget(n, k.lookups[n])
		delete(k.lookups, n)
	}
}

func (k *kernel) wantListings(what string, want map[string]int) {
	k.t.Helper()
	if !maps.Equal(k.listings, want) {
		k.t.Errorf("%s: listings %v, want %v", what, k.listings, want)
	}
}

func TestUnusedDirectoriesAreForgottenUnlessTheKernelKnowsASubdirectory(t *testing.T) {
	const root = 1 // FUSE_ROOT_ID
	k := newKernel(t, time.Hour, "a/sub/file", "b/file")
	a, b := k.lookup(root, "a"), k.lookup(root, "b")
	sub := k.lookup(a, "sub")
	first := k.lookup(sub, "file")
	k.lookup(b, "file")
	once := map[string]int{"": 1, "a": 1, "a/sub": 1, "b": 1}
	k.wantListings("at first", once)

	k.dirs.trim(time.Hour) // they are used
	k.lookup(sub, "file")
	k.lookup(b, "file")
	k.wantListings("after a while", once)

	k.dirs.trim(0)
	if k.lookup(root, "a") != a || k.lookup(a, "sub") != sub || k.lookup(root, "b") != b {
		t.Error("a directory that the kernel knows has another node")
	}
	file := k.lookup(sub, "file")
	k.lookup(b, "file")
	want := map[string]int{"": 2, "a": 2, "a/sub": 2, "b": 2} // the parent of a forgotten directory is listed again, too
	k.wantListings("after they were forgotten", want)

	k.forget(first, file, sub)
	k.dirs.trim(0)
	if again := k.lookup(a, "sub"); again == sub {
		t.Error("a directory whose parent was forgotten has the same node")
	}
}

func TestAListingIsUsedForItsTime(t *testing.T) {
	const root = 1
	for _, keep := range []time.Duration{0, 20 * time.Millisecond} {
		k := newKernel(t, keep, "dir/file")
		dir := k.lookup(root, "dir")
		k.lookup(dir, "file")
		time.Sleep(keep)
		k.lookup(dir, "file")
		k.wantListings(keep.String(), map[string]int{"": 1, "dir": 2})
	}
	k := newKernel(t, time.Hour, "dir/file")
	dir := k.lookup(root, "dir")
	k.lookup(dir, "file")
	k.dirs.expire()
	k.lookup(dir, "file")
	k.lookup(dir, "file")
	k.wantListings("expired", map[string]int{"": 1, "dir": 2})
}

// Pods with directories of one volume do not wait for each other's listings.
func TestALongListingHoldsUpNoDirectoryBelow(t *testing.T) {
	const root, keep = 1, 20 * time.Millisecond
	k := newKernel(t, keep, "dir/file")
	dir := k.lookup(root, "dir")
	k.lookup(dir, "file")
	began, pass := make(chan struct{}), make(chan struct{})
	k.hold = func(name string) {
		if name == "" {
			l := k.dirs.listing("") // as that of the service
			defer k.dirs.listed(l)
			close(began)
			<-pass
		}
	}
	time.Sleep(keep)
	listed := make(chan fuse.Status)
	go func() {
		listed <- k.fs.Lookup(nil, &fuse.InHeader{NodeId: root}, "dir", &fuse.EntryOut{})
	}()
	<-began
	found := make(chan fuse.Status)
	go func() {
		found <- k.fs.Lookup(nil, &fuse.InHeader{NodeId: dir}, "file", &fuse.EntryOut{})
	}()
	select {
	case status := <-found:
		if !status.Ok() {
			t.Errorf("lookup below: %v", status)
		}
	case <-time.After(10 * time.Second):
		t.Error("a lookup waits for the listing of a directory above")
	}
	close(pass)
	if status := <-listed; !status.Ok() {
		t.Errorf("lookup of the directory: %v", status)
	}
}
