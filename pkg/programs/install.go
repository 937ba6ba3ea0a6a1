// Package programs finds the programs of helpers and clients, installs them on the host, so that they outlive the driver's container, and
// checks whether the host can run them.
//
// Every version has its own directory, <dir>/<driver name>/<version>-<digest>/. Its files are never written to again, because
// they may be running. A mount keeps using the programs that it was started with. Clean removes unused versions.
package programs

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
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

const (
	modeParent  = 0o755 // of directories above the operator's
	modeDir     = 0o711 // clients of any uid pass through; a user who may open a directory could lock it against Install
	modeProgram = 0o755
	modeClosed  = 0o711 // executable by every user, readable by root
	tempPrefix  = ".tmp-"
	digestChars = 16
)

// Options are the programs to install, and the destination.
type Options struct {
	Dir        string   // on the host, absolute; it is made if it does not exist
	DriverName string   // separates this driver from other drivers on the host
	Version    string   // for people only; the digest of the programs identifies them
	Files      []string // the programs, as paths that this process sees
	// Closed are those of Files that only root may read. The kernel does not make their processes dumpable (execve(2)), so no
	// process of the same user can inspect them, not even at their first instruction.
	Closed []string
	// Sandboxed means that the programs run in the mount namespaces of systemd units, which hide some directories.
	Sandboxed bool
}

// Installed is a version on the host. No driver removes it before Close.
type Installed struct {
	Dir  string   // the version's directory on the host, without symbolic links
	hold *os.File // holds a shared lock on Dir
}

// Close allows other drivers to remove the version when no process runs its programs.
func (i Installed) Close() error { return i.hold.Close() }

// Path returns the path of a program on the host.
func (i Installed) Path(name string) string { return filepath.Join(i.Dir, name) }

// Hidden reports whether the sandbox of systemd units hides a path, and the directory that hides it.
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
	// versionName matches the directories that Clean may remove.
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

// Install installs the programs on the host, and replaces damaged ones. It can be killed at any point, and several drivers can
// call it at the same time. If the host's directory is unsuitable, the error is a fault.Precondition with the remedy.
func Install(ctx context.Context, ns host.Doer, o Options) (Installed, error) {
	began := time.Now()
	if err := o.check(); err != nil {
		return Installed{}, err
	}
	sources, err := openSources(ctx, o.Files, o.Closed)
	defer closeSources(sources)
	if err != nil {
		return Installed{}, fmt.Errorf("read the programs to install on the host: %w", err)
	}
	drop := func(i Installed) { _ = i.Close() }
	i, err := host.Call(ctx, ns, "installing programs in "+o.Dir, drop, func() (Installed, error) { return o.install(ctx, sources) })
	if err != nil {
		return Installed{}, fmt.Errorf("install programs on the host below %s (--host-dir): %w", o.Dir, classify(err))
	}
	klog.FromContext(ctx).V(2).Info("Installed programs on the host", "directory", i.Dir, "took", time.Since(began).Round(time.Millisecond))
	return i, nil
}

func (o Options) check() error {
	switch {
	case !filepath.IsAbs(o.Dir):
		return fmt.Errorf("install programs: the host's directory %q is not an absolute path", o.Dir)
	case !fileName.MatchString(o.DriverName):
		return fmt.Errorf("install programs: %q is not a valid directory name", o.DriverName)
	case len(o.Files) == 0:
		return errors.New("install programs: no files")
	}
	return o.visible(o.Dir)
}

// visible refuses a directory that the sandbox hides.
func (o Options) visible(dir string) error {
	if below, hidden := Hidden(dir); o.Sandboxed && hidden {
		return fault.Errorf(fault.Precondition, "%s is below %s, which is hidden from systemd units: choose another --host-dir, such as /opt/s3-csi", dir, below)
	}
	return nil
}

// classify makes every failure a fault.Precondition: the host's operator must repair its file system.
func classify(err error) error {
	switch {
	case fault.KindOf(err) != fault.Unknown:
		return err
	case errors.Is(err, unix.EROFS):
		return fault.Errorf(fault.Precondition, "%w: choose a --host-dir that is writable on this host", err)
	}
	return fault.Errorf(fault.Precondition, "%w", err)
}

// openSources opens the programs and computes their digests.
func openSources(ctx context.Context, files, closed []string) (sources []source, err error) {
	for _, path := range files {
		s := source{name: filepath.Base(path), mode: modeProgram}
		if slices.Contains(closed, path) {
			s.mode = modeClosed
		}
		if !fileName.MatchString(s.name) || slices.ContainsFunc(sources, func(o source) bool { return o.name == s.name }) {
			return sources, fmt.Errorf("%s: its file name is invalid, or used by another program", path)
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
			return sources, fmt.Errorf("%s is not a regular file", path)
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

// digest copies a file from its beginning, and returns the SHA-256 of the copied bytes.
func digest(ctx context.Context, to io.Writer, from io.ReaderAt, size int64) (sum [sha256.Size]byte, err error) {
	h, section := sha256.New(), io.NewSectionReader(from, 0, size)
	_, err = io.Copy(io.MultiWriter(to, h), reader(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return section.Read(p)
	}))
	return [sha256.Size]byte(h.Sum(nil)), err
}

// reader is a function that reads.
type reader func(p []byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

// leaf returns the name of the version's directory.
func (o Options) leaf(sources []source) string {
	h := sha256.New()
	for _, s := range slices.SortedFunc(slices.Values(sources), func(a, b source) int { return strings.Compare(a.name, b.name) }) {
		if s.mode == modeProgram {
			fmt.Fprintf(h, "%s %x\n", s.name, s.sum)
		} else { // another mode is another version
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
		if err := osfile.SyncDir(dir); err != nil {
			return Installed{}, err
		}
	}
	if i.hold, err = openDir(i.Dir); err != nil {
		return Installed{}, err
	}
	// Clean takes it only while it holds the lock that is held here.
	ok, err := osfile.TryRLock(i.hold)
	if err == nil && !ok {
		err = fmt.Errorf("%s is locked by another driver: %w", i.Dir, unix.EWOULDBLOCK)
	}
	if err != nil {
		return Installed{}, errors.Join(err, i.Close())
	}
	return i, nil
}

// installed reports whether a file is the program, unchanged, with the right mode, and owned by root.
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

// write puts the program into dir. The directory's lock is held.
func (s source) write(ctx context.Context, dir string) error {
	w := osfile.Writer{Mode: os.FileMode(s.mode), Durable: true, Temp: tempPrefix + s.name}
	return w.WriteFrom(filepath.Join(dir, s.name), func(to io.Writer) error {
		sum, err := digest(ctx, to, s.file, s.size)
		if err == nil && sum != s.sum {
			err = fmt.Errorf("%s changed while it was read", s.file.Name())
		}
		return err
	})
}
