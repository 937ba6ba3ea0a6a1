package programs

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// here is a host that the test is on itself.
type here struct{}

func (here) Do(_ context.Context, _ string, fn func() error) error { return fn() }

// installer is what envInstall makes of the test binary: a driver that installs programs again and again.
const envInstall = "S3CSI_TEST_INSTALL"

func TestMain(m *testing.M) {
	if files := os.Getenv(envInstall); files != "" {
		for {
			o := Options{Dir: os.Args[1], DriverName: "d", Version: "1", Files: strings.Split(files, ":")}
			i, err := Install(context.Background(), here{}, o)
			if err == nil {
				err = errors.Join(os.RemoveAll(i.Dir), i.Close())
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
	}
	os.Exit(m.Run())
}

// place is a directory of the host for a test, and programs to install.
type place struct {
	t   *testing.T
	dir string
	Options
}

func newPlace(t *testing.T, contents ...string) *place {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: programs on the host are root's")
	}
	dir, err := os.MkdirTemp("", "programs-") //nolint:usetesting // other users must be able to pass
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &place{t: t, dir: dir, Options: Options{Dir: filepath.Join(dir, "opt", "s3-csi"), DriverName: "s3.csi.driver", Version: "v1.2.3"}}
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "image"), 0o700)); err != nil {
		t.Fatal(err)
	}
	for i, c := range contents {
		path := filepath.Join(dir, "image", fmt.Sprintf("program-%d", i+1))
		p.write(path, c)
		p.Files = append(p.Files, path)
	}
	return p
}

func (p *place) write(path, content string) {
	p.t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
		p.t.Fatal(err)
	}
}

func (p *place) install() Installed {
	p.t.Helper()
	i, err := Install(bounded(p.t), here{}, p.Options)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = i.Close() })
	return i
}

func (p *place) versions() []string {
	p.t.Helper()
	entries, err := os.ReadDir(filepath.Join(p.Dir, p.DriverName))
	if err != nil {
		p.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// program fails the test if a file is not one that root alone can change and everybody can run.
func (p *place) program(path, content string) {
	p.t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		p.t.Fatal(err)
	}
	if st.Mode != unix.S_IFREG|0o755 || st.Uid != 0 || st.Nlink != 1 || read(p.t, path) != content {
		p.t.Errorf("%s: mode %o, owner %d, %d links, content %q", path, st.Mode, st.Uid, st.Nlink, read(p.t, path))
	}
}

func TestProgramsAreInstalledOnce(t *testing.T) {
	p := newPlace(t, "one", "two")
	defer unix.Umask(unix.Umask(0o077)) // as of a careful container
	first := p.install()
	p.program(first.Path("program-1"), "one")
	p.program(first.Path("program-2"), "two")
	for dir, mode := range map[string]os.FileMode{filepath.Dir(p.Dir): 0o755, p.Dir: 0o711, filepath.Dir(first.Dir): 0o711, first.Dir: 0o711} {
		if fi, err := os.Stat(dir); err != nil || fi.Mode() != os.ModeDir|mode {
			t.Errorf("%s: %v %v", dir, fi.Mode(), err)
		}
	}
	if !strings.HasPrefix(first.Dir, p.Dir+"/s3.csi.driver/v1.2.3-") {
		t.Errorf("it is %s", first.Dir)
	}
	was := inode(t, first.Path("program-1"))
	if again := p.install(); again.Dir != first.Dir || inode(t, first.Path("program-1")) != was {
		t.Errorf("the same programs were installed again, in %s", again.Dir)
	}
	p.write(p.Files[1], "TWO")
	second := p.install()
	if second.Dir == first.Dir {
		t.Error("another program of the same version is in the same directory")
	}
	p.program(first.Path("program-2"), "two")
	p.program(second.Path("program-2"), "TWO")
}

func TestOnlyRootReadsClosedPrograms(t *testing.T) {
	p := newPlace(t, "one", "two")
	p.Closed = p.Files[1:]
	first := p.install()
	p.program(first.Path("program-1"), "one")
	path := first.Path("program-2")
	mode := func() os.FileMode {
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return fi.Mode()
	}
	if got := mode(); got != 0o711 || read(t, path) != "two" {
		t.Errorf("mode %o", got)
	}
	was := inode(t, path)
	if again := p.install(); again.Dir != first.Dir || inode(t, path) != was {
		t.Error("it was installed again")
	}
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if p.install(); mode() != 0o711 {
		t.Errorf("a program that others could read stays readable: mode %o", mode())
	}
	p.Closed = nil
	if open := p.install(); open.Dir == first.Dir {
		t.Error("a driver that does not close it would open it")
	}
}

func TestDamageIsRepairedAndRunningProgramsAreNotWrittenTo(t *testing.T) {
	for what, damage := range map[string]func(path string) error{
		"changed":       func(path string) error { return os.WriteFile(path, []byte("0ne"), 0o755) },
		"cut":           func(path string) error { return os.Truncate(path, 1) },
		"longer":        func(path string) error { return os.Truncate(path, 100) },
		"missing":       os.Remove,
		"forbidden":     func(path string) error { return os.Chmod(path, 0o644) },
		"open":          func(path string) error { return os.Chmod(path, 0o777) },
		"setuid":        func(path string) error { return os.Chmod(path, 0o755|os.ModeSetuid) },
		"another's":     func(path string) error { return os.Chown(path, 1000, 0) },
		"second name":   func(path string) error { return os.Link(path, path+".link") },
		"symbolic link": func(path string) error { return errors.Join(os.Remove(path), os.Symlink("/bin/sh", path)) },
		"pipe":          func(path string) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o755)) },
		"half-made": func(path string) error {
			return os.WriteFile(filepath.Join(filepath.Dir(path), tempPrefix+"123"), []byte("x"), 0o600)
		},
		"closed directory": func(path string) error { return os.Chmod(filepath.Dir(path), 0o700) },
	} {
		t.Run(what, func(t *testing.T) {
			p := newPlace(t, "one")
			path := p.install().Path("program-1")
			old, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer old.Close()
			if err := damage(path); err != nil {
				t.Fatal(err)
			}
			before, err := io.ReadAll(old)
			if err != nil {
				t.Fatal(err)
			}
			p.install()
			p.program(path, "one")
			if fi, err := os.Stat(filepath.Dir(path)); err != nil || fi.Mode() != os.ModeDir|0o711 {
				t.Errorf("the directory: %v %v", fi.Mode(), err)
			}
			after, err := io.ReadAll(io.NewSectionReader(old, 0, 1000))
			if err != nil || string(after) != string(before) {
				t.Errorf("the file that was there had %q and has %q (%v)", before, after, err)
			}
			if temps, _ := filepath.Glob(filepath.Join(filepath.Dir(path), tempPrefix+"*")); len(temps) > 0 {
				t.Errorf("left: %v", temps)
			}
		})
	}
}

func TestUnsuitableDirectoriesAreRefused(t *testing.T) {
	for what, c := range map[string]struct {
		change func(*place) error
		words  string
	}{
		"relative":        {func(p *place) error { p.Dir = "opt"; return nil }, "not an absolute path"},
		"hidden":          {func(p *place) error { p.Sandboxed = true; return nil }, "hidden from systemd units"},
		"hidden by links": {func(p *place) error { return p.link("/var/../" + p.dir) }, "is below /tmp, which is hidden"},
		"open to others": {func(p *place) error {
			return errors.Join(os.Mkdir(filepath.Dir(p.Dir), 0o755), os.Chmod(filepath.Dir(p.Dir), 0o777))
		}, "is writable by users other than root"},
		"another's": {func(p *place) error {
			return errors.Join(os.Mkdir(filepath.Dir(p.Dir), 0o755), os.Chown(filepath.Dir(p.Dir), 1000, 1000))
		}, "is writable by users other than root"},
		"closed to clients": {func(p *place) error { return os.Mkdir(filepath.Dir(p.Dir), 0o700) }, "is not accessible to clients"},
		"a file":            {func(p *place) error { return os.WriteFile(filepath.Dir(p.Dir), nil, 0o644) }, "not a directory"},
		"a link of ours": {func(p *place) error {
			return errors.Join(os.MkdirAll(p.Dir, 0o755), os.Symlink("/bin", filepath.Join(p.Dir, p.DriverName)))
		}, "not a directory"},
		"read-only":     {func(p *place) error { return p.tmpfs(unix.MS_RDONLY) }, "--host-dir that is writable"},
		"driver's name": {func(p *place) error { p.DriverName = "../x"; return nil }, "not a valid directory name"},
		"no programs":   {func(p *place) error { p.Files = nil; return nil }, "no files"},
		"missing one":   {func(p *place) error { p.Files = append(p.Files, "/nowhere/x"); return nil }, "/nowhere/x"},
		"same name":     {func(p *place) error { p.Files = append(p.Files, p.Files[0]); return nil }, "used by another program"},
		"directory":     {func(p *place) error { p.Files = []string{"/bin"}; return nil }, "not a regular file"},
	} {
		t.Run(what, func(t *testing.T) {
			p := newPlace(t, "one")
			if err := c.change(p); err != nil {
				t.Fatal(err)
			}
			_, err := Install(bounded(t), here{}, p.Options)
			if err == nil || !strings.Contains(err.Error(), c.words) {
				t.Errorf("%v, want %q", err, c.words)
			}
			t.Log(err)
		})
	}
}

// link makes the place's directory one that is reached through a symbolic link outside of what is hidden.
func (p *place) link(to string) error {
	p.Sandboxed = true
	from := fmt.Sprintf("/var/lib/programs-test-%d", os.Getpid())
	p.t.Cleanup(func() { _ = os.Remove(from) })
	p.Dir = from
	return os.Symlink(to, from)
}

// tmpfs puts the place's directory on a file system of its own.
func (p *place) tmpfs(flags uintptr) error {
	if err := os.MkdirAll(p.Dir, 0o755); err != nil {
		return err
	}
	p.t.Cleanup(func() { _ = unix.Unmount(p.Dir, unix.MNT_DETACH) })
	return unix.Mount("tmpfs", p.Dir, "tmpfs", flags, "mode=755")
}

func TestDriversInstallConcurrently(t *testing.T) {
	p := newPlace(t, strings.Repeat("one", 1<<20), "two")
	var wg sync.WaitGroup
	dirs := make([]string, 8)
	for n := range dirs {
		wg.Go(func() {
			i, err := Install(bounded(t), here{}, p.Options)
			if err != nil {
				t.Error(err)
				return
			}
			dirs[n] = i.Dir
			if err := i.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, dir := range dirs {
		if dir != dirs[0] {
			t.Errorf("%v", dirs)
		}
	}
	p.program(filepath.Join(dirs[0], "program-2"), "two")
}

func TestKilledInstallationIsRepaired(t *testing.T) {
	p := newPlace(t, strings.Repeat("one", 1<<18), "two")
	p.DriverName, p.Version = "d", "1"
	for n := range 20 {
		cmd := exec.Command(os.Args[0], p.Dir)
		cmd.Env = append(os.Environ(), envInstall+"="+strings.Join(p.Files, ":"))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		var out strings.Builder
		cmd.Stderr = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(n) * 3 * time.Millisecond) // any moment will do
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if out.Len() > 0 {
			t.Error(out.String())
		}
		i := p.install()
		p.program(i.Path("program-1"), strings.Repeat("one", 1<<18))
		if entries, err := os.ReadDir(i.Dir); err != nil || len(entries) != 2 {
			t.Errorf("%v %v", entries, err)
		}
	}
}

func TestVersionDirectoryNames(t *testing.T) {
	for version, want := range map[string]string{
		"v1.2.3": "v1.2.3-", "v0.0.0-20260101+dirty": "v0.0.0-20260101+dirty-", "": "devel-", "../../x": "x-", "a b/c": "a-b-c-",
		strings.Repeat("é", 80): "devel-", strings.Repeat("x", 80): strings.Repeat("x", 64) + "-",
	} {
		leaf := Options{Version: version}.leaf([]source{{name: "a"}})
		if !strings.HasPrefix(leaf, want) || len(leaf) != len(want)+digestChars || !versionName.MatchString(leaf) {
			t.Errorf("%q: %s", version, leaf)
		}
	}
}

func FuzzNamesOfVersions(f *testing.F) {
	f.Add("v1.2.3")
	f.Add("..")
	f.Fuzz(func(t *testing.T, version string) {
		leaf := Options{Version: version}.leaf([]source{{name: "a"}})
		if !versionName.MatchString(leaf) || strings.HasPrefix(leaf, ".") {
			t.Errorf("%q: %s", version, leaf)
		}
	})
}

func TestTry_ErrorHasReasonAndRemedy(t *testing.T) {
	for what, c := range map[string]struct {
		program string
		change  func(*place) error
		words   string
	}{
		"nothing":            {"#!/bin/sh\necho program 1.2\necho more\n", nil, ""},
		"a file system":      {"#!/bin/sh\nexit 0\n", func(p *place) error { return p.tmpfs(unix.MS_NOEXEC) }, "mounted noexec"},
		"its own failure":    {"#!/bin/sh\necho no way >&2; exit 3\n", nil, `exit status 3: "no way"`},
		"another machine's":  {"\x7fELF, perhaps", nil, "another architecture"},
		"its own privileges": {"#!/bin/sh\nid -u; exit 1\n", nil, `"65534"`},
		"an interpreter":     {"#!/no/where -e\n", nil, "the host lacks /no/where"},
		"a loader":           {dynamic(t), nil, "the host lacks /no/loader.so.2"},
		"a library": {"#!/bin/sh\necho prog: error while loading shared libraries: libfuse.so.2: cannot open shared object file: No such file or directory; " +
			"exit 127\n", nil,
			"lacks the library libfuse.so.2"},
		"a new library": {"#!/bin/sh\necho \"/lib/libc.so.6: version \\`GLIBC_2.38' not found (required by prog)\"; exit 1\n", nil, "older than GLIBC_2.38"},
	} {
		t.Run(what, func(t *testing.T) {
			p := newPlace(t, c.program)
			if c.change != nil {
				if err := c.change(p); err != nil {
					t.Fatal(err)
				}
			}
			version, err := Try(bounded(t), here{}, p.install().Path("program-1"))
			if c.words == "" {
				if err != nil || version != "program 1.2" {
					t.Errorf("%q, %v", version, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.words) || !fault.Is(err, fault.Precondition) {
				t.Errorf("%v, want %q", err, c.words)
			}
			t.Log(err)
		})
	}
}

// impatient stops to wait for a call as soon as it has begun.
type impatient struct {
	end  context.CancelFunc
	done chan struct{}
}

func (h impatient) Do(ctx context.Context, _ string, fn func() error) error {
	go func() {
		defer close(h.done)
		_ = fn() // it may be killed in between, or not
	}()
	h.end()
	return ctx.Err()
}

func TestTry_AbandonedTrialChangesNothing(t *testing.T) {
	program := newPlace(t, "#!/bin/sh\necho program 1.2\n").install().Path("program-1")
	for range 20 { // the race detector needs a write after the return, and the context may end first
		ctx, cancel := context.WithCancel(bounded(t))
		h := impatient{cancel, make(chan struct{})}
		if version, err := Try(ctx, h, program); version != "" || !errors.Is(err, context.Canceled) {
			t.Errorf("%q, %v", version, err)
		}
		<-h.done
	}
}

// dynamic is a program that names a loader which does not exist.
func dynamic(t *testing.T) string {
	t.Helper()
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range f.Progs { // the header of a part becomes that of a loader
		if p.Type == elf.PT_NOTE || p.Type == elf.PT_INTERP {
			header := program[64+56*i:] // Elf64_Ehdr, Elf64_Phdr
			at := p.Off
			binary.NativeEndian.PutUint32(header, uint32(elf.PT_INTERP))
			copy(program[at:], "/no/loader.so.2\x00")
			binary.NativeEndian.PutUint64(header[32:], uint64(len("/no/loader.so.2\x00")))
			return string(program)
		}
	}
	t.Fatal("the test's own program has no part that can be changed")
	return ""
}
