package main

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

const listed = 300

// fill stores files, the modification time of each a day before its upload, and returns their names.
func (s *s3d) fill(prefix string) []string {
	s.t.Helper()
	var names []string
	for i := range listed {
		name := "file-" + strconv.Itoa(1000+i)
		s.putAt(prefix+name, "content", yesterday)
		names = append(names, name)
	}
	return names
}

// yesterday is the modification time of files of fill.
var yesterday = time.Now().Add(-24 * time.Hour).Truncate(time.Millisecond)

// putAt stores a file as rclone does, with its modification time.
func (s *s3d) putAt(key, body string, modified time.Time) {
	s.t.Helper()
	at := strconv.FormatFloat(float64(modified.UnixMilli())/1000, 'f', 3, 64)
	_, err := s.client().PutObject(s.t.Context(), &s3.PutObjectInput{
		Bucket: aws.String(testBucket), Key: &key, Body: strings.NewReader(body), Metadata: map[string]string{"mtime": at},
	})
	check(s.t, err)
}

// heads returns the number of HEAD requests and of others since the last call.
func (f *front) heads() (heads, others int) {
	for _, r := range f.seen() {
		if r.Method == http.MethodHead {
			heads++
		} else {
			others++
		}
	}
	return heads, others
}

// statAll lists the mount's root and then reads the attributes of each file.
func (m *mount) statAll(names []string) map[string]os.FileInfo {
	m.t.Helper()
	entries, err := os.ReadDir(m.dir)
	check(m.t, err)
	if len(entries) != len(names) {
		m.t.Fatalf("%d of %d files are listed", len(entries), len(names))
	}
	all := map[string]os.FileInfo{}
	for _, name := range names {
		fi, err := os.Lstat(filepath.Join(m.dir, name))
		check(m.t, err)
		all[name] = fi
	}
	return all
}

// statAllStopped reports whether all files have attributes while the program is stopped after a listing. On a busy machine the kernel's
// copies may expire before that.
func (m *mount) statAllStopped(names []string) bool {
	m.t.Helper()
	time.Sleep(attrTime + 100*time.Millisecond) // for copies from earlier lookups to expire
	_, err := os.ReadDir(m.dir)
	check(m.t, err)
	check(m.t, m.cmd.Process.Signal(syscall.SIGSTOP))
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for _, name := range names {
			_, _ = os.Lstat(filepath.Join(m.dir, name))
		}
	}()
	ok := false
	select {
	case <-answered:
		ok = true
	case <-time.After(attrTime):
	}
	check(m.t, m.cmd.Process.Signal(syscall.SIGCONT))
	<-answered
	return ok
}

// Files have the names of their objects, whether the service encodes the keys of listings or not.
func TestAListingHasTheNamesOfTheObjects(t *testing.T) {
	t.Parallel()
	for name, start := range services() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t)
			names := []string{"a b", "a+b", "a%20b", "100%", "%zz", "d+r/a+b", "d r/a b"}
			for _, name := range names {
				s.put("vol/"+name, name)
			}
			if name == "minio" { // the other one lists another character
				names = append(names, "a␁b") // as rclone shows it
				s.put("vol/a\x01b", "a␁b")
			}
			m := startMount(t, mountOptions{s3: s, prefix: "vol/"})
			var have []string
			check(t, filepath.WalkDir(m.dir, func(path string, e os.DirEntry, err error) error {
				if err == nil && !e.IsDir() {
					have = append(have, strings.TrimPrefix(path, m.dir+"/"))
				}
				return err
			}))
			slices.Sort(have)
			slices.Sort(names)
			if !slices.Equal(have, names) {
				t.Errorf("%q are listed, want %q", have, names)
			}
			for _, name := range have {
				if content, err := os.ReadFile(m.path(name)); err != nil || string(content) != name {
					t.Errorf("%q has the content %q: %v", name, content, err)
				}
			}
			m.finish()
		})
	}
}

// With the time of the upload, a listing has all attributes, and a stat takes no request.
func TestAListingAnswersTheStatsThatFollow(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	f := startFront(t, s)
	names := s.fill("vol/")
	m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: []string{"--server-mtime", "--dir-cache-time=1h"}})
	f.seen()
	for name, fi := range m.statAll(names) {
		if fi.Size() != int64(len("content")) || fi.Mode() != 0o640 || time.Since(fi.ModTime()) > time.Hour {
			t.Errorf("%s has %d bytes, mode %v and the time %v", name, fi.Size(), fi.Mode(), fi.ModTime())
		}
	}
	if heads, others := f.heads(); heads != 0 || others > 2 {
		t.Errorf("%d HEAD requests and %d others for a listing of one page", heads, others)
	}
	await(t, time.Minute, "stats that the kernel answers", func() bool { return m.statAllStopped(names) })
	// The attributes of files that are being written, and of removed ones, are the mount's own.
	w, err := os.Create(m.path("new"))
	check(t, err)
	_, err = w.WriteString("written")
	check(t, err)
	check(t, os.Remove(m.path(names[0])))
	ino := map[string]os.FileInfo{}
	for range 2 {
		for name, fi := range m.statAll(append(names[1:len(names):len(names)], "new")) {
			if before, ok := ino[name]; ok && !os.SameFile(before, fi) {
				t.Errorf("%s has another inode number", name)
			}
			ino[name] = fi
		}
		if n := ino["new"].Size(); n != int64(len("written")) {
			t.Errorf("the file that is being written has %d bytes", n)
		}
	}
	check(t, w.Close())
	if _, err := os.Lstat(m.path(names[0])); !os.IsNotExist(err) {
		t.Errorf("the removed file: %v", err)
	}
	m.finish()
}

// By default the modification time is the file's, which takes a request for each version of an object, and a plain listing takes
// none.
func TestAModificationTimeIsReadOnce(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	f := startFront(t, s)
	names := s.fill("vol/")
	time.Sleep(settled + time.Second)
	m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: []string{"--dir-cache-time=1s"}})
	f.seen()
	_, err := os.ReadDir(m.dir)
	check(t, err)
	if heads, _ := f.heads(); heads != 0 {
		t.Errorf("%d HEAD requests for a plain listing", heads)
	}
	wantTimes := func(changed map[string]time.Time) {
		t.Helper()
		for name, fi := range m.statAll(names) {
			want := yesterday
			if at, ok := changed[name]; ok {
				want = at
			}
			if !fi.ModTime().Equal(want) {
				t.Errorf("%s has the time %v, want %v", name, fi.ModTime(), want)
			}
		}
	}
	wantTimes(nil)
	if heads, _ := f.heads(); heads != listed {
		t.Errorf("%d HEAD requests for %d files", heads, listed)
	}
	time.Sleep(3 * time.Second) // the directory is listed again
	wantTimes(nil)
	if heads, others := f.heads(); heads != 0 || others == 0 {
		t.Errorf("%d HEAD requests and %d others for the second listing", heads, others)
	}
	earlier := yesterday.Add(-time.Hour)
	s.putAt("vol/"+names[7], "content", earlier)
	time.Sleep(3 * time.Second)
	wantTimes(map[string]time.Time{names[7]: earlier})
	if heads, _ := f.heads(); heads == 0 || heads > 3 {
		t.Errorf("%d HEAD requests for a file that was replaced", heads)
	}
	// A time that is set here shows at once, and after the next listing.
	set := yesterday.Add(-48 * time.Hour)
	check(t, os.Chtimes(m.path(names[9]), set, set))
	want := map[string]time.Time{names[7]: earlier, names[9]: set}
	wantTimes(want)
	time.Sleep(3 * time.Second)
	wantTimes(want)
	m.finish()
}

func TestModificationTimesAreBounded(t *testing.T) {
	var m mtimes
	v := mtime{uploaded: yesterday, modified: yesterday.Add(-time.Hour), size: 7, read: time.Now()}
	for i := range maxMtimes + 10 {
		m.add(strconv.Itoa(i), v)
	}
	if n := len(m.byName); n != maxMtimes {
		t.Errorf("%d are remembered, want %d", n, maxMtimes)
	}
	last := strconv.Itoa(maxMtimes + 9)
	if at, ok := m.get(last, v.uploaded, v.size); !ok || !at.Equal(v.modified) {
		t.Errorf("the last one is %v, %t", at, ok)
	}
	for _, other := range []mtime{{uploaded: yesterday, size: 8}, {uploaded: yesterday.Add(time.Second), size: 7}} {
		if _, ok := m.get(last, other.uploaded, other.size); ok {
			t.Errorf("another version, %+v, has the same time", other)
		}
	}
	m.forget("x")
	v.read = v.read.Add(-maxMtimeAge - time.Second)
	m.add("x", v)
	if _, ok := m.get("x", v.uploaded, v.size); ok {
		t.Error("one that was read long ago is used")
	}
}
