package main

import (
	"bytes"
	"errors"
	"io"
	iofs "io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"
)

func TestServesAPrefixLikeADirectory(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	s.put("vol/old.txt", "old")
	s.put("vol2/other.txt", "other")
	// rclone's environment variables are ignored: these would make the mount read-only, and use another server.
	// Nothing is uploaded before the end, because the server may complete an upload that a removal or rename cancels.
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--write-back=1h"}, env: []string{"RCLONE_READ_ONLY=true", "RCLONE_S3_ENDPOINT=http://127.0.0.1:1", "RCLONE_CONFIG=/nonexistent/x"}})

	names, err := os.ReadDir(m.dir)
	check(t, err)
	if log := m.log(); log != "" {
		t.Errorf("a good start logs %q", log)
	}
	if len(names) != 1 || names[0].Name() != "old.txt" {
		t.Errorf("the root shows %v, want old.txt alone", names)
	}
	check(t, os.Mkdir(m.path("a"), 0o755))
	check(t, os.WriteFile(m.path("a/x"), nil, 0o644))
	check(t, os.MkdirAll(m.path("b/c/d"), 0o755))
	check(t, os.WriteFile(m.path("b/c/d/deep"), []byte("deep"), 0o644))
	wantStat(t, m.dir, 0o750)
	wantStat(t, m.path("a"), 0o750)
	wantStat(t, m.path("a/x"), 0o640)
	wantStat(t, m.path("old.txt"), 0o640)

	t.Run("random writes, appends and overwrites", func(t *testing.T) {
		want := payload(3<<20, 1)
		check(t, os.WriteFile(m.path("random"), want, 0o644))
		f, err := os.OpenFile(m.path("random"), os.O_RDWR, 0)
		check(t, err)
		_, err = f.WriteAt([]byte("middle"), 1<<20)
		check(t, err)
		copy(want[1<<20:], "middle")
		_, err = f.WriteAt([]byte("front"), 0)
		check(t, err)
		copy(want, "front")
		check(t, f.Close())
		appendTo(t, m.path("random"), "end")
		want = append(want, "end"...)
		got, err := os.ReadFile(m.path("random"))
		check(t, err)
		if !bytes.Equal(got, want) {
			t.Error("what is read is not what was written")
		}
		check(t, os.WriteFile(m.path("old.txt"), []byte("new"), 0o644))
		check(t, os.Truncate(m.path("a/x"), 5))
		// Back to the size that the object has in S3, while a longer version waits to be stored.
		check(t, os.WriteFile(m.path("old.txt"), []byte("newer"), 0o644))
		check(t, os.Truncate(m.path("old.txt"), 3))
	})
	t.Run("renames and removals, also of what is not stored yet", func(t *testing.T) {
		check(t, os.WriteFile(m.path("final.tmp"), []byte("saved"), 0o644))
		check(t, os.WriteFile(m.path("final"), []byte("before"), 0o644))
		check(t, os.Rename(m.path("final.tmp"), m.path("final")))
		check(t, os.Rename(m.path("b/c"), m.path("moved")))
		check(t, os.WriteFile(m.path("gone"), []byte("gone"), 0o644))
		check(t, os.Remove(m.path("gone")))
		f, err := os.Create(m.path("unlinked"))
		check(t, err)
		check(t, os.Remove(m.path("unlinked")))
		_, err = f.WriteString("nobody sees this")
		if err != nil {
			t.Logf("writing to an unlinked file: %v", err)
		}
		check(t, f.Close())
	})
	m.finish()

	random, ok := s.get("vol/random")
	if !ok || len(random) != 3<<20+3 || string(random[1<<20:1<<20+6]) != "middle" || string(random[len(random)-3:]) != "end" {
		t.Errorf("random: stored %v, %d bytes", ok, len(random))
	}
	s.want("vol/old.txt", []byte("new"))
	s.want("vol/a/x", make([]byte, 5))
	s.want("vol/final", []byte("saved"))
	s.want("vol/moved/d/deep", []byte("deep"))
	s.want("vol2/other.txt", []byte("other"))
	for _, key := range []string{"vol/gone", "vol/final.tmp", "vol/unlinked", "vol/b/c/d/deep"} {
		if _, ok := s.get(key); ok {
			t.Errorf("%s is stored", key)
		}
	}
	if q := m.reports(); len(q) == 0 || q[len(q)-1] != (queueStatus{}) {
		t.Errorf("queue reports %v, want an empty one at the end", q)
	}
}

func appendTo(t *testing.T, path, data string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	check(t, err)
	_, err = f.WriteString(data)
	check(t, err)
	check(t, f.Close())
}

func wantStat(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	fi, err := os.Stat(path)
	check(t, err)
	st := fi.Sys().(*syscall.Stat_t)
	if fi.Mode().Perm() != mode || st.Uid != 1001 || st.Gid != 1002 {
		t.Errorf("%s is shown as %v %d:%d, want %v 1001:1002", filepath.Base(path), fi.Mode(), st.Uid, st.Gid, mode)
	}
}

func TestExitsOnlyWhenClosedFilesAreStored(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	p := startProxy(t, s.endpoint)
	m := startMount(t, mountOptions{s3: s, url: p.url, prefix: "vol/"})
	p.rate.Store(1 << 20)
	start := time.Now()
	files := map[string][]byte{"one": payload(2<<20, 1), "two": payload(1<<20, 2), "empty": {}}
	for name, data := range files {
		check(t, os.WriteFile(m.path(name), data, 0o644))
	}
	check(t, m.cmd.Process.Signal(syscall.SIGTERM))
	m.unmount()
	if _, ok := s.get("vol/one"); ok {
		t.Errorf("the unmount waited for what is to be stored, %v", time.Since(start))
	}
	check(t, m.cmd.Process.Signal(syscall.SIGTERM))
	check(t, m.cmd.Process.Signal(syscall.SIGINT))
	exited, ok := m.ended(60 * time.Second)
	if !exited || !ok {
		t.Fatalf("ended %v, with 0 %v", exited, ok)
	}
	if took := time.Since(start); took < 2*time.Second {
		t.Errorf("it ended after %v, sooner than the data can have been sent", took)
	}
	for name, data := range files {
		s.want("vol/"+name, data)
	}
	q := m.reports()
	most := queueStatus{}
	for _, r := range q {
		most.Uploads, most.Bytes = max(most.Uploads, r.Uploads), max(most.Bytes, r.Bytes)
	}
	// The empty file can be stored before a report.
	if most.Uploads < 2 || most.Bytes != 3<<20 || q[len(q)-1] != (queueStatus{}) {
		t.Errorf("queue reports %v, want up to 3 MiB in 2 or 3 uploads, and an empty one at the end", q)
	}
}

// A flush stores what is closed and keeps the program running. What the bucket's directories held before is listed again.
func TestASignalFlushesTheQueue(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--write-back=1h", "--dir-cache-time=1h"}})
	files := map[string][]byte{"one": payload(2<<20, 1), "two": payload(1<<10, 2), "empty": {}}
	for name, data := range files {
		check(t, os.WriteFile(m.path(name), data, 0o644))
	}
	if f := m.flush(); f != (flushStatus{}) {
		t.Errorf("flush: %+v", f)
	}
	for name, data := range files {
		s.want("vol/"+name, data)
	}
	_, err := os.ReadDir(m.dir)
	check(t, err)
	s.put("vol/another", "from elsewhere")
	if f := m.flush(); f != (flushStatus{}) {
		t.Errorf("flush of nothing: %+v", f)
	}
	if b, err := os.ReadFile(m.path("another")); err != nil || string(b) != "from elsewhere" {
		t.Errorf("what another writer stored meanwhile: %q, %v", b, err)
	}
	f, err := os.Create(m.path("open"))
	check(t, err)
	_, err = f.WriteString("data")
	check(t, err)
	if f := m.flush(); f != (flushStatus{Unsent: 1}) {
		t.Errorf("flush with an open file: %+v", f)
	}
	check(t, f.Close())
	m.finish()
	s.want("vol/open", []byte("data"))
}

func TestKeepsEverythingWhileS3IsAway(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	part := payload(4<<20, 7)
	s.put("vol/changed", string(part))
	p := startProxy(t, s.endpoint)
	m := startMount(t, mountOptions{s3: s, url: p.url, prefix: "vol/", args: []string{"--write-back=100ms"}})
	_, err := os.ReadDir(m.dir) // it is cached then
	check(t, err)
	f, err := os.OpenFile(m.path("changed"), os.O_RDWR, 0)
	check(t, err)
	_, err = f.WriteAt([]byte("tail"), int64(len(part))-4)
	check(t, err)
	copy(part[len(part)-4:], "tail")
	p.setDown(true)
	if err := f.Close(); err != nil {
		t.Logf("close: %v", err)
	}
	data := payload(1<<20, 9)
	if err := os.WriteFile(m.path("written"), data, 0o644); err != nil {
		t.Logf("write: %v", err)
	}
	m.unmount()
	m.awaitFailedUploads(2)
	p.setDown(false)
	if exited, ok := m.ended(120 * time.Second); !exited || !ok {
		t.Fatalf("after S3 was back: ended %v, with 0 %v", exited, ok)
	}
	s.want("vol/changed", part)
	s.want("vol/written", data)
}

// awaitFailedUploads waits until the program has tried to upload files that often without success. It must not exit.
func (m *mount) awaitFailedUploads(n int) {
	m.t.Helper()
	await(m.t, 60*time.Second, "failed uploads", func() bool { return strings.Count(m.log(), "failed to upload try #") >= n })
	if exited, _ := m.ended(2 * pollDrain); exited {
		m.t.Fatal("it ended with data that is not stored")
	}
}

func TestNeverGivesUpWhenS3Refuses(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	k := s.control("addUser", "reader", scopePolicy("vol/", `"s3:GetObject"`))
	m := startMount(t, mountOptions{s3: s, keys: k, prefix: "vol/", args: []string{"--write-back=100ms"}})
	data := payload(100_000, 3)
	check(t, os.WriteFile(m.path("refused"), data, 0o644))
	m.unmount()
	m.awaitFailedUploads(3)
	if log := m.log(); !strings.Contains(log, "refused") || !strings.Contains(log, "AccessDenied") {
		t.Error("the log does not say what is refused, and how")
	}
	s.control("setPolicy", "reader", scopePolicy("vol/", `"s3:GetObject","s3:PutObject"`))
	if exited, ok := m.ended(60 * time.Second); !exited || !ok {
		t.Fatalf("after it was allowed: ended %v, with 0 %v", exited, ok)
	}
	s.want("vol/refused", data)
}

func TestAChangeThatCannotBeCompletedIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	old := payload(1<<20, 3)
	s.put("vol/old", string(old))
	k := s.control("addUser", "writer", scopePolicy("vol/", `"s3:PutObject"`))
	m := startMount(t, mountOptions{s3: s, keys: k, prefix: "vol/"})
	f, err := os.OpenFile(m.path("old"), os.O_WRONLY, 0)
	check(t, err)
	if _, err := f.WriteAt([]byte("x"), 10); !errors.Is(err, unix.EIO) {
		t.Errorf("a write into a file that cannot be read: %v, want EIO", err)
	}
	_ = f.Close()
	if err := os.Truncate(m.path("old"), 100); !errors.Is(err, unix.EIO) {
		t.Errorf("a truncation of it: %v, want EIO", err)
	}
	s.control("setPolicy", "writer", scopePolicy("vol/", `"s3:PutObject","s3:GetObject"`))
	f, err = os.OpenFile(m.path("old"), os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteAt([]byte("x"), 10)
	check(t, err)
	check(t, f.Close())
	old[10] = 'x'
	m.finish()
	s.want("vol/old", old)
}

func TestWorksWithASessionForItsPrefixAlone(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	k := s.control("addUser", "scoped", scopePolicy("vol/", `"s3:GetObject","s3:PutObject","s3:DeleteObject","s3:AbortMultipartUpload"`))
	m := startMount(t, mountOptions{s3: s, keys: k, prefix: "vol/"})
	names, err := os.ReadDir(m.dir)
	check(t, err)
	if len(names) != 0 {
		t.Errorf("an empty volume shows %v", names)
	}
	data := payload(300<<10, 4)
	check(t, os.MkdirAll(m.path("d/e"), 0o755))
	check(t, os.WriteFile(m.path("d/e/f"), data, 0o644))
	m.finish()
	s.want("vol/d/e/f", data)
}

func TestStoresLargeFilesInParts(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--part-size=5Mi", "--upload-cutoff=8Mi"}})
	data := payload(32<<20, 5) // more parts than are sent at the same time
	check(t, os.WriteFile(m.path("large"), data, 0o644))
	m.finish()
	s.want("vol/large", data)
	head, err := s.client().HeadObject(t.Context(), &s3.HeadObjectInput{Bucket: aws.String(testBucket), Key: aws.String("vol/large"), PartNumber: aws.Int32(1)})
	check(t, err)
	if parts := aws.ToInt32(head.PartsCount); parts != 7 {
		t.Errorf("stored in %d parts, want 7", parts)
	}
}

func TestAKilledProcessLosesNothingThatTheNextOneFindsInItsCache(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	p := startProxy(t, s.endpoint)
	m := startMount(t, mountOptions{s3: s, url: p.url, prefix: "vol/"})
	_, err := os.ReadDir(m.dir) // later, creating a file needs no request
	check(t, err)
	p.setDown(true)
	data := payload(200<<10, 6)
	if err := os.WriteFile(m.path("kept"), data, 0o644); err != nil {
		t.Logf("write: %v", err)
	}
	await(t, 10*time.Second, "the file in the queue", func() bool { return len(m.reports()) > 0 })
	m.kill()
	p.setDown(false)
	again := startMount(t, mountOptions{s3: s, url: p.url, prefix: "vol/", cache: m.cache})
	got, err := os.ReadFile(again.path("kept"))
	check(t, err)
	if !bytes.Equal(got, data) {
		t.Error("the next process shows something else")
	}
	again.finish()
	s.want("vol/kept", data)
}

// Files that the next process has uploaded can be opened afterwards: new files, changed ones, and those in directories that are not
// in S3 yet.
func TestWhatAKilledProcessLeftCanBeOpenedAfterItIsStored(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	s.put("vol/changed", "what it was")
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--write-back=1h"}})
	check(t, os.Mkdir(m.path("dir"), 0o777))
	files := map[string][]byte{"new": payload(200<<10, 6), "changed": []byte("what it is, which is longer"), "dir/new": payload(10, 7)}
	for name, data := range files {
		check(t, os.WriteFile(m.path(name), data, 0o644))
	}
	m.awaitQueue(len(files))
	m.kill()
	again := startMount(t, mountOptions{s3: s, prefix: "vol/", cache: m.cache})
	for _, dir := range []string{"", "dir"} { // lists them before they are uploaded
		_, err := os.ReadDir(again.path(dir))
		check(t, err)
	}
	await(t, 20*time.Second, "the next process to store the files", func() bool {
		r := again.reports()
		return len(r) > 1 && r[len(r)-1].Uploads == 0
	})
	for name, data := range files {
		if got, err := os.ReadFile(again.path(name)); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s has %d bytes of %d, %v", name, len(got), len(data), err)
		}
	}
	again.finish()
	for name, data := range files {
		s.want("vol/"+name, data)
	}
}

// A process that is killed while it writes the metadata of a file leaves an empty metadata file. If the file was only read, nothing
// is logged or quarantined.
func TestAKilledProcessThatOnlyReadAlarmsNobody(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	large, small := payload(20<<20, 3), payload(3000, 4)
	s.put("vol/large", string(large))
	s.put("vol/dir/small", string(small))
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--read-cache"}})
	read := func(m *mount, name string, want []byte) {
		t.Helper()
		f, err := os.Open(m.path(name))
		check(t, err)
		defer f.Close()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(f, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: something else was read, or %v", name, err)
		}
	}
	read(m, "large", large[:5000])
	read(m, "dir/small", small)
	m.kill()
	torn := 0
	check(t, filepath.WalkDir(filepath.Join(m.cache, "vfsMeta"), func(path string, d iofs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		torn++
		return os.Truncate(path, 0)
	}))
	if torn != 2 {
		t.Errorf("%d files are in the cache", torn)
	}
	again := startMount(t, mountOptions{s3: s, prefix: "vol/", cache: m.cache, args: []string{"--read-cache"}})
	read(again, "large", large)
	read(again, "dir/small", small)
	if _, err := os.Lstat(filepath.Join(m.cache, lost)); !errors.Is(err, os.ErrNotExist) || strings.Contains(again.log(), "quarantined") {
		t.Errorf("something was quarantined: %v\n%s", err, again.log())
	}
	again.finish()
}

// The size of the cache limits only uploaded data.
func TestAFullCacheKeepsWhatIsNotStored(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	k := s.control("addUser", "full", scopePolicy("vol/", `"s3:GetObject"`))
	o := mountOptions{s3: s, keys: k, prefix: "vol/", args: []string{"--cache-size=1Mi", "--read-cache", "--write-back=100ms", "--debug"}}
	m := startMount(t, o)
	files := map[string][]byte{}
	for _, name := range []string{"a", "b", "c", "d"} {
		files[name] = payload(1<<20, name[0])
		check(t, os.WriteFile(m.path(name), files[name], 0o644))
	}
	m.awaitQueue(len(files))
	m.kill()

	// The next process reduces the cache to its size when it starts.
	o.cache = m.cache
	again := startMount(t, o)
	await(t, 30*time.Second, "the cache to be cleaned", func() bool { return strings.Contains(again.log(), "vfs cache: cleaned: objects 4 (was 4)") })
	for name, want := range files {
		if got, err := os.ReadFile(again.path(name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	s.control("setPolicy", "full", scopePolicy("vol/", `"s3:GetObject","s3:PutObject"`))
	again.finish()
	for name, want := range files {
		s.want("vol/"+name, want)
	}
}

func TestStrangeNamesAreStoredAndWaitedFor(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	part := payload(1<<20, 8)
	for _, prefix := range []string{"with space/ü ' \" [x] $y *?/", ".hidden/-x/~/", "%41+&#/", "end./ /"} {
		p := startProxy(t, s.endpoint)
		m := startMount(t, mountOptions{s3: s, url: p.url, prefix: prefix})
		name := "naïve [1] %2F+& file "
		check(t, os.MkdirAll(m.path("d é/"), 0o755))
		check(t, os.WriteFile(m.path("d é/"+name), part, 0o644))
		m.finish()
		s.want(prefix+"d é/"+name, part)
	}
}

func TestAnAbortedConnectionStillStoresWhatWasClosed(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	p := startProxy(t, s.endpoint)
	m := startMount(t, mountOptions{s3: s, url: p.url, prefix: "vol/"})
	p.rate.Store(1 << 20)
	data := payload(2<<20, 8)
	check(t, os.WriteFile(m.path("closed"), data, 0o644))
	open, err := os.Create(m.path("open"))
	check(t, err)
	defer open.Close()
	_, err = open.WriteString("so far")
	check(t, err)
	check(t, abort(t, m.dir))
	if exited, ok := m.ended(60 * time.Second); !exited || !ok {
		t.Fatalf("ended %v, with 0 %v", exited, ok)
	}
	s.want("vol/closed", data)
	s.want("vol/open", []byte("so far"))
}

// abort aborts a FUSE connection, as the driver does for an unresponsive mount.
func abort(t *testing.T, dir string) error {
	t.Helper()
	var st unix.Stat_t
	check(t, unix.Stat(dir, &st))
	control := t.TempDir()
	if err := unix.Mount("fusectl", control, "fusectl", 0, ""); err != nil {
		t.Skipf("fusectl cannot be mounted: %v", err)
	}
	defer func() { check(t, unix.Unmount(control, unix.MNT_DETACH)) }()
	return os.WriteFile(filepath.Join(control, strconv.FormatUint(uint64(unix.Minor(st.Dev)), 10), "abort"), []byte("1"), 0)
}

func TestReadOnlyRefusesWritesAndNeedsNoCache(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	s.put("vol/x", "x")
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--read-only"}})
	if err := os.WriteFile(m.path("y"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write: %v, want EROFS", err)
	}
	got, err := os.ReadFile(m.path("x"))
	check(t, err)
	if string(got) != "x" {
		t.Errorf("read %q", got)
	}
	m.finish()
	if left, _ := os.ReadDir(m.cache); len(left) != 0 {
		t.Errorf("the cache directory holds %v", left)
	}
}

func TestDirectoryMarkersKeepEmptyDirectories(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--directory-markers"}})
	check(t, os.Mkdir(m.path("empty"), 0o755))
	m.finish()
	again := startMount(t, mountOptions{s3: s, prefix: "vol/", args: []string{"--directory-markers"}})
	if fi, err := os.Stat(again.path("empty")); err != nil || !fi.IsDir() {
		t.Errorf("the directory is gone: %v", err)
	}
	check(t, os.Remove(again.path("empty")))
	again.finish()
	if _, ok := s.get("vol/empty/"); ok {
		t.Error("the removed directory's marker is still stored")
	}
}

func TestFailsAtOnceOnWhatCannotWork(t *testing.T) {
	if built.skip != "" {
		t.Skip(built.skip)
	}
	cache := t.TempDir()
	cases := map[string]struct {
		args []string
		code int
		want string
	}{
		"no FUSE descriptor":      {[]string{"--bucket=b-b", "--cache-dir=" + cache, "--fuse-fd=77"}, 1, "--fuse-fd 77"},
		"not a FUSE descriptor":   {[]string{"--bucket=b-b", "--cache-dir=" + cache, "--fuse-fd=3"}, 1, "--fuse-fd 3"},
		"unknown flag":            {[]string{"--bucket=b-b", "--rc"}, 2, "rc"},
		"no CA file":              {[]string{"--bucket=b-b", "--cache-dir=" + cache, "--ca-file=/nonexistent"}, 2, "--ca-file"},
		"an argument":             {[]string{"--bucket=b-b", "--cache-dir=" + cache, "x"}, 2, `"x"`},
		"an option of another":    {[]string{"--bucket=b-b", "--cache-dir=" + cache, "--allow-other"}, 2, "allow-other"},
		"version, which is fine":  {[]string{"--version"}, 0, "s3-csi-rclone"},
		"help, which is fine too": {[]string{"--help"}, 0, "--bucket"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			null, err := os.Open(os.DevNull)
			check(t, err)
			defer null.Close()
			out, code := runProgram(t, null, c.args...)
			if code != c.code || !strings.Contains(out, c.want) {
				t.Errorf("exit code %d, output %q, want %d and %q", code, out, c.code, c.want)
			}
		})
	}
}

func runProgram(t *testing.T, fd3 *os.File, args ...string) (output string, code int) {
	t.Helper()
	cmd := exec.Command(built.program, args...)
	cmd.ExtraFiles = []*os.File{fd3}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func scopePolicy(prefix, actions string) string {
	return `{"Version":"2012-10-17","Statement":[
		{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::` + testBucket + `","Condition":{"StringLike":{"s3:prefix":"` + prefix + `*"}}},
		{"Effect":"Allow","Action":[` + actions + `],"Resource":"arn:aws:s3:::` + testBucket + `/` + prefix + `*"}]}`
}
