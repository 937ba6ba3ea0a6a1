package host

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// Mount is one line of a mountinfo file, unescaped. See proc_pid_mountinfo(5).
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

func hasOption(options, name string) bool {
	return slices.Contains(strings.Split(options, ","), name)
}

const (
	// maxReads bounds the reads of a mount table until it does not change during one. A read takes about a millisecond per thousand
	// mounts, so only a table that keeps changing reaches the bound.
	maxReads = 50
	// readTimeout bounds these reads, which several callers may share.
	readTimeout = 30 * time.Second
	// maxLine bounds the parsed part of a line. Longer lines (overlays of hundreds of layers) lose the end of SuperOptions, the
	// last field.
	maxLine = 48 << 10
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
	if err := n.admit(ctx, what); err != nil {
		return nil, err
	}
	mounts, err := n.tables.Read(ctx, func(ctx context.Context) (mounts []Mount, err error) {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		n.reads.Add(1)
		mounts, err = readMounts(ctx, n.mountinfo)
		return slices.Clip(mounts), err
	})
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("%s: %w", what, ctx.Err())
	}
	return mounts, err
}

// Reads returns the number of times that the mount table was read, for tests of what a reconcile pass costs.
func (n *Namespace) Reads() int { return int(n.reads.Load()) }

func readMounts(ctx context.Context, path string) ([]Mount, error) {
	return readMountsAt(ctx, unix.AT_FDCWD, path)
}

// readMountsAt is readMounts with a path relative to an open directory.
func readMountsAt(ctx context.Context, dir int, path string) ([]Mount, error) {
	t, err := openTable(dir, path)
	if err != nil {
		return nil, fmt.Errorf("opening the mount table %s: %w", path, err)
	}
	defer t.close()
	return stableMounts(ctx, path, t.read)
}

// stableMounts reads until a read is stable.
func stableMounts(ctx context.Context, name string, read func() (data []byte, stable bool, err error)) ([]Mount, error) {
	for range maxReads {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
		data, stable, err := read()
		if err != nil {
			return nil, fmt.Errorf("reading the mount table %s: %w", name, err)
		}
		if stable {
			return parseMounts(data)
		}
	}
	return nil, fault.Errorf(fault.Busy, "reading %s: the mount table keeps changing: it did during each of %d reads", name, maxReads)
}

// table is an open mountinfo file. It is no os.File: Go's poller would be told of the changes that changed asks for.
type table struct{ fd int }

func openTable(dir int, path string) (table, error) {
	fd, err := proc.Retry(func() (int, error) { return unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	return table{fd}, err
}

func (t table) close() { _ = unix.Close(t.fd) }

// read reads the whole file. stable reports that no mount came or went since it was opened, or since the previous read ended.
func (t table) read() (data []byte, stable bool, err error) {
	if _, err := unix.Seek(t.fd, 0, io.SeekStart); err != nil {
		return nil, false, err
	}
	data, err = proc.ReadAll(t.fd, make([]byte, 0, tableSize))
	if err != nil {
		return nil, false, err
	}
	changed, err := t.changed()
	return data, !changed, err
}

// tableSize is the size of a buffer for the mount table of a node without many mounts, in bytes.
const tableSize = 32 << 10

// changed reports whether a mount came or went since the file was opened, or since the previous call; see poll(2) in proc_pid_mounts(5).
func (t table) changed() (bool, error) {
	fds := []unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLPRI}}
	n, err := proc.Retry(func() (int, error) { return unix.Poll(fds, 0) })
	return n > 0, err
}

func parseMounts(data []byte) ([]Mount, error) {
	infos, err := mountinfo.GetMountsFromReader(bytes.NewReader(cutLines(data)), nil)
	if err != nil {
		return nil, fmt.Errorf("parsing a mount table: %w", err)
	}
	mounts := make([]Mount, 0, len(infos))
	for _, i := range infos {
		mounts = append(mounts, Mount{
			ID: i.ID, Parent: i.Parent,
			Major: uint32(i.Major), Minor: uint32(i.Minor),
			Root: i.Root, Mountpoint: i.Mountpoint, Options: i.Options,
			FSType: i.FSType, Source: i.Source, SuperOptions: i.VFSOptions,
			Optional: strings.Fields(i.Optional),
		})
	}
	return mounts, nil
}

// cutLines cuts lines at maxLine, because the parser's scanner fails on longer ones.
func cutLines(data []byte) []byte {
	if len(data) <= maxLine {
		return data
	}
	var out []byte
	for line := range bytes.Lines(data) {
		if len(line) > maxLine {
			line = append(bytes.Clone(line[:maxLine]), '\n')
		}
		out = append(out, line...)
	}
	return out
}
