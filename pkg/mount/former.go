package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// Which mounts are stale copies of a volume is decided by their device numbers. Type and source text of a mount are arguments
// of mount(2), which any process with a user namespace and /dev/fuse can choose. A device number is the kernel's, and is not
// given out again while a mount of it exists. So the driver keeps a bind mount of each former file system of a mount, a pin,
// until no copy of it is left:
//
//	sources/<name>.<minor>   a pin: a bind of the file system of an earlier client of the mount
//
// A number that is not pinned by a mount of the driver's own, which are the sources, the pins and the targets in the host's mount
// table, is never trusted. The mount table is the only record of the pins, so nothing can disagree with it after a crash. A pin
// keeps neither a process nor a connection: a file system is pinned after its client has exited.

// maxPins bounds the pins of one mount. Only copies that cannot be replaced keep pins for long.
const maxPins = 8

func (s store) pinDir(name string, minor uint32) string {
	return s.sourceDir(name) + "." + strconv.FormatUint(uint64(minor), 10)
}

// pinOf returns the name of the mount whose pin is mounted at a path.
func (s store) pinOf(mountpoint string) (name string, ok bool) {
	rest, below := strings.CutPrefix(mountpoint, s.sources()+"/")
	name, minor, dotted := strings.Cut(rest, ".")
	_, err := strconv.ParseUint(minor, 10, 32)
	return name, below && dotted && err == nil && validName(name)
}

// own reports whether a mount is a source or a pin, rather than a publication.
func (s store) own(mnt host.Mount) bool { return filepath.Dir(mnt.Mountpoint) == s.sources() }

// devices are FUSE file systems, by their minor device numbers; the major one is always 0.
type devices map[uint32]bool

func (d devices) has(mnt host.Mount) bool { return mnt.Major == 0 && d[mnt.Minor] }

// serves reports whether a mount is a FUSE file system that carries the name of one of these mounts.
func serves(mnt host.Mount, names []string) bool {
	name, ours := nameOfSource(mnt.Source)
	return ours && strings.HasPrefix(mnt.FSType, "fuse") && mnt.Major == 0 && slices.Contains(names, name)
}

// known returns the file systems of these mounts that a mount of the driver's own pins: their sources, their pins, and what the
// host shows at the targets.
func (s store) known(mounts []host.Mount, names []string, targets map[string]bool) devices {
	known := devices{}
	for _, mnt := range mounts {
		if serves(mnt, names) && (s.own(mnt) || targets[mnt.Mountpoint]) {
			known[mnt.Minor] = true
		}
	}
	return known
}

// pins are the pins of a mount, the oldest first.
func (s store) pins(mounts []host.Mount, name string) []host.Mount {
	return slices.DeleteFunc(slices.Clone(mounts), func(mnt host.Mount) bool {
		of, ok := s.pinOf(mnt.Mountpoint)
		return !ok || of != name
	})
}

// pinFormer pins the file system of a mount in the host's table for the mount of that name. A second pin of one file system is
// not made.
func (m *Manager) pinFormer(ctx context.Context, name string, mounts []host.Mount, from host.Mount) error {
	pins := m.store.pins(mounts, name)
	if slices.ContainsFunc(pins, func(pin host.Mount) bool { return pin.Minor == from.Minor }) {
		return nil
	}
	for len(pins) >= maxPins {
		klog.FromContext(ctx).Info("Too many stale file systems of a mount, forgetting the oldest", "mount", name, "device", pins[0].Minor)
		if err := m.unpin(ctx, pins[0]); err != nil {
			return err
		}
		pins = pins[1:]
	}
	dir := m.store.pinDir(name, from.Minor)
	err := m.Namespace.Do(ctx, "keeping the former file system of mount "+name, func() error {
		former, err := host.OpenDir(from.Mountpoint)
		if err != nil {
			return err
		}
		defer former.Close()
		if id, err := host.MountID(former); err != nil || id != from.ID {
			return fault.Errorf(fault.Busy, "another mount is at %s by now: %w", from.Mountpoint, err)
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
		return fmt.Errorf("keeping the former file system of mount %s at %s: %w", name, dir, err)
	}
	failpoint.Here("former.pinned")
	return nil
}

// pinTargets pins the stale file systems that the host shows at a mount's targets, before they are replaced there: containers may
// have copies of them. After a restart they have a pin already, unless the source was unmounted by someone else.
func (m *Manager) pinTargets(ctx context.Context, rec record, names []string, targets map[string]bool, living host.Mount, mounts []host.Mount) error {
	known := m.store.known(mounts, names, nil)
	for _, mnt := range mounts {
		if !targets[mnt.Mountpoint] || !serves(mnt, names) || known.has(mnt) || mnt.Minor == living.Minor {
			continue
		}
		if top, _ := mountedAt(mounts, mnt.Mountpoint); top.ID != mnt.ID {
			continue // no path leads to it
		}
		if err := m.pinFormer(ctx, rec.Name, mounts, mnt); err != nil {
			return err
		}
		known[mnt.Minor] = true
	}
	return nil
}

// unpin removes a pin.
func (m *Manager) unpin(ctx context.Context, pin host.Mount) error {
	return m.Namespace.Do(ctx, "unmounting "+pin.Mountpoint, func() error {
		if err := host.Detach(pin.Mountpoint); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
		return ignoreMissing(os.Remove(pin.Mountpoint))
	})
}

// unpinAll removes all pins of a mount that ends.
func (m *Manager) unpinAll(ctx context.Context, name string) error {
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, pin := range m.store.pins(mounts, name) {
		errs = append(errs, m.unpin(ctx, pin))
	}
	return errors.Join(errs...)
}

// releasePins removes the pins of a mount whose file systems show nowhere else any more.
func (m *Manager) releasePins(ctx context.Context, name string) error {
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, pin := range m.store.pins(mounts, name) {
		where, err := m.shownElsewhere(ctx, mounts, devices{pin.Minor: true})
		if err == nil && where == "" {
			err = m.unpin(ctx, pin)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// shownElsewhere returns where one of these file systems has a mount other than the driver's sources and pins, in the host's
// namespace or in another; "" is nowhere.
func (m *Manager) shownElsewhere(ctx context.Context, mounts []host.Mount, of devices) (where string, err error) {
	for _, mnt := range mounts {
		if of.has(mnt) && !m.store.own(mnt) {
			return mnt.Mountpoint, nil
		}
	}
	return m.Namespace.ShownElsewhere(ctx, "looking for copies of former mounts", of.has)
}

// clearPins removes pins of mounts that are gone, and the directories of pins that were unmounted.
func (m *Manager) clearPins(ctx context.Context) error {
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	var left []string
	if err := m.do(ctx, func() error {
		entries, err := os.ReadDir(m.store.sources())
		if err != nil {
			return err
		}
		for _, e := range entries {
			left = append(left, filepath.Join(m.store.sources(), e.Name()))
		}
		return nil
	}); err != nil {
		return err
	}
	var errs []error
	for _, dir := range left {
		name, ok := m.store.pinOf(dir)
		if !ok {
			continue
		}
		pin, mounted := mountedAt(mounts, dir)
		switch {
		case mounted && m.gone(ctx, name):
			errs = append(errs, m.unpin(ctx, pin))
		case !mounted && m.gone(ctx, name):
			errs = append(errs, m.do(ctx, func() error { return ignoreMissing(os.Remove(dir)) }))
		}
	}
	return errors.Join(errs...)
}
