// Package pins keeps the former file systems of mounts mounted, for as long as a stale copy of one may exist.
//
// Device numbers decide which mounts are stale copies of a volume. The type and source text of a mount are
// arguments of mount(2), which any process with a user namespace and /dev/fuse can choose. A device number is the kernel's,
// and is not reused while a mount of it exists. So the driver keeps a bind mount of each former file system of a mount, a pin,
// until no copy of it is left:
//
//	sources/<name>.<minor>   a pin: a bind of the file system of an earlier client of the mount
//
// A number is trusted only if one of the driver's own mounts pins it (a source, a pin, or a target in the host's mount table). The
// mount table is the only record of the pins, so nothing can disagree with it after a crash. A pin keeps neither a process nor a
// connection alive: a file system is pinned after its client has exited.
package pins

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// maxPins bounds the pins of one mount. Only copies that cannot be replaced keep pins for long.
const maxPins = 8

// Pins are the pins of all mounts.
type Pins struct {
	ns      *host.Namespace
	sources string // the directory of sources, in which the pins are
}

// New returns the pins in the directory of sources.
func New(ns *host.Namespace, sources string) *Pins { return &Pins{ns: ns, sources: sources} }

// Dir is the mount point of a pin.
func (p *Pins) Dir(name string, minor uint32) string {
	return filepath.Join(p.sources, name) + "." + strconv.FormatUint(uint64(minor), 10)
}

// nameAt returns the name of the mount whose pin is mounted at a path.
func (p *Pins) nameAt(mountpoint string) (name string, ok bool) {
	rest, below := strings.CutPrefix(mountpoint, p.sources+"/")
	name, minor, dotted := strings.Cut(rest, ".")
	_, err := strconv.ParseUint(minor, 10, 32)
	return name, below && dotted && err == nil && mount.ValidName(name)
}

// Own reports whether a mount is a source or a pin, rather than a publication.
func (p *Pins) Own(mnt host.Mount) bool { return filepath.Dir(mnt.Mountpoint) == p.sources }

// Devices are FUSE file systems, by their minor device numbers; the major one is always 0.
type Devices map[uint32]bool

// Has reports whether a mount is one of these file systems.
func (d Devices) Has(mnt host.Mount) bool { return mnt.Major == 0 && d[mnt.Minor] }

// Serves reports whether a mount is a FUSE file system that carries the name of one of these mounts.
func Serves(mnt host.Mount, names []string) bool {
	name, ours := mount.NameOf(mnt.Source)
	return ours && strings.HasPrefix(mnt.FSType, "fuse") && mnt.Major == 0 && slices.Contains(names, name)
}

// Known returns the file systems of these mounts that a mount of the driver's own pins: their sources, their pins, and what the
// host shows at the targets.
func (p *Pins) Known(mounts []host.Mount, names []string, targets map[string]bool) Devices {
	known := Devices{}
	for _, mnt := range mounts {
		if Serves(mnt, names) && (p.Own(mnt) || targets[mnt.Mountpoint]) {
			known[mnt.Minor] = true
		}
	}
	return known
}

// List returns the pins of a mount, the oldest first.
func (p *Pins) List(mounts []host.Mount, name string) []host.Mount {
	return slices.DeleteFunc(slices.Clone(mounts), func(mnt host.Mount) bool {
		of, ok := p.nameAt(mnt.Mountpoint)
		return !ok || of != name
	})
}

// Names returns the names of the mounts that have pins.
func (p *Pins) Names(mounts []host.Mount) map[string]bool {
	names := map[string]bool{}
	for _, mnt := range mounts {
		if name, ok := p.nameAt(mnt.Mountpoint); ok {
			names[name] = true
		}
	}
	return names
}

// Pin pins the file system of a mount in the host's table for the mount of that name. A second pin of one file system is
// not made.
func (p *Pins) Pin(ctx context.Context, name string, mounts []host.Mount, from host.Mount) error {
	pins := p.List(mounts, name)
	if slices.ContainsFunc(pins, func(pin host.Mount) bool { return pin.Minor == from.Minor }) {
		return nil
	}
	for len(pins) >= maxPins {
		klog.FromContext(ctx).Info("Too many pinned file systems, unpinning the oldest", "mount", name, "device", pins[0].Minor)
		if err := p.unpin(ctx, pins[0].Mountpoint); err != nil {
			return err
		}
		pins = pins[1:]
	}
	dir := p.Dir(name, from.Minor)
	err := p.ns.Do(ctx, "pinning the previous file system of mount "+name, func() error {
		former, err := host.OpenDir(from.Mountpoint)
		if err != nil {
			return err
		}
		defer former.Close()
		if id, err := host.MountID(former); err != nil {
			return err
		} else if id != from.ID {
			return fault.Errorf(fault.Busy, "another mount has replaced the one at %s", from.Mountpoint)
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		place, err := host.OpenDir(dir)
		if err != nil {
			return err
		}
		defer place.Close()
		return host.Bind(former, place, host.BindAttrs{ReadOnly: true, NoExec: true})
	})
	if err != nil {
		return fmt.Errorf("pinning the previous file system of mount %s at %s: %w", name, dir, err)
	}
	failpoint.Here("former.pinned")
	return nil
}

// unpin removes the pin at a directory, which may be unmounted already.
func (p *Pins) unpin(ctx context.Context, dir string) error {
	return p.ns.Do(ctx, "unmounting "+dir, func() error { return host.RemoveMountPoint(dir) })
}

// UnpinAll removes all pins of a mount that ends, and directories of pins that a crash left unmounted.
func (p *Pins) UnpinAll(ctx context.Context, name string) error {
	dirs, err := host.Call(ctx, p.ns, "reading "+p.sources, nil, func() ([]string, error) { return filepath.Glob(filepath.Join(p.sources, name) + ".*") })
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		if _, ok := p.nameAt(dir); ok {
			errs = append(errs, p.unpin(ctx, dir))
		}
	}
	return errors.Join(errs...)
}

// Release removes the pins of a mount whose file systems show nowhere else any more.
func (p *Pins) Release(ctx context.Context, name string) error {
	mounts, err := p.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, pin := range p.List(mounts, name) {
		where, err := p.ShownElsewhere(ctx, mounts, Devices{pin.Minor: true})
		if err == nil && where == "" {
			err = p.unpin(ctx, pin.Mountpoint)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// ShownElsewhere returns where one of these file systems has a mount other than the driver's sources and pins, in the host's
// namespace or in another; "" is nowhere.
func (p *Pins) ShownElsewhere(ctx context.Context, mounts []host.Mount, of Devices) (where string, err error) {
	for _, mnt := range mounts {
		if of.Has(mnt) && !p.Own(mnt) {
			return mnt.Mountpoint, nil
		}
	}
	return p.ns.ShownInOtherNamespaces(ctx, "looking for copies of former mounts", of.Has)
}

// Clear removes pins of mounts that are gone, and the directories of pins that were unmounted.
func (p *Pins) Clear(ctx context.Context, gone func(ctx context.Context, name string) bool) error {
	entries, err := host.Call(ctx, p.ns, "reading "+p.sources, nil, func() ([]os.DirEntry, error) { return os.ReadDir(p.sources) })
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		dir := filepath.Join(p.sources, e.Name())
		name, ok := p.nameAt(dir)
		if ok && gone(ctx, name) {
			errs = append(errs, p.unpin(ctx, dir))
		}
	}
	return errors.Join(errs...)
}
