//go:build linux

package mountpoint

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// notEmpty is the error of rmdir(2) for a directory with objects.
func notEmpty() syscall.Errno {
	if isOwn() {
		return syscall.ENOTEMPTY
	}
	return syscall.EPERM
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestAMountDoesWhatTheDriverNeeds(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/there/old.txt", "old")
	b.put(t, "elsewhere/x", "not ours")
	m := mount(t, b.invocation(t), b.keys, nil)

	t.Run("places and owners", func(t *testing.T) {
		if got := names(t, m.dir); !slices.Equal(got, []string{"there"}) {
			t.Errorf("the root has %q", got)
		}
		var st unix.Stat_t
		if err := unix.Stat(m.at("there/old.txt"), &st); err != nil || st.Uid != 1234 || st.Gid != 5678 || st.Mode != unix.S_IFREG|0o640 || st.Size != 3 {
			t.Errorf("a file is %o %d:%d, %d bytes, %v", st.Mode, st.Uid, st.Gid, st.Size, err)
		}
		if err := unix.Stat(m.at("there"), &st); err != nil || st.Uid != 1234 || st.Mode != unix.S_IFDIR|0o750 {
			t.Errorf("a directory is %o %d:%d, %v", st.Mode, st.Uid, st.Gid, err)
		}
		_, err := os.Stat(m.at("missing"))
		want(t, "stat of what is missing", err, syscall.ENOENT)
	})
	t.Run("a file is stored when close returns", func(t *testing.T) {
		large := make([]byte, 20<<20+123)
		_, _ = rand.Read(large)
		for name, content := range map[string][]byte{"new.txt": []byte("new"), "large": large, "empty": nil} {
			want(t, "write of "+name, os.WriteFile(m.at(name), content, 0o600), 0)
			got, ok := b.get(t, "volume/"+name)
			for end := time.Now().Add(5 * time.Second); !isOwn() && name == "empty" && !ok && time.Now().Before(end); got, ok = b.get(t, "volume/"+name) {
				time.Sleep(10 * time.Millisecond) // stored after the close
			}
			if !ok || !bytes.Equal(got, content) {
				t.Errorf("%s is stored with %d bytes, %v", name, len(got), ok)
			}
			got, err := os.ReadFile(m.at(name))
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("%s is read with %d bytes, %v", name, len(got), err)
			}
		}
		f, err := os.Open(m.at("large"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		part := make([]byte, 1000)
		if _, err := f.ReadAt(part, 15<<20); err != nil || !bytes.Equal(part, large[15<<20:15<<20+1000]) {
			t.Errorf("a read in the middle is wrong: %v", err)
		}
		want(t, "replacing a file that is being read", overwrite(m.at("large"), "x"), syscall.EPERM)
	})
	t.Run("files are replaced and removed", func(t *testing.T) {
		want(t, "overwrite", overwrite(m.at("new.txt"), "newer"), 0)
		if got, _ := b.get(t, "volume/new.txt"); string(got) != "newer" {
			t.Errorf("the replaced object has %q", got)
		}
		want(t, "remove", os.Remove(m.at("there/old.txt")), 0)
		if _, ok := b.get(t, "volume/there/old.txt"); ok {
			t.Error("the removed object is there")
		}
	})
	t.Run("a file has one writer and is invisible until it is closed", func(t *testing.T) {
		w, err := os.OpenFile(m.at("slow"), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.WriteString("12345")
		want(t, "write", err, 0)
		_, err = os.Open(m.at("slow"))
		want(t, "open of a file that is being written", err, syscall.EPERM)
		want(t, "removing it", os.Remove(m.at("slow")), syscall.EPERM)
		if _, ok := b.get(t, "volume/slow"); ok {
			t.Error("the object is there before the close")
		}
		want(t, "close", w.Close(), 0)
	})
	t.Run("a write out of order fails the file", func(t *testing.T) {
		w, err := os.Create(m.at("gap"))
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.WriteString("12345")
		want(t, "write", err, 0)
		_, err = w.WriteAt([]byte("x"), 100)
		want(t, "write with a gap", err, syscall.EINVAL)
		_, err = os.Stat(m.at("gap"))
		want(t, "stat after it", err, syscall.ENOENT)
		want(t, "close after it", w.Close(), syscall.EINVAL)
	})
	t.Run("what S3 cannot do is refused", func(t *testing.T) {
		_, err := os.OpenFile(m.at("new.txt"), os.O_WRONLY|os.O_APPEND, 0)
		want(t, "append", err, syscall.EPERM)
		want(t, "symlink", os.Symlink("a", m.at("link")), syscall.EPERM)
		want(t, "chmod", os.Chmod(m.at("new.txt"), 0o600), syscall.EPERM)
	})
	t.Run("directories are local until they have a file", func(t *testing.T) {
		want(t, "mkdir", os.Mkdir(m.at("d"), 0o700), 0)
		want(t, "mkdir again", os.Mkdir(m.at("d"), 0o700), syscall.EEXIST)
		want(t, "rmdir", os.Remove(m.at("d")), 0)
		want(t, "mkdir", os.MkdirAll(m.at("d/e"), 0o700), 0)
		want(t, "write below it", overwrite(m.at("d/e/f"), "f"), 0)
		want(t, "rmdir of one with a file", unix.Rmdir(m.at("d/e")), notEmpty())
		if _, ok := b.get(t, "volume/d/e/f"); !ok {
			t.Error("the file below a new directory is not stored")
		}
		got := slices.DeleteFunc(names(t, m.dir), func(name string) bool { return name == "there" }) // has lost its file
		if !slices.Equal(got, []string{"d", "empty", "large", "new.txt", "slow"}) {
			t.Errorf("the root has %q", got)
		}
	})
	t.Run("a shell's output is stored when its last process closes it", func(t *testing.T) {
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", "(echo one; echo two) > "+m.at("shell")).CombinedOutput(); err != nil {
			t.Errorf("sh: %v: %s", err, out)
		}
		if got, err := os.ReadFile(m.at("shell")); err != nil || string(got) != "one\ntwo\n" {
			t.Errorf("the shell's file has %q, %v", got, err)
		}
	})
	m.unmount(t)
	if b.keys.asked.Load() == 0 {
		t.Error("the credentials endpoint was not asked")
	}
	if got, _ := b.get(t, "elsewhere/x"); string(got) != "not ours" {
		t.Error("an object outside of the prefix changed")
	}
}

func TestOptionsTurnChangesOff(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", "f")
	in := b.invocation(t)
	in.Options = options(t, "allow-delete=false", "--allow-overwrite=false", "--metadata-ttl 1", "memory-target=512", "max-cache-size=100")
	m := mount(t, in, b.keys, nil)
	want(t, "remove", os.Remove(m.at("f")), syscall.EPERM)
	want(t, "overwrite", overwrite(m.at("f"), "x"), syscall.EPERM)
	want(t, "write of a new file", overwrite(m.at("g"), "g"), 0)
	m.unmount(t)
	if got, _ := b.get(t, "volume/f"); string(got) != "f" {
		t.Errorf("the object has %q", got)
	}
}

func TestTheCacheIsEmptiedAtStartAndRemovedAtExit(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", strings.Repeat("f", 3<<20))
	in := b.invocation(t)
	in.Cache, in.CacheSize, in.MemoryLimit = true, 64<<20, 640<<20
	dir := filepath.Join(in.CacheDir, "mountpoint-cache")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "left by a killed client"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, clientUID, clientUID); err != nil {
		t.Fatal(err)
	}
	m := mount(t, in, b.keys, nil)
	for range 2 {
		if got, err := os.ReadFile(m.at("f")); err != nil || len(got) != 3<<20 {
			t.Errorf("read %d bytes, %v", len(got), err)
		}
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the cache's directory is %v, %v", fi, err)
	}
	_, err := os.Stat(filepath.Join(dir, "left by a killed client"))
	want(t, "what was left in the cache", err, syscall.ENOENT)
	// Metadata is cached for a minute, also that a file is missing.
	_, err = os.Stat(m.at("g"))
	want(t, "stat of what is missing", err, syscall.ENOENT)
	want(t, "write", overwrite(m.at("g"), "g"), 0)
	m.unmount(t)
	_, err = os.Stat(dir)
	want(t, "the cache after the mount", err, syscall.ENOENT)
}

func TestAReadOnlyMountReads(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", "f")
	in := b.invocation(t)
	in.ReadOnly = true
	m := mount(t, in, b.keys, nil)
	if got, err := os.ReadFile(m.at("f")); string(got) != "f" {
		t.Errorf("read %q, %v", got, err)
	}
	want(t, "write", overwrite(m.at("g"), "g"), syscall.EROFS)
	m.unmount(t)
}

func TestAWholeBucketIsMounted(t *testing.T) {
	b := newBench(t)
	b.put(t, "a/b", "b")
	in := b.invocation(t)
	in.Prefix = ""
	m := mount(t, in, b.keys, nil)
	if got, err := os.ReadFile(m.at("a/b")); string(got) != "b" {
		t.Errorf("read %q, %v", got, err)
	}
	m.unmount(t)
}

func TestSignalsDoNotEndTheClientBeforeItsMount(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", "f")
	m := mount(t, b.invocation(t), b.keys, nil)
	signals := []syscall.Signal{syscall.SIGTERM}
	if isOwn() {
		signals = append(signals, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
	}
	for _, signal := range signals {
		if err := m.cmd.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-m.exited:
		t.Fatalf("it exited with code %d", m.cmd.ProcessState.ExitCode())
	case <-time.After(2 * time.Second):
	}
	want(t, "write after the signals", overwrite(m.at("g"), "g"), 0)
	if got, err := os.ReadFile(m.at("f")); string(got) != "f" {
		t.Errorf("read %q, %v", got, err)
	}
	if got, _ := b.get(t, "volume/g"); string(got) != "g" {
		t.Errorf("the object has %q", got)
	}
	m.unmount(t)
}

// slowAnswers passes requests on to a service. Uploads arrive there late, and answers about what exists arrive late here.
func slowAnswers(t *testing.T, service string, upload, answer time.Duration) string {
	t.Helper()
	to, err := url.Parse(service)
	if err != nil {
		t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = r.In.Host // which is signed
			if r.In.Method == http.MethodPut || r.In.Method == http.MethodPost {
				time.Sleep(upload)
			}
		},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.Method == http.MethodHead || r.Request.URL.Query().Has("list-type") {
				time.Sleep(answer)
			}
			return nil
		},
	}
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server.URL
}

// A file is released after its close has returned. A rename finds it, also when the service answers the look-up of before that only
// after it.
func TestAFileIsFoundWhileItIsStored(t *testing.T) {
	b := newOwnBench(t)
	const answer = 400 * time.Millisecond
	// The kernel looks up the new name, then the client the old one: meanwhile the file is stored.
	slow := slowAnswers(t, b.server.Endpoint(), answer*3/2, answer)
	m := mount(t, invocation(t, slow, b.server.Region()), b.keys, nil)
	want(t, "write", overwrite(m.at("file"), ""), 0)
	want(t, "rename", unix.Rename(m.at("file"), m.at("new")), 0)
	_, err := os.Stat(m.at("new"))
	want(t, "stat", err, 0)
	m.unmount(t)
}

// The name that the kernel still knows from before the rename leads to the file as well.
func TestARenamedFileIsOpenedAtOnce(t *testing.T) {
	b := newOwnBench(t)
	for delay := 3 * time.Millisecond; delay < 8*time.Millisecond; delay += time.Millisecond { // one of them meets the end of the upload
		slow := slowAnswers(t, b.server.Endpoint(), delay*3/2, delay)
		m := mount(t, invocation(t, slow, b.server.Region()), b.keys, nil)
		for n := range 12 {
			name := fmt.Sprintf("%s-%d", delay, n)
			want(t, "write", overwrite(m.at(name+".tmp"), ""), 0)
			want(t, "rename", unix.Rename(m.at(name+".tmp"), m.at(name)), 0)
			_, err := os.ReadFile(m.at(name))
			want(t, "read", err, 0)
		}
		m.unmount(t)
	}
}

// An unmount drops the release of a file if the client has not read it yet.
func TestAClosedFileIsStoredWithoutItsRelease(t *testing.T) {
	b := newOwnBench(t)
	m := mount(t, b.invocation(t), b.keys, nil)
	fd, err := unix.Open(m.at("file"), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	// A message that is never received is the last that refers to the file: without it, the close would release the file, too.
	socks, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	want(t, "send", unix.Sendmsg(socks[0], []byte{0}, unix.UnixRights(fd), nil, 0), 0)
	// Another process writes it after its opener has closed it, so that its upload ends only after the last close.
	child := exec.CommandContext(t.Context(), "sh", "-c", "read go; echo content >&3")
	child.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), "file")}
	begin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	want(t, "start", child.Start(), 0)
	want(t, "close", child.ExtraFiles[0].Close(), 0)
	want(t, "begin", begin.Close(), 0)
	want(t, "the child", child.Wait(), 0)

	if err := m.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for stat, _ := os.ReadFile(proc(m.cmd.Process.Pid, "stat")); !strings.Contains(string(stat), ") T "); stat, _ = os.ReadFile(proc(m.cmd.Process.Pid, "stat")) {
		time.Sleep(time.Millisecond)
	}
	for _, fd := range socks {
		want(t, "close", unix.Close(fd), 0)
	}
	want(t, "unmount", unix.Unmount(m.dir, 0), 0)
	if err := m.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if code := m.exitCode(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if got, _ := b.get(t, "volume/file"); string(got) != "content\n" {
		t.Errorf("the object has %q", got)
	}
}
