//go:build linux

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

// FuseDevice is where clients expect the FUSE device to come from: Mountpoint for Amazon S3 refuses a descriptor
// whose link in /proc/self/fd reads otherwise.
const FuseDevice = "/dev/fuse"

// maxRead is the largest read request, in bytes, that the kernel sends (its own limit is 1 MiB: FUSE_MAX_MAX_PAGES).
const maxRead = 1 << 20

// FuseMount is how a FUSE file system is mounted.
type FuseMount struct {
	// Source is what mount tables show: "s3csi:…". No commas, no control characters.
	Source string
	// UID and GID are the client's process; the kernel shows them as the mount's owner.
	UID, GID uint32
	ReadOnly bool
	// SELinuxContext labels every file, quoted or not; "" is no option. SELinux must be enabled on the host.
	SELinuxContext string
}

// OpenFuse opens the FUSE device for one mount; call it inside Do, so that it is the host's. The descriptor is
// blocking, as clients expect, and not inherited. The connection lives as long as any copy of it.
func OpenFuse() (*os.File, error) {
	// Not os.OpenFile: that makes the open file non-blocking, for the client's copies too.
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

// MountFuse mounts the connection of an open FUSE device on a directory, both from inside the same Do. It returns
// before the client has said anything: the kernel's first request waits in the device. Set-user-ID programs, devices
// and access times are off.
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

// selinuxContext is user:role:type, mostly with a level such as s0-s0:c0.c1023 or s0:c1,c2. Quotes and white space
// would end the option.
var selinuxContext = regexp.MustCompile(`^[A-Za-z0-9_.-]+:[A-Za-z0-9_.-]+:[A-Za-z0-9_.-]+(:[A-Za-z0-9_.,:-]+)?$`)

// data is the option string of mount(2) for a device that is open as fd.
func (m FuseMount) data(fd uintptr) (string, error) {
	unsafe := func(r rune) bool { return r == ',' || r < ' ' || r == 0x7f || r == utf8.RuneError }
	if m.Source == "" || strings.ContainsFunc(m.Source, unsafe) {
		return "", fault.Errorf(fault.Invalid, "mount source %q: it must have no commas and no control characters", m.Source)
	}
	// rootmode is S_IFDIR: the client tells the permissions later. allow_other lets in everybody, default_permissions
	// makes the kernel check the modes that the client shows.
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

// selinuxEnabled tells whether the running kernel has SELinux on.
func selinuxEnabled() bool {
	known, err := os.ReadFile("/proc/filesystems")
	return err == nil && bytes.Contains(known, []byte("\tselinuxfs\n"))
}

// fdPath is a path for system calls that take no descriptor. It needs the host's /proc.
func fdPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
