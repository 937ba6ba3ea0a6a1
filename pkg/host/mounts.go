package host

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// Mount is one line of a mountinfo file, unescaped. See proc_pid_mountinfo(5). A field that is too long is cut and ends with a NUL.
type Mount struct {
	ID, Parent   int
	Major, Minor uint32 // the file system's device; the kernel reuses the number as soon as the mount is gone
	Root         string // the mounted directory of the file system
	Mountpoint   string // as seen from the root of the process whose file was read
	Options      string // the mount's own: "ro,nosuid,nodev"
	FSType       string
	Source       string
	SuperOptions string   // the file system's
	Optional     []string // propagation: "shared:7", "master:3", "unbindable"; none is private
}

// ReadOnly reports whether the mount or its file system is read-only.
func (m Mount) ReadOnly() bool {
	return hasOption(m.Options, "ro") || hasOption(m.SuperOptions, "ro")
}

// shown returns the directory (or file) of the file system that the mount shows, by its path there. A mount table appends "//deleted" when
// the kernel has dropped the name: the directory was removed, or a process looked it up while no client answered.
func (m Mount) shown() string { return strings.TrimSuffix(m.Root, "//deleted") }

// Shared reports whether mounts propagate between m and its peers.
func (m Mount) Shared() bool { return m.peerGroup() != "" }

// Slave reports whether mounts propagate to m from a master.
func (m Mount) Slave() bool { return m.propagation("master:") != "" }

// peerGroup returns the number of the peer group of a mount, "" if it is not shared.
func (m Mount) peerGroup() string { return m.propagation("shared:") }

// propagation returns the peer group that a field of a mount table names, "" if there is no such field.
func (m Mount) propagation(field string) string {
	for _, f := range m.Optional {
		if group, ok := strings.CutPrefix(f, field); ok {
			return group
		}
	}
	return ""
}

func hasOption(options, name string) bool {
	return slices.Contains(strings.Split(options, ","), name)
}

const (
	// maxReads bounds the reads of a mount table until it does not change during one. A read takes about a millisecond per thousand
	// mounts, so only a table that keeps changing reaches the bound.
	maxReads = 50
	// readTimeout bounds these reads, which several callers may share.
	readTimeout = 30 * time.Second
)

// TopAt returns the topmost mount on a path; ok is false if nothing is mounted there.
func TopAt(mounts []Mount, path string) (top Mount, ok bool) {
	for _, m := range mounts {
		if m.Mountpoint == path {
			top, ok = m, true // later entries lie on top
		}
	}
	return top, ok
}

// Mounts reads the namespace's mount table. The kernel returns it in pieces, so a read can miss a mount while other mounts change.
// It is therefore read until no mount comes or goes during a read. If that never happens, the error is a fault.Busy, because a missing
// line would look like an unmounted volume.
//
// Concurrent callers share a read that began after they called, and its result: do not modify it.
func (n *Namespace) Mounts(ctx context.Context) ([]Mount, error) {
	what := "reading " + n.mountinfo
	if err := n.checkOverdue(ctx, what); err != nil {
		return nil, err
	}
	mounts, err := n.tables.Read(ctx, func(ctx context.Context) ([]Mount, error) {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		n.reads.Add(1)
		table, err := tableFile{path: n.mountinfo}.parse(ctx)
		if err == nil && table.skipped != int(n.skipped.Swap(int64(table.skipped))) && table.skipped > 0 {
			klog.FromContext(ctx).Info("Skipped lines of the mount table", "lines", table.skipped, "first", table.sample)
		}
		return slices.Clip(table.mounts), err
	})
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("%s: %w", what, ctx.Err())
	}
	return mounts, err
}

// KnownMounts is Mounts, but reads the table only if a mount came or went since it was last read. So it costs little to call again and again,
// for any number of callers. It does not notice other changes: of paths, by renames of directories, and of propagation.
func (n *Namespace) KnownMounts(ctx context.Context) ([]Mount, error) {
	k := &n.known
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.open {
		t, err := tableFile{path: n.mountinfo}.open()
		if err != nil {
			return nil, err
		}
		k.table, k.open = t, true
	}
	changed, err := k.table.changed()
	if err == nil && (changed || !k.valid) {
		k.mounts, err = n.Mounts(ctx) // a change meanwhile is noticed the next time
		k.valid = err == nil
	}
	return k.mounts, err
}

// knownTable is what KnownMounts remembers. Its file stays open, as the kernel reports changes to who has it open.
type knownTable struct {
	mu     sync.Mutex
	table  table
	open   bool
	mounts []Mount
	valid  bool // mounts are those of the latest read
}

// Reads returns the number of times that the mount table was read, for tests of what a reconcile pass costs.
func (n *Namespace) Reads() int { return int(n.reads.Load()) }

// readMounts reads a mount table until a read is stable.
func readMounts(ctx context.Context, path string) ([]Mount, error) {
	p, err := tableFile{path: path}.parse(ctx)
	return p.mounts, err
}

// tableFile is a mountinfo file of which a part is read.
type tableFile struct {
	dir   int // of a relative path
	path  string
	limit int64                               // of the bytes; 0: none
	keep  func(m Mount) (kept Mount, ok bool) // what is kept of a mount, if any of it is; nil: all
}

// parse reads the table until a read is stable.
func (f tableFile) parse(ctx context.Context) (tableParser, error) {
	t, err := f.open()
	if err != nil {
		return tableParser{}, err
	}
	defer t.close()
	return f.parseStable(ctx, t.read)
}

func (f tableFile) parseStable(ctx context.Context, read func(context.Context, *tableParser) (stable bool, err error)) (tableParser, error) {
	for range maxReads {
		if err := ctx.Err(); err != nil {
			return tableParser{}, fmt.Errorf("reading %s: %w", f.path, err)
		}
		p := tableParser{limit: f.limit, keep: f.keep}
		stable, err := read(ctx, &p)
		if err != nil {
			return tableParser{}, fmt.Errorf("reading the mount table %s: %w", f.path, err)
		}
		if stable {
			return p, nil
		}
	}
	return tableParser{}, fault.Errorf(fault.Busy, "reading %s: the mount table keeps changing: it did during each of %d reads", f.path, maxReads)
}

// A tenant can make any number of mounts in a mount namespace of its own, and paths of any length in the host's, by moving a directory that
// is mounted elsewhere. So tables are parsed while they are read, and hold what their reader needs.

const (
	// maxField bounds a field of a line, in bytes. The kernel takes no longer path, so what a longer one leads to is not the driver's.
	maxField = unix.PathMax
	// maxFields bounds the fields of a line.
	maxFields = 32
	// maxTable bounds the mount table of another mount namespace, in bytes: some 60,000 mounts.
	maxTable = 16 << 20
	// largeTable is a table that counts towards maxTables, which bounds the tables of one pod or cgroup that a search reads, in bytes.
	largeTable, maxTables = 1 << 20, 4 * maxTable
	// readSize is the size of the buffer for parts of a table, in bytes.
	readSize = 32 << 10
	// maxSample bounds the text of a line in a message.
	maxSample = 200
)

// tableParser splits a mount table into mounts, whatever parts it comes in.
type tableParser struct {
	// keep returns what is kept of a mount, if any of it is; nil: all.
	keep   func(Mount) (kept Mount, ok bool)
	limit  int64 // of size; 0: none
	mounts []Mount
	size   int64 // of the parts
	// skipped is the number of lines that are no mounts, and sample the beginning of the first one.
	skipped int
	sample  string

	line   []byte // the beginning of the current line, without the ends of long fields
	field  int    // the bytes of its current field in line
	fields int    // the fields in line
}

func (p *tableParser) add(part []byte) {
	p.size += int64(len(part))
	for len(part) > 0 {
		end := bytes.IndexByte(part, '\n')
		if end < 0 {
			p.addFields(part)
			return
		}
		p.addFields(part[:end])
		p.endLine()
		part = part[end+1:]
	}
}

// addFields adds a part of a line. It keeps one byte more than maxField of a long field, for unescape to see.
func (p *tableParser) addFields(part []byte) {
	for len(part) > 0 {
		text, rest, ends := bytes.Cut(part, []byte{' '})
		if p.fields <= maxFields {
			text = text[:min(len(text), maxField+1-p.field)]
			p.line, p.field = append(p.line, text...), p.field+len(text)
			if ends {
				p.line, p.field, p.fields = append(p.line, ' '), 0, p.fields+1
			}
		}
		part = rest
	}
}

// endLine ends a line. The kernel ends each with a line break.
func (p *tableParser) endLine() {
	m, ok := parseMount(string(p.line))
	if !ok {
		if p.skipped++; p.skipped == 1 {
			p.sample = string(p.line[:min(len(p.line), maxSample)])
		}
	}
	if ok && p.keep != nil {
		m, ok = p.keep(m)
	}
	if ok {
		p.mounts = append(p.mounts, m)
	}
	p.line, p.field, p.fields = p.line[:0], 0, 0
}

// parseMount parses a line of a mountinfo file. The mount refers to its text.
func parseMount(line string) (m Mount, ok bool) {
	fields := strings.Split(line, " ")
	end := slices.Index(fields, "-")
	if end < 6 || len(fields) < end+4 {
		return m, false
	}
	id, err := strconv.Atoi(fields[0])
	parent, perr := strconv.Atoi(fields[1])
	first, second, colon := strings.Cut(fields[2], ":")
	major, aerr := strconv.ParseUint(first, 10, 32)
	minor, ierr := strconv.ParseUint(second, 10, 32)
	if err != nil || perr != nil || aerr != nil || ierr != nil || !colon {
		return m, false
	}
	m = Mount{
		ID: id, Parent: parent, Major: uint32(major), Minor: uint32(minor),
		Root: unescape(fields[3]), Mountpoint: unescape(fields[4]), Options: fields[5],
		FSType: unescape(fields[end+1]), Source: unescape(fields[end+2]), SuperOptions: unescape(fields[end+3]),
	}
	if end > 6 {
		m.Optional = slices.Clone(fields[6:end])
	}
	return m, true
}

// unescape returns a field's text, in which the kernel writes some bytes as three octal digits. It ends a field that was cut with a NUL, so
// that no system call takes it for another path.
func unescape(field string) string {
	if len(field) > maxField {
		field = field[:maxField] + "\x00"
	}
	if strings.IndexByte(field, '\\') < 0 {
		return field
	}
	text := make([]byte, 0, len(field))
	for len(field) > 0 {
		n := 1
		c := field[0]
		if c == '\\' && len(field) >= 4 {
			if octal, err := strconv.ParseUint(field[1:4], 8, 8); err == nil {
				c, n = byte(octal), 4
			}
		}
		text, field = append(text, c), field[n:]
	}
	return string(text)
}

// table is an open mountinfo file. It is no os.File: Go's poller would be told of the changes that changed asks for.
type table struct{ fd int }

func (f tableFile) open() (table, error) {
	fd, err := proc.Retry(func() (int, error) { return unix.Openat(f.dir, f.path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return table{}, fmt.Errorf("opening the mount table %s: %w", f.path, err)
	}
	return table{fd}, nil
}

func (t table) close() { _ = unix.Close(t.fd) }

// read parses the whole file. stable reports that no mount came or went since it was opened, or
// since the previous read ended.
func (t table) read(ctx context.Context, p *tableParser) (stable bool, err error) {
	if _, err := unix.Seek(t.fd, 0, io.SeekStart); err != nil {
		return false, err
	}
	buf := make([]byte, readSize)
	for {
		n, err := proc.Retry(func() (int, error) { return unix.Read(t.fd, buf) })
		if err != nil {
			return false, err
		}
		if n == 0 {
			break
		}
		p.add(buf[:n])
		if p.limit > 0 && p.size > p.limit {
			return false, fault.Errorf(fault.Unsupported, "it has more than %d MiB", p.limit>>20)
		}
		if err := ctx.Err(); err != nil {
			return false, err
		}
	}
	changed, err := t.changed()
	return !changed, err
}

// changed reports whether a mount came or went since the file was opened, or since the previous call; see poll(2) in proc_pid_mounts(5).
func (t table) changed() (bool, error) {
	fds := []unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLPRI}}
	n, err := proc.Retry(func() (int, error) { return unix.Poll(fds, 0) })
	return n > 0, err
}

// ThreadMounts returns the mounts in the calling thread's mount namespace for which needs reports true. Mounts that come or go meanwhile may
// be missing.
func ThreadMounts(needs func(Mount) bool) ([]Mount, error) {
	t, err := tableFile{path: threadMountinfo}.open()
	if err != nil {
		return nil, err
	}
	defer t.close()
	p := tableParser{keep: func(m Mount) (Mount, bool) { return m, needs(m) }}
	if _, err := t.read(context.Background(), &p); err != nil {
		return nil, fmt.Errorf("reading the mount table: %w", err)
	}
	return p.mounts, nil
}
