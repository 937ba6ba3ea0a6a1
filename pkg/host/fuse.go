package host

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// FuseDevice is the path of the FUSE device. Mountpoint for Amazon S3 refuses a descriptor whose link in /proc/self/fd is another
// path.
const FuseDevice = "/dev/fuse"

// maxRead is the largest read request, in bytes, that the kernel sends (its own limit is 1 MiB: FUSE_MAX_MAX_PAGES).
const maxRead = 1 << 20

// FuseMount is how a FUSE file system is mounted.
type FuseMount struct {
	// Source is shown in mount tables: "s3csi:…". It must not contain commas or control characters.
	Source string
	// UID and GID are those of the client's process. The kernel shows them as the mount's owner.
	UID, GID uint32
	ReadOnly bool
	// SELinuxContext labels every file; it may be quoted. "" sets no label. SELinux must be enabled on the host.
	SELinuxContext string
}

// OpenFuse opens the host's FUSE device for one mount; call it inside Do. The descriptor is blocking, as clients expect, and
// close-on-exec. The connection ends with the last copy of the descriptor.
func OpenFuse() (*os.File, error) {
	// Not os.OpenFile, which makes the open file non-blocking, for the client's copies, too.
	fd, err := unix.Open(FuseDevice, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case err == nil:
		return os.NewFile(uintptr(fd), FuseDevice), nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return nil, fault.Errorf(fault.Precondition, "opening %s: the host's kernel has no FUSE (modprobe fuse): %w", FuseDevice, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return nil, fault.Errorf(fault.Precondition, "opening %s: the node's container needs privileged: true: %w", FuseDevice, err)
	}
	return nil, fmt.Errorf("opening %s: %w", FuseDevice, err)
}

// MountFuse mounts the connection of an open FUSE device on a directory, both opened inside the same Do. It returns before the
// client answers: the kernel's first request waits in the device. Set-user-ID programs, devices and access times are off.
func MountFuse(fuse, dir *os.File, m FuseMount) error {
	data, err := m.data(fuse.Fd())
	if err != nil {
		return err
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME)
	if m.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	err = unix.Mount(m.Source, fdPath(dir), "fuse", flags, data)
	switch {
	case err == nil:
		return nil
	case m.SELinuxContext != "" && errors.Is(err, unix.EINVAL) && !selinuxEnabled():
		return fault.Errorf(fault.Precondition, "mounting %s on %s with SELinux context %s: "+
			"SELinux is not enabled on this host: %w", m.Source, dir.Name(), m.SELinuxContext, err)
	case errors.Is(err, unix.ENODEV):
		return fault.Errorf(fault.Precondition, "mounting %s on %s: the host's kernel has no FUSE (modprobe fuse): %w", m.Source, dir.Name(), err)
	case errors.Is(err, unix.EPERM):
		return fault.Errorf(fault.Precondition, "mounting %s on %s: the node's container needs privileged: true: %w", m.Source, dir.Name(), err)
	}
	return fmt.Errorf("mounting %s on %s: %w", m.Source, dir.Name(), err)
}

// NewFuseMount opens the FUSE device and mounts its connection on a directory of the driver's own; see OpenFuse and MountFuse.
func NewFuseMount(path string, m FuseMount) (*os.File, error) {
	dir, err := OpenDir(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fuse, err := OpenFuse()
	if err != nil {
		return nil, err
	}
	if err := MountFuse(fuse, dir, m); err != nil {
		fuse.Close()
		return nil, err
	}
	return fuse, nil
}

// selinuxContext is user:role:type, usually with a level such as s0-s0:c0.c1023 or s0:c1,c2. Quotes and white space would end the
// mount option.
var selinuxContext = regexp.MustCompile(`^[A-Za-z0-9_.-]+:[A-Za-z0-9_.-]+:[A-Za-z0-9_.-]+(:[A-Za-z0-9_.,:-]+)?$`)

// data returns the option string of mount(2) for a device that is open as fd.
func (m FuseMount) data(fd uintptr) (string, error) {
	unsafe := func(r rune) bool { return r == ',' || r < ' ' || r == 0x7f || r == utf8.RuneError }
	if m.Source == "" || strings.ContainsFunc(m.Source, unsafe) {
		return "", fault.Errorf(fault.Invalid, "mount source %q: must not contain commas or control characters", m.Source)
	}
	// rootmode is S_IFDIR; the client reports the permissions later. allow_other admits all users, and default_permissions makes
	// the kernel check the modes that the client reports.
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other,default_permissions,max_read=%d",
		fd, m.UID, m.GID, maxRead)
	if m.SELinuxContext == "" {
		return options, nil
	}
	context := m.SELinuxContext
	if len(context) > 1 && strings.HasPrefix(context, `"`) && strings.HasSuffix(context, `"`) {
		context = context[1 : len(context)-1] // kubelet passes it quoted
	}
	if !selinuxContext.MatchString(context) {
		return "", fault.Errorf(fault.Invalid, "SELinux context %q is not user:role:type[:level]", m.SELinuxContext)
	}
	// Quoted, because levels hold commas; the kernel splits options around the quotes.
	return options + `,context="` + context + `"`, nil
}

func selinuxEnabled() bool {
	known, err := os.ReadFile("/proc/filesystems")
	return err == nil && bytes.Contains(known, []byte("\tselinuxfs\n"))
}

// fdPath returns a path to an open file, for system calls that take no descriptor. It needs the host's /proc.
func fdPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// MountEmpty mounts an empty file system that is never writable on a directory of the driver's own; call it inside Do. Not the mount is read-only but the file
// system, so that a mount that replaces a copy of it, with the same flags, is writable. source is shown in mount tables.
func MountEmpty(path, source, selinuxContext string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("mounting an empty file system on %s: %w", path, err)
		}
	}()
	dir, err := OpenDir(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fs)
	options := [][2]string{{"source", source}, {"mode", "0555"}, {"nr_inodes", "2"}, {"size", "4096"}}
	if selinuxContext != "" {
		if !selinuxEnabled() {
			return fault.Errorf(fault.Precondition, "SELinux context %s: SELinux is not enabled on this host", selinuxContext)
		}
		options = append(options, [2]string{"context", selinuxContext})
	}
	for _, o := range options {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return fmt.Errorf("option %s: %w", o[0], err)
		}
	}
	if err := errors.Join(unix.FsconfigSetFlag(fs, "ro"), unix.FsconfigCreate(fs)); err != nil {
		return err
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return moveMount(mnt, dir, 0)
}
