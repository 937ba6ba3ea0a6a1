package host

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// MountEmpty mounts an empty file system that is never writable on a directory; call it inside Do. Not the mount is read-only but the file
// system, so that a mount that replaces a copy of it, with the same flags, is writable. source is shown in mount tables.
func MountEmpty(dir *os.File, source, selinuxContext string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("mounting an empty file system on %s: %w", dir.Name(), err)
		}
	}()
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
	return unix.MoveMount(mnt, "", int(dir.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}
