package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
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
	if err := n.admit(ctx, what); err != nil {
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
	what := "reading " + n.mountinfo
	if err := n.admit(ctx, what); err != nil {
		return nil, err
	}
	k, file := &n.known, tableFile{path: n.mountinfo}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.open {
		t, err := file.open()
		if err != nil {
			return nil, err
		}
		k.table, k.open = t, true
	}
	if changed, err := k.table.changed(); err != nil || !changed && k.valid {
		return k.mounts, err
	}
	k.valid = false
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	read, err := file.parseStable(ctx, func(p *tableParser) (stable bool, err error) {
		n.reads.Add(1)
		return k.table.read(ctx, 0, p)
	})
	if err != nil {
		return nil, err
	}
	k.mounts, k.valid = slices.Clip(read.mounts), true
	return k.mounts, nil
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
	return f.parseStable(ctx, func(p *tableParser) (stable bool, err error) { return t.read(ctx, f.limit, p) })
}

func (f tableFile) parseStable(ctx context.Context, read func(p *tableParser) (stable bool, err error)) (tableParser, error) {
	name := f.path
	for range maxReads {
		if err := ctx.Err(); err != nil {
			return tableParser{}, fmt.Errorf("reading %s: %w", name, err)
		}
		p := tableParser{keep: f.keep}
		stable, err := read(&p)
		if err != nil {
			return tableParser{}, fmt.Errorf("reading the mount table %s: %w", name, err)
		}
		if stable {
			return p, nil
		}
	}
	return tableParser{}, fault.Errorf(fault.Busy, "reading %s: the mount table keeps changing: it did during each of %d reads", name, maxReads)
}
