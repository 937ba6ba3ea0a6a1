// Package hostdir keeps the programs of helpers and clients on the host, so that what runs there outlives the container that
// brought it.
//
// Every version has a directory of its own, <dir>/<driver name>/<version>-<digest>/, whose files are never written again:
// they may be running. A mount keeps the programs that it was started with until it ends; what no mount uses is removed by
// Clean.
package hostdir

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	modeParent  = 0o755 // of directories above the operator's
	modeDir     = 0o711 // clients of any uid pass through; who may open a directory could also lock it against Install
	modeProgram = 0o755
	modeClosed  = 0o711 // may be executed by everybody and read by root
	tempPrefix  = ".tmp-"
	digestChars = 16
	lockPause   = 20 * time.Millisecond
)

// Doer does work in the host's mount namespace (host.Namespace).
type Doer interface {
	Do(ctx context.Context, what string, fn func() error) error
}

// Options say what is installed, and where.
type Options struct {
	Dir        string   // on the host, absolute; it is made if it is missing
	DriverName string   // drivers of other names are left alone
	Version    string   // for people; what counts is the digest of the programs
	Files      []string // the programs, paths in this process's own view
	// Closed are those of Files that nobody but root may read. Nobody can look into a process that runs one, not even
	// another process of its user, from its first instruction on: the kernel does not make it dumpable (execve(2)).
	Closed []string
	// Sandboxed says that the programs are to run in the sandbox of systemd's units, which hides some directories.
	Sandboxed bool
}

// Installed is a version on the host. It counts as used until Close.
type Installed struct {
	Dir  string   // the version's directory on the host, without symbolic links
	hold *os.File // has a shared lock on Dir
}

// Close lets other drivers remove the version once nothing runs from it.
func (i Installed) Close() error { return i.hold.Close() }

// Path is where a program of that file name is on the host.
func (i Installed) Path(name string) string { return filepath.Join(i.Dir, name) }

// Hidden tells whether units in systemd's sandbox cannot see a path, and below which directory that is.
func Hidden(path string) (below string, hidden bool) {
	for _, dir := range []string{"/tmp", "/var/tmp", "/home", "/root", "/run/user", "/dev", "/proc", "/sys"} {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return dir, true
		}
	}
	return "", false
}

var (
	fileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	// versionName are the directories that Clean may remove.
	versionName = regexp.MustCompile(fmt.Sprintf(`^[A-Za-z0-9._+-]{1,64}-[0-9a-f]{%d}$`, digestChars))
)

// source is a program to install.
type source struct {
	name string
	file *os.File
	mode uint32
	size int64
	sum  [sha256.Size]byte
}

// Install puts the programs on the host, or finds that they are there, unchanged: what has been damaged is replaced. It can be
// killed anywhere and called by several drivers at a time. An error of the host's directory is a fault.Precondition that says
// what to do.
func Install(ctx context.Context, ns Doer, o Options) (Installed, error) {
	began := time.Now()
	if err := o.check(); err != nil {
		return Installed{}, err
	}
	sources, err := openSources(ctx, o.Files, o.Closed)
	defer closeSources(sources)
	if err != nil {
		return Installed{}, fmt.Errorf("read the programs to install on the host: %w", err)
	}
	done := make(chan Installed, 1) // buffered: after ctx ends, no caller receives it, and the collector closes the file
	err = ns.Do(ctx, "installing programs in "+o.Dir, func() error {
		i, err := o.install(ctx, sources)
		done <- i
		return err
	})
	if err != nil {
		return Installed{}, fmt.Errorf("install programs on the host below %s (--host-dir): %w", o.Dir, classify(err))
	}
	i := <-done
	klog.FromContext(ctx).V(2).Info("Programs are installed on the host", "directory", i.Dir, "took", time.Since(began).Round(time.Millisecond))
	return i, nil
}

func (o Options) check() error {
	switch {
	case !filepath.IsAbs(o.Dir):
		return fmt.Errorf("install programs: the host's directory %q is not an absolute path", o.Dir)
	case !fileName.MatchString(o.DriverName):
		return fmt.Errorf("install programs: %q cannot be the name of a directory", o.DriverName)
	case len(o.Files) == 0:
		return errors.New("install programs: there is none")
	}
	return o.visible(o.Dir)
}

// visible refuses a directory that the programs could not be started from.
func (o Options) visible(dir string) error {
	if below, hidden := Hidden(dir); o.Sandboxed && hidden {
		return fault.Errorf(fault.Precondition, "%s is below %s, which is hidden from the units of launcher systemd: choose another --host-dir, as /opt/s3-csi", dir, below)
	}
	return nil
}

// classify says whose a failure is: the host's file system is for its operator to mend.
func classify(err error) error {
	switch {
	case fault.KindOf(err) != fault.Unknown:
		return err
	case errors.Is(err, unix.EROFS):
		return fault.Errorf(fault.Precondition, "%w: choose a --host-dir that can be written on this host", err)
	}
	return fault.Errorf(fault.Precondition, "%w", err)
}

// openSources opens the programs and learns their digests.
func openSources(ctx context.Context, files, closed []string) (sources []source, err error) {
	for _, path := range files {
		s := source{name: filepath.Base(path), mode: modeProgram}
		if slices.Contains(closed, path) {
			s.mode = modeClosed
		}
		if !fileName.MatchString(s.name) || slices.ContainsFunc(sources, func(o source) bool { return o.name == s.name }) {
			return sources, fmt.Errorf("%s: there is another program of that name, or it is no name for one", path)
		}
		if s.file, err = os.Open(path); err != nil {
			return sources, err
		}
		sources = append(sources, s)
		last := &sources[len(sources)-1]
		fi, err := s.file.Stat()
		if err != nil {
			return sources, err
		}
		if !fi.Mode().IsRegular() {
			return sources, fmt.Errorf("%s is not a file", path)
		}
		last.size = fi.Size()
		if last.sum, err = digest(ctx, io.Discard, s.file, last.size); err != nil {
			return sources, fmt.Errorf("%s: %w", path, err)
		}
	}
	return sources, nil
}

func closeSources(sources []source) {
	for _, s := range sources {
		_ = s.file.Close() // it was only read
	}
}

// digest copies a file from its beginning, and gives the SHA-256 of what it copied.
func digest(ctx context.Context, to io.Writer, from io.ReaderAt, size int64) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(to, h), &untilDone{ctx, io.NewSectionReader(from, 0, size)})
	return [sha256.Size]byte(h.Sum(nil)), err
}

// untilDone is a reader that ends with ctx.
type untilDone struct {
	ctx context.Context //nolint:containedctx // it lives as long as one copy
	io.Reader
}

func (b *untilDone) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	return b.Reader.Read(p)
}

// leaf is the name of the version's directory.
func (o Options) leaf(sources []source) string {
	h := sha256.New()
	for _, s := range slices.SortedFunc(slices.Values(sources), func(a, b source) int { return strings.Compare(a.name, b.name) }) {
		if s.mode == modeProgram {
			fmt.Fprintf(h, "%s %x\n", s.name, s.sum)
		} else { // drivers that want it otherwise have another directory
			fmt.Fprintf(h, "%s %x %o\n", s.name, s.sum, s.mode)
		}
	}
	version := strings.Map(func(r rune) rune {
		if r < 0x80 && (r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || strings.ContainsRune("._+", r)) {
			return r
		}
		return '-'
	}, o.Version)
	version = strings.TrimLeft(version[:min(len(version), 64)], ".-")
	if version == "" {
		version = "devel"
	}
	return version + "-" + hex.EncodeToString(h.Sum(nil))[:digestChars]
}

// install runs on the host.
func (o Options) install(ctx context.Context, sources []source) (Installed, error) {
	root, err := o.root()
	if err != nil {
		return Installed{}, err
	}
	base := filepath.Join(root, o.DriverName)
	if err := makeDir(base); err != nil {
		return Installed{}, err
	}
	lock, err := lockDir(ctx, base)
	if err != nil {
		return Installed{}, err
	}
	defer lock.Close()
	i := Installed{Dir: filepath.Join(base, o.leaf(sources))}
	if err := makeDir(i.Dir); err != nil {
		return Installed{}, err
	}
	if err := removeTemps(i.Dir); err != nil {
		return Installed{}, err
	}
	for _, s := range sources {
		if s.installed(ctx, i.Path(s.name)) {
			continue
		}
		if err := s.write(ctx, i.Dir); err != nil {
			return Installed{}, err
		}
	}
	for _, dir := range []string{i.Dir, base, root} {
		if err := syncDir(dir); err != nil {
			return Installed{}, err
		}
	}
	i.hold, err = openDir(i.Dir)
	if err == nil {
		err = unix.Flock(int(i.hold.Fd()), unix.LOCK_SH|unix.LOCK_NB) // Clean has it only with the lock that is held here
	}
	return i, err
}

// installed tells whether a file is the program, may be executed by everybody, read by whom it should, and changed by root
// alone.
func (s source) installed(ctx context.Context, path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Mode != unix.S_IFREG|s.mode || st.Uid != 0 || st.Nlink != 1 || st.Size != s.size {
		return false
	}
	sum, err := digest(ctx, io.Discard, f, s.size)
	return err == nil && sum == s.sum
}

// write puts the program into dir as a whole: whoever opens it gets the old or the new one.
func (s source) write(ctx context.Context, dir string) error {
	f, err := os.CreateTemp(dir, tempPrefix+"*") // O_EXCL, 0600
	if err != nil {
		return err
	}
	sum, err := digest(ctx, f, s.file, s.size)
	if err == nil && sum != s.sum {
		err = fmt.Errorf("%s has changed while it was read", s.file.Name())
	}
	if err == nil {
		err = f.Chmod(os.FileMode(s.mode))
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, s.name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
