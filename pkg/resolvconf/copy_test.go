//go:build linux

package resolvconf

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const (
	cluster = "search x.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"
	shorter = "nameserver 10.0.0.1\n"
)

// small is a host in a directory, and the copy of a driver in a container on it.
type small struct {
	*Copy
	t   *testing.T
	dir string
}

func newSmall(t *testing.T) *small {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := &small{t: t, dir: dir}
	for _, d := range []string{"host", "container", "host/run", "host/nscd"} {
		if err := os.Mkdir(s.path(d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s.put("container/resolv.conf", cluster)
	s.put("host/resolv.conf", "nameserver 192.0.2.1\n")
	s.Copy = &Copy{
		ns: host.Own(), dir: s.path("state"), own: s.path("container/resolv.conf"), hosts: s.path("host/resolv.conf"),
		services: []string{s.path("host/resolve"), s.path("host/nscd-link")}, turn: make(chan struct{}, 1),
	}
	return s
}

func (s *small) path(name string) string { return filepath.Join(s.dir, name) }

func (s *small) put(name, content string) {
	s.t.Helper()
	if err := os.WriteFile(s.path(name), []byte(content), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func (s *small) link(to, name string) {
	s.t.Helper()
	_ = os.Remove(s.path(name))
	if err := os.Symlink(to, s.path(name)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *small) must() []Bind {
	s.t.Helper()
	binds, err := s.Binds(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return binds
}

// want fails the test unless the binds are those pairs of names.
func (s *small) want(pairs ...string) {
	s.t.Helper()
	var want []Bind
	for i := 0; i+1 < len(pairs); i += 2 {
		want = append(want, Bind{s.path(pairs[i]), s.path(pairs[i+1])})
	}
	if got := s.must(); !slices.Equal(got, want) {
		s.t.Errorf("%v, want %v", got, want)
	}
}

func TestCopyHidesTheHostsFileAlsoBehindLinks(t *testing.T) {
	s := newSmall(t)
	own := []string{"state/resolv.conf", "state/resolv.conf"}
	s.want(append(own, "state/resolv.conf", "host/resolv.conf")...)

	s.put("host/run/elsewhere.conf", shorter)
	s.link("run/elsewhere.conf", "host/resolv.conf")
	s.want(append(own, "state/resolv.conf", "host/run/elsewhere.conf")...)

	// Services that answer as the host does are hidden.
	s.link("nscd", "host/nscd-link")
	s.want(append(own, "state/resolve", "host/nscd", "state/resolv.conf", "host/run/elsewhere.conf")...)

	// The directory of systemd-resolved has the copy by the names of its own files, also while those are not there.
	if err := os.Mkdir(s.path("host/resolve"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"resolv.conf", "stub-resolv.conf"} {
		s.link(s.path("host/resolve/"+name), "host/resolv.conf")
		s.want(append(own, "state/resolve", "host/resolve", "state/resolve", "host/nscd")...)
		s.put("host/resolve/"+name, shorter)
		s.want(append(own, "state/resolve", "host/resolve", "state/resolve", "host/nscd")...)
	}
	s.put("host/resolve/another.conf", shorter)
	s.link("resolve/another.conf", "host/resolv.conf")
	if _, err := s.Binds(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestHostWithoutResolvConfIsRefused(t *testing.T) {
	s := newSmall(t)
	for _, to := range []string{"nowhere.conf", "/nowhere/resolv.conf", "resolv.conf", "run"} {
		s.link(to, "host/resolv.conf")
		if _, err := s.Binds(t.Context()); !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "the host") {
			t.Errorf("a link to %s: %v", to, err)
		}
	}
	_ = os.Remove(s.path("host/resolv.conf"))
	if _, err := s.Binds(t.Context()); !fault.Is(err, fault.Precondition) {
		t.Errorf("nothing: %v", err)
	}
}

func TestCopyIsUpdatedInPlaceUnderAllItsNames(t *testing.T) {
	s := newSmall(t)
	s.must()
	names := []string{"state/resolv.conf", "state/resolve/resolv.conf", "state/resolve/stub-resolv.conf"}
	var before []os.FileInfo
	for _, name := range names {
		fi, err := os.Lstat(s.path(name))
		if err != nil || fi.Mode() != 0o644 {
			t.Fatalf("%s: %v, %v", name, fi.Mode(), err)
		}
		before = append(before, fi)
	}
	for _, content := range []string{shorter, cluster + "# longer\n", shorter} {
		s.put("container/resolv.conf", content)
		s.must()
		for i, name := range names {
			now, err := os.Lstat(s.path(name))
			if err != nil || !os.SameFile(before[i], now) {
				t.Errorf("%s is another file, %v", name, err)
			}
			if got, _ := os.ReadFile(s.path(name)); string(got) != content {
				t.Errorf("%s: %q, want %q", name, got, content)
			}
		}
	}
	// A removed file is made again.
	for _, name := range names {
		if err := os.Remove(s.path(name)); err != nil {
			t.Fatal(err)
		}
		s.must()
		for _, name := range names {
			if got, _ := os.ReadFile(s.path(name)); string(got) != shorter {
				t.Errorf("%s: %q", name, got)
			}
		}
	}
	if fi, err := os.Stat(s.path("state")); err != nil || fi.Mode().Perm() != 0o711 {
		t.Errorf("the state directory: %v, %v", fi.Mode(), err)
	}
}

// A file without a server would send its reader to localhost. A reader that saw a mixture must notice that the file has changed.
func TestCopyIsNeverEmptyWhileItChangesAndAMixtureIsReadAgain(t *testing.T) {
	s := newSmall(t)
	s.must()
	file := s.path("state/resolv.conf")
	modified := func() time.Time {
		fi, err := os.Stat(file)
		if err != nil {
			t.Error(err)
			return time.Time{}
		}
		return fi.ModTime()
	}
	mixtures, reads := map[time.Time]string{}, 0 // by the file's time before the reading
	var mu sync.Mutex
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			at := modified() // as resolvers do: first the time, then the content
			content, err := os.ReadFile(file)
			if err != nil || len(Parse(content).Nameservers) == 0 {
				t.Errorf("%q, %v", content, err)
				return
			}
			if got := strings.TrimRight(string(content), "\n") + "\n"; got != shorter && got != cluster {
				mu.Lock()
				mixtures[at] = string(content)
				mu.Unlock()
			}
			reads++
		}
	})
	// A reader in a tight loop sees states that a resolver hardly ever sees.
	open, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	wg.Go(func() {
		for buf := make([]byte, 4096); ; {
			select {
			case <-done:
				return
			default:
			}
			if n, err := open.ReadAt(buf, 0); !bytes.Contains(buf[:n], []byte("nameserver ")) {
				t.Errorf("%q, %v", buf[:n], err)
				return
			}
		}
	})
	for i := range 100 {
		s.put("container/new", []string{shorter, cluster}[i%2])
		if err := os.Rename(s.path("container/new"), s.path("container/resolv.conf")); err != nil {
			t.Fatal(err)
		}
		s.must()
		now := modified()
		mu.Lock()
		if content, ok := mixtures[now]; ok {
			t.Errorf("a reader of %q takes it for the current content", content)
		}
		mu.Unlock()
	}
	close(done)
	wg.Wait()
	t.Logf("%d reads, %d mixtures", reads, len(mixtures))
}

// Many pods start at once on a node that has just booted.
func TestConcurrentFirstCallsMakeTheCopy(t *testing.T) {
	s := newSmall(t)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := s.Binds(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestUnusableFileKeepsTheEarlierCopy(t *testing.T) {
	s := newSmall(t)
	for _, content := range []string{"", "search nowhere\n", "nameserver 10.0.0.1\n" + strings.Repeat("#\n", maxBytes)} {
		s.put("container/resolv.conf", content)
		if _, err := s.Binds(t.Context()); err == nil || !strings.Contains(err.Error(), "driver's own") {
			t.Errorf("%.20q: %v", content, err)
		}
	}
	s.put("container/resolv.conf", cluster)
	s.must()
	s.put("container/resolv.conf", "")
	s.must()
	if got, _ := os.ReadFile(s.path("state/resolv.conf")); string(got) != cluster {
		t.Errorf("%q", got)
	}
}

func TestRefresherNoticesThatTheHostsFileWasReplaced(t *testing.T) {
	s := newSmall(t)
	state := ""
	refresh := func() string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var err error
		if state, err = s.refreshHelpers(ctx, state); err != nil {
			t.Fatal(err)
		}
		return state
	}
	first := refresh()
	if again := refresh(); first == "" || again != first {
		t.Errorf("nothing changed: %q, %q", first, again)
	}
	s.put("host/new", "nameserver 192.0.2.1\n")
	if err := os.Rename(s.path("host/new"), s.path("host/resolv.conf")); err != nil {
		t.Fatal(err)
	}
	if again := refresh(); again == first {
		t.Errorf("the replaced file was not noticed: %q", again)
	}
}
