//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// lookUp is how names inside a file system are resolved: nothing that a container put there leads elsewhere.
const lookUp = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// openPlace opens files of any kind for their place alone.
const openPlace = unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC

// living is the mount that others are replaced by, opened.
type living struct {
	Swap
	n    *Namespace
	held *held
	root *os.File // in n's namespace
	hung error    // a look-up that its client did not answer in time; further ones are not tried
	// table is the namespace's, for what is mounted below dead mounts; read when it is needed.
	table []Mount
}

// openLiving opens s.Living and checks that it is what the caller read.
func (n *Namespace) openLiving(ctx context.Context, s Swap) (*living, error) {
	if s.Living.Root != "/" || s.Bound <= 0 || s.Dead == nil {
		return nil, fault.Errorf(fault.Invalid, "replacing dead mounts by %s: it must show its whole file system (it shows %q), "+
			"with a bound (%s) and a rule", s.Living.Mountpoint, s.Living.Root, s.Bound)
	}
	l := &living{Swap: s, n: n, held: hold()}
	what := "opening the living mount " + s.Living.Mountpoint
	err := n.Do(ctx, what, func() error {
		return using(func() error { return l.open(ctx) }, l.held)
	})
	if err != nil {
		l.held.drop()
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return l, nil
}

// open opens the root of the living mount.
func (l *living) open(ctx context.Context) error {
	fd, err := unix.Open(l.Living.Mountpoint, openPlace|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	root := l.held.add(fd, l.Living.Mountpoint)
	mounts, err := readMounts(ctx, threadMountinfo)
	if err != nil {
		return err
	}
	top, err := mountOf(root, mounts)
	if err != nil {
		return err
	}
	if top.ID != l.Living.ID || !sameDevice(top, l.Living) || top.Root != l.Living.Root {
		return fault.Errorf(fault.Busy, "another mount is there by now (%s)", top.Source)
	}
	l.root = root
	return nil
}

// ask runs fn, which may have to wait for a client, in the namespace of the living mount and within the bound. What
// it opens goes to h.
func (l *living) ask(ctx context.Context, what string, h *held, fn func(ctx context.Context) error) error {
	bounded, cancel := context.WithTimeout(For(ctx, "mount "+l.Living.Source), l.Bound)
	defer cancel()
	return l.n.Do(bounded, what, func() error {
		return using(func() error { return fn(bounded) }, l.held, h)
	})
}

// clone makes a mount of the directory (or file) that dead shows, with dead's flags and always with nosuid and nodev, which is
// attached nowhere yet.
func (l *living) clone(ctx context.Context, h *held, dead Mount) (*os.File, error) {
	rel := strings.TrimPrefix(dead.Root, "/")
	if strings.HasSuffix(rel, "//deleted") { // as mount tables show it, proc_pid_mountinfo(5)
		return nil, fault.Errorf(fault.NotFound, "what it showed (%s) had been removed", dead.Root)
	}
	if l.hung != nil && rel != "" {
		return nil, l.hung
	}
	dead.Options += ",nosuid,nodev"
	var clone *os.File
	err := l.ask(ctx, fmt.Sprintf("looking up %s in %s", dead.Root, l.Living.Mountpoint), h, func(ctx context.Context) error {
		dir, of := l.origin(ctx, h, dead)
		if rel := strings.TrimPrefix(strings.TrimPrefix(dead.Root, of.Root), "/"); rel != "" {
			fd, err := openBelow(dir, rel, openPlace)
			if err != nil {
				return err
			}
			dir = h.add(fd, dead.Root)
		}
		mnt, err := cloneMount(h, dir, of, dead)
		clone = mnt
		return err
	})
	switch {
	case err == nil:
		return clone, nil
	case isMissing(err):
		return nil, fault.Errorf(fault.NotFound, "%s is not in the volume any more: %w", dead.Root, err)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		l.hung = err
	}
	return nil, err
}

// isMissing tells that a look-up found nothing, or something that only leads elsewhere.
func isMissing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// openBelow opens rel below a directory, as lookUp says.
func openBelow(dir *os.File, rel string, flags uint64) (int, error) {
	how := unix.OpenHow{Flags: flags, Resolve: lookUp}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(int(dir.Fd()), rel, &how)
		if try < openTries && (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)) {
			continue
		}
		return fd, err
	}
}

// cloneMount makes a mount of what dir is, whose own mount is of, with the flags of like. It belongs to no peer group;
// where like is a slave it is one of of's group, if there is one.
func cloneMount(h *held, dir *os.File, of, like Mount) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("cloning the mount: %w", err)
	}
	clone := h.add(fd, dir.Name()) // a clone that was not attached goes with its descriptor
	attr := flagsOf(of, like)
	attr.Propagation = unix.MS_PRIVATE
	if isSlave(like) {
		attr.Propagation = unix.MS_SLAVE
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return nil, fmt.Errorf("setting mount flags: %w", err)
	}
	return clone, nil
}

// flagsOf turns the flags of a clone of of into those of like, as mount tables show them.
func flagsOf(of, like Mount) unix.MountAttr {
	attr := unix.MountAttr{Attr_clr: unix.MOUNT_ATTR__ATIME}
	for _, flag := range []struct {
		option string
		bit    uint64
	}{
		{"ro", unix.MOUNT_ATTR_RDONLY},
		{"nosuid", unix.MOUNT_ATTR_NOSUID},
		{"nodev", unix.MOUNT_ATTR_NODEV},
		{"noexec", unix.MOUNT_ATTR_NOEXEC},
		{"nodiratime", unix.MOUNT_ATTR_NODIRATIME},
		{"nosymfollow", unix.MOUNT_ATTR_NOSYMFOLLOW}, // Linux 5.14: asked for only where it is seen
	} {
		switch {
		case hasOption(like.Options, flag.option):
			attr.Attr_set |= flag.bit
		case hasOption(of.Options, flag.option):
			attr.Attr_clr |= flag.bit
		}
	}
	switch {
	case hasOption(like.Options, "noatime"):
		attr.Attr_set |= unix.MOUNT_ATTR_NOATIME
	case hasOption(like.Options, "relatime"):
		attr.Attr_set |= unix.MOUNT_ATTR_RELATIME
	default: // what is neither is not shown
		attr.Attr_set |= unix.MOUNT_ATTR_STRICTATIME
	}
	return attr
}

// isSlave tells whether mounts propagate to m from others.
func isSlave(m Mount) bool {
	return slices.ContainsFunc(m.Optional, func(field string) bool { return strings.HasPrefix(field, "master:") })
}

// propagationOf is the type that a replacement of m gets when it is in its place. What was attached below a shared
// mount has become shared, in a group of its own.
func propagationOf(m Mount) uint64 {
	switch {
	case slices.Contains(m.Optional, "unbindable"):
		return unix.MS_UNBINDABLE
	case peerGroup(m) != "":
		return unix.MS_SHARED // and remains a slave where it is one
	case isSlave(m):
		return unix.MS_SLAVE
	}
	return unix.MS_PRIVATE
}
