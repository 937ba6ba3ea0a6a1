package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

// history reads an object repeatedly until it is stopped, and returns its versions in order.
func history(s *s3d, key string) (stop func() []string) {
	end, result := make(chan struct{}), make(chan []string, 1)
	go func() {
		all := []string{}
		defer func() { result <- all }()
		for {
			version := "(none)"
			if body, ok := s.get(key); ok {
				version = string(body)
			}
			if len(all) == 0 || all[len(all)-1] != version {
				all = append(all, version)
			}
			select {
			case <-end:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return func() []string { close(end); return <-result }
}

// Two mounts write the same file, and responses are slow. rclone's own check after an upload would find the other mount's object,
// delete it and store its own again.
func TestAnUploadNeverRemovesAnotherWritersObject(t *testing.T) {
	eachService(t, func(t *testing.T, s *s3d, args ...string) {
		const latency = 300 * time.Millisecond
		fronts, mounts := []*front{startFront(t, s), startFront(t, s)}, []*mount{}
		for _, f := range fronts {
			mounts = append(mounts, startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: args}))
		}
		for _, f := range fronts {
			f.set(func(f *front) { f.latency = latency })
		}
		for i, gap := range []time.Duration{50 * time.Millisecond, 150 * time.Millisecond, 250 * time.Millisecond, 450 * time.Millisecond, 650 * time.Millisecond} {
			for _, first := range []int{0, 1} {
				name := fmt.Sprintf("file-%d-%d", i, first)
				for _, m := range mounts { // the directory is read, and the file is not there
					_, _ = os.Stat(m.path(name))
				}
				stop := history(s, "vol/"+name)
				check(t, os.WriteFile(mounts[first].path(name), []byte("older"), 0o644))
				holds := func(content string) func() bool {
					return func() bool { b, _ := s.get("vol/" + name); return string(b) == content }
				}
				await(t, 30*time.Second, "the older version", holds("older")) // its answer is still on the way
				time.Sleep(gap)
				check(t, os.WriteFile(mounts[1-first].path(name), []byte("newer, and longer"), 0o644))
				await(t, 30*time.Second, "the newer version", holds("newer, and longer"))
				for _, m := range mounts {
					m.awaitIdle()
				}
				time.Sleep(3 * latency) // what would come after the upload
				versions := slices.DeleteFunc(stop(), func() func(string) bool {
					there := false // the object is absent until it is stored first
					return func(v string) bool { there = there || v != "(none)"; return !there }
				}())
				if slices.Contains(versions, "(none)") {
					t.Errorf("gap %v: the object was absent: %q", gap, versions)
				}
				if i := slices.Index(versions, "newer, and longer"); i < 0 || i != len(versions)-1 {
					t.Errorf("gap %v: the newer version does not stay: %q", gap, versions)
				}
			}
		}
		for _, m := range mounts {
			m.finish()
			if n := m.conflictCount(); n != 0 {
				t.Errorf("%d conflicts among uploads in time", n)
			}
		}
	})
}

// An upload in time takes one request.
func TestAnUploadInTimeAsksNothing(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	f := startFront(t, s)
	m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: []string{"--conditional-writes", "--write-back=100ms"}})
	_, err := os.ReadDir(m.dir)
	check(t, err)
	f.seen()
	for _, content := range []string{"first", "second, which is longer"} {
		check(t, os.WriteFile(m.path("file"), []byte(content), 0o644))
		await(t, 10*time.Second, "the upload", func() bool { b, _ := s.get("vol/file"); return string(b) == content })
	}
	m.finish()
	puts := 0
	for _, r := range f.seen() {
		switch {
		case r.Method == http.MethodPut && r.Header.Get("If-Match")+r.Header.Get("If-None-Match") == "" && r.Header.Get("Content-MD5") != "":
			puts++
		case r.Method == http.MethodHead, r.Method == http.MethodPut:
			t.Errorf("%s %s with %v", r.Method, r.URL, r.Header)
		}
	}
	if puts != 2 {
		t.Errorf("%d uploads of two files", puts)
	}
}

// awaitQueue waits until so many files are in the queue.
func (m *mount) awaitQueue(files int) {
	m.t.Helper()
	await(m.t, 20*time.Second, fmt.Sprintf("%d files in the queue", files), func() bool {
		r := m.reports()
		return len(r) > 0 && r[len(r)-1].Uploads == files
	})
}

// awaitIdle waits until the last report has an empty queue.
func (m *mount) awaitIdle() {
	m.t.Helper()
	time.Sleep(2 * pollQueue) // the last report can be older than the last write
	await(m.t, 20*time.Second, "an empty queue", func() bool { r := m.reports(); return len(r) == 0 || r[len(r)-1].Uploads == 0 })
}

// aside returns the content of the files that were quarantined, by name.
func aside(t *testing.T, cache string) map[string]string {
	t.Helper()
	all := map[string]string{}
	dir := filepath.Join(cache, lost)
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return ignoreGone(err)
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		all[rel] = string(b)
		return err
	})
	check(t, ignoreGone(err))
	return all
}

func wantAside(t *testing.T, m *mount, want map[string]string) {
	t.Helper()
	got := aside(t, m.cache)
	for name, content := range want {
		if got[name] != content {
			t.Errorf("put aside of %s: %q, want %q", name, got[name], content)
		}
		if log := m.log(); !strings.Contains(log, "s3://"+testBucket+"/vol/"+name) || !strings.Contains(log, filepath.Join(m.cache, lost, name)) {
			t.Errorf("the log does not name the object and the file of %s", name)
		}
	}
	if len(got) != len(want) {
		t.Errorf("put aside: %q, want %d files", got, len(want))
	}
	if n := m.conflictCount(); n != int64(len(want)) {
		t.Errorf("%d conflicts are reported, want %d", n, len(want))
	}
}

func (s *s3d) remove(key string) {
	s.t.Helper()
	_, err := s.client().DeleteObject(s.t.Context(), &s3.DeleteObjectInput{Bucket: aws.String(testBucket), Key: &key})
	check(s.t, err)
}

// fileCase is what a test does with a file while S3 is unavailable, and what another writer does meanwhile.
type fileCase struct {
	before, written string
	elsewhere       string // what another writer stores; "-": it removes the object
	conflict        bool
}

func fileCases() map[string]fileCase {
	return map[string]fileCase{
		"changed elsewhere":          {before: "first", written: "older", elsewhere: "newer, of another writer", conflict: true},
		"changed elsewhere in place": {before: "first", written: "older", elsewhere: "other", conflict: true},
		"dir/made elsewhere":         {written: "older", elsewhere: "newer, of another writer", conflict: true},
		"removed elsewhere":          {before: "first", written: "older", elsewhere: "-", conflict: true},
		"same":                       {before: "first", written: "both", elsewhere: "both"},
		"unchanged":                  {before: "first", written: "only here"},
		"new":                        {written: "only here"},
		"dir/empty":                  {before: "first", written: ""},
	}
}

// writeCases writes the files while S3 is unavailable.
func writeCases(t *testing.T, s *s3d, f *front, args []string) *mount {
	t.Helper()
	for name, c := range fileCases() {
		if c.before != "" {
			s.put("vol/"+name, c.before)
		}
	}
	s.put("vol/dir/there", "x")
	m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: args})
	for _, dir := range []string{"", "dir"} { // later, no request is needed
		entries, err := os.ReadDir(m.path(dir))
		check(t, err)
		for _, e := range entries {
			_, err := os.Stat(m.path(filepath.Join(dir, e.Name())))
			check(t, err)
		}
	}
	f.set(func(f *front) { f.down = true })
	for name, c := range fileCases() {
		check(t, os.WriteFile(m.path(name), []byte(c.written), 0o644))
	}
	m.awaitQueue(len(fileCases()))
	return m
}

func changeElsewhere(s *s3d) {
	for name, c := range fileCases() {
		switch c.elsewhere {
		case "":
		case "-":
			s.remove("vol/" + name)
		default:
			s.put("vol/"+name, c.elsewhere)
		}
	}
}

func wantCases(t *testing.T, s *s3d, m *mount) {
	t.Helper()
	kept := map[string]string{}
	for name, c := range fileCases() {
		want := c.written
		if c.conflict {
			want, kept[name] = c.elsewhere, c.written
		}
		got, ok := s.get("vol/" + name)
		if want == "-" {
			if ok {
				t.Errorf("%s is stored again: %q", name, got)
			}
		} else if string(got) != want || !ok {
			t.Errorf("%s is %q (%t), want %q", name, got, ok, want)
		}
	}
	wantAside(t, m, kept)
}

// A process is killed with its node. Other writers store objects before the next process uses its cache.
func TestWhatAnEarlierProcessLeftDoesNotReplaceNewerObjects(t *testing.T) {
	eachService(t, func(t *testing.T, s *s3d, args ...string) {
		f := startFront(t, s)
		m := writeCases(t, s, f, args)
		m.kill()
		changeElsewhere(s)
		f.set(func(f *front) { f.down = false })
		again := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", cache: m.cache, args: append(args, "--dir-cache-time=1s")})
		await(t, 30*time.Second, "the conflicts", func() bool { return again.conflictCount() == 4 })
		for name, c := range fileCases() { // the mount shows the newer version
			want := c.written
			if c.conflict {
				want = c.elsewhere
			}
			var got []byte
			await(t, 30*time.Second, name+" to read as it is in S3", func() bool {
				var err error
				got, err = os.ReadFile(again.path(name))
				return err == nil && string(got) == want || want == "-" && os.IsNotExist(err)
			})
		}
		again.finish()
		wantCases(t, s, again)
	})
}

// A mount drains while S3 is unavailable for longer than ten seconds. Other writers store objects meanwhile.
func TestALateUploadDoesNotReplaceNewerObjects(t *testing.T) {
	eachService(t, func(t *testing.T, s *s3d, args ...string) {
		f := startFront(t, s)
		m := writeCases(t, s, f, args)
		closed := time.Now()
		m.unmount()
		changeElsewhere(s)
		time.Sleep(time.Until(closed.Add(lateAfter + time.Second)))
		f.set(func(f *front) { f.down = false })
		if exited, ok := m.ended(90 * time.Second); !exited || !ok {
			t.Fatalf("ended %v, with 0 %v", exited, ok)
		}
		wantCases(t, s, m)
	})
}

// A mount has no conflicts with its own objects, however late an upload is: of files that were replaced by renaming, whose responses
// were lost, or that were changed again.
func TestAWritersOwnObjectsAreNoConflict(t *testing.T) {
	eachService(t, func(t *testing.T, s *s3d, args ...string) {
		s.put("vol/replaced", "first")
		f := startFront(t, s)
		m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: append(args, "--dir-cache-time=1h")})
		_, err := os.ReadDir(m.dir)
		check(t, err)
		check(t, os.WriteFile(m.path("repeated"), []byte("1"), 0o644))
		await(t, 10*time.Second, "the first version", func() bool { b, _ := s.get("vol/repeated"); return string(b) == "1" })
		m.awaitIdle()
		time.Sleep(1100 * time.Millisecond) // objects are dated to the second

		lose := func(r *http.Request) bool { return r.Method != http.MethodPut }
		f.set(func(f *front) { f.answer = lose })
		check(t, os.WriteFile(m.path("lost"), []byte("its answer is lost"), 0o644))
		check(t, os.WriteFile(m.path("lost and changed"), []byte("its answer is lost"), 0o644))
		for _, name := range []string{"lost", "lost and changed"} {
			await(t, 20*time.Second, name, func() bool { _, ok := s.get("vol/" + name); return ok })
		}
		f.set(func(f *front) { f.down = true })
		check(t, os.WriteFile(m.path("lost and changed"), []byte("and then it is changed"), 0o644))
		check(t, os.WriteFile(m.path("repeated"), []byte("2, longer"), 0o644))
		check(t, os.WriteFile(m.path("replaced.tmp"), []byte("as a whole"), 0o644))
		check(t, os.Rename(m.path("replaced.tmp"), m.path("replaced")))
		m.awaitQueue(4)
		closed := time.Now()
		time.Sleep(time.Until(closed.Add(lateAfter + time.Second)))
		f.set(func(f *front) { f.down, f.answer = false, nil })
		m.finish()
		for name, want := range map[string]string{
			"repeated": "2, longer", "lost": "its answer is lost", "lost and changed": "and then it is changed", "replaced": "as a whole",
		} {
			if got, _ := s.get("vol/" + name); string(got) != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		if n := m.conflictCount(); n != 0 || len(aside(t, m.cache)) != 0 {
			t.Errorf("%d conflicts with itself: %q", n, aside(t, m.cache))
		}
	})
}

// A process is killed after S3 has stored its upload, but before it received the response.
func TestWhatAKilledProcessHadStoredIsNoConflict(t *testing.T) {
	eachService(t, func(t *testing.T, s *s3d, args ...string) {
		s.put("vol/changed", "first")
		f := startFront(t, s)
		m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: args})
		_, err := os.ReadDir(m.dir)
		check(t, err)
		f.set(func(f *front) { f.answer = func(r *http.Request) bool { return r.Method != http.MethodPut } })
		for _, name := range []string{"changed", "new"} {
			check(t, os.WriteFile(m.path(name), []byte("written"), 0o644))
			await(t, 20*time.Second, name, func() bool { b, _ := s.get("vol/" + name); return string(b) == "written" })
		}
		m.kill()
		f.set(func(f *front) { f.answer = nil })
		again := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", cache: m.cache, args: args})
		again.finish()
		wantAside(t, again, nil)
		s.want("vol/changed", []byte("written"))
		s.want("vol/new", []byte("written"))
	})
}

// Another writer stores an object between the HEAD request of a late upload and the upload itself.
func TestAConditionCatchesWhatComesInBetween(t *testing.T) {
	for name, start := range services() {
		for size, method := range map[int]string{100: http.MethodPut, 12 << 20: http.MethodPost} { // in one request, and in parts
			t.Run(fmt.Sprintf("%s/%d", name, size), func(t *testing.T) {
				t.Parallel()
				s := start(t)
				s.put("vol/there", "first")
				f := startFront(t, s)
				args := []string{"--conditional-writes", "--upload-cutoff=8Mi"}
				m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: append(args, "--write-back=1h")})
				data := payload(size, 3)
				for _, name := range []string{"there", "new"} {
					check(t, os.WriteFile(m.path(name), data, 0o644))
				}
				m.awaitQueue(2)
				m.kill()
				begun := map[string]string{} // method of the first request, by name
				f.set(func(f *front) {
					f.refuse = func(_ http.ResponseWriter, r *http.Request) bool { // when the upload begins, after the HEAD request
						name := filepath.Base(r.URL.Path)
						f.mu.Lock()
						defer f.mu.Unlock()
						if (r.Method == http.MethodPut || r.Method == http.MethodPost) && begun[name] == "" {
							begun[name] = r.Method
							s.put("vol/"+name, "newer, of another writer")
						}
						return false
					}
				})
				again := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", cache: m.cache, args: args})
				again.finish()
				for _, name := range []string{"there", "new"} {
					if begun[name] != method {
						t.Errorf("%s: the upload began with %s, want %s", name, begun[name], method)
					}
					s.want("vol/"+name, []byte("newer, of another writer"))
					if kept, err := os.ReadFile(filepath.Join(again.cache, lost, name)); err != nil || !bytes.Equal(kept, data) {
						t.Errorf("put aside of %s: %d bytes, %v", name, len(kept), err)
					}
				}
				if n := again.conflictCount(); n != 2 {
					t.Errorf("%d conflicts, want 2", n)
				}
			})
		}
	}
}

// Some services reject unknown headers.
func TestAServiceThatRefusesConditionsGetsLateUploadsWithoutThem(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	f := startFront(t, s)
	args := []string{"--conditional-writes"}
	m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: append(args, "--write-back=1h")})
	check(t, os.WriteFile(m.path("file"), []byte("written"), 0o644))
	m.awaitQueue(1)
	m.kill()
	f.set(func(f *front) {
		f.refuse = func(w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("If-Match")+r.Header.Get("If-None-Match") == "" {
				return false
			}
			w.WriteHeader(http.StatusNotImplemented)
			return true
		}
	})
	again := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", cache: m.cache, args: args})
	again.finish()
	s.want("vol/file", []byte("written"))
}
