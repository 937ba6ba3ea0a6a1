package host

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

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

// read parses the whole file; limit bounds its bytes, 0: nothing does. stable reports that no mount came or went since it was opened, or
// since the previous read ended.
func (t table) read(ctx context.Context, limit int64, p *tableParser) (stable bool, err error) {
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
		if limit > 0 && p.size > limit {
			return false, fault.Errorf(fault.Unsupported, "it has more than %d MiB", limit>>20)
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
	if _, err := t.read(context.Background(), 0, &p); err != nil {
		return nil, fmt.Errorf("reading the mount table: %w", err)
	}
	return p.mounts, nil
}
