package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// The state directory is on the host's /run as a rule, and a client can write to its part of it. So that no client fills
// /run, and none takes space from another, each mount's part is a small tmpfs of its own on scratch/<name>.
// mounts/<name>/state is a symbolic link to it, whose owner is the mount's uid.
const (
	// The files there are the client's last output (64 KiB), the helper's log (256 KiB), and what a client puts into HOME and
	// TMPDIR, which those of this driver do not use.
	scratchSize   = "8m"
	scratchInodes = 512
)

// makeHelperDir makes a mount's part of the state directory, owned by the mount's uid. It can be repeated after a crash.
func (s *Store) makeHelperDir(name string, uid int) error {
	if err := s.mountScratch(name, uid); err != nil {
		return err
	}
	failpoint.Here("make.scratch")
	return s.linkScratch(name, uid)
}

// mountScratch mounts a tmpfs on scratch/<name>, unless something is mounted there.
func (s *Store) mountScratch(name string, uid int) error {
	dir := s.scratchDir(name)
	if err := os.Mkdir(dir, modeClosed); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if mounted, err := isMountPoint(dir); err != nil {
		return err
	} else if !mounted {
		options := fmt.Sprintf("mode=0700,uid=%d,gid=%d,size=%s,nr_inodes=%d", uid, uid, scratchSize, scratchInodes)
		if err := unix.Mount("s3csi-scratch", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return fmt.Errorf("mounting a tmpfs on %s: %w", dir, err)
		}
	}
	return nil
}

// linkScratch makes a mount's HelperDir a link to its file system.
func (s *Store) linkScratch(name string, uid int) error {
	if err := os.Symlink(filepath.Join("..", "..", "scratch", name), s.HelperDir(name)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Lchown(s.HelperDir(name), uid, uid) // by which owner finds it
}

// RestoreHelperDir mounts the file system of a mount's HelperDir again if it was unmounted, for example by a reboot that the state
// directory outlived.
func (s *Store) RestoreHelperDir(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error { return s.makeHelperDir(m.Name, int(m.UID)) })
}

// removeScratch removes a mount's tmpfs, if it has one. The files are removed first, so that a copy of the tmpfs in another mount
// namespace, such as that of a container that sees the host's files, keeps no memory.
func (s *Store) removeScratch(ctx context.Context, name string) error {
	dir := s.scratchDir(name)
	mounted, err := isMountPoint(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	if mounted {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := osfile.RemoveTree(ctx, filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
		// Detached: a process that looks through the host's files must not keep it.
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmounting %s: %w", dir, err)
		}
		failpoint.Here("remove.scratch")
	}
	return ignoreMissing(os.Remove(dir))
}

// RemoveOrphans removes the file systems of mounts that are gone.
func (s *Store) RemoveOrphans(ctx context.Context) error {
	return s.do(ctx, func() error {
		entries, err := os.ReadDir(s.scratch())
		errs := []error{ignoreMissing(err)}
		for _, e := range entries {
			// Of a mount that comes up now, the other directory is there first.
			if !isSpare(e.Name()) && !s.exists(filepath.Join(mountsDir, e.Name())) {
				errs = append(errs, s.removeScratch(ctx, e.Name()))
			}
		}
		return errors.Join(errs...)
	})
}

// isMountPoint reports whether a file system other than its parent's is mounted on a directory.
func isMountPoint(dir string) (bool, error) {
	var here, above unix.Stat_t
	if err := unix.Lstat(dir, &here); err != nil {
		return false, &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if err := unix.Lstat(filepath.Dir(dir), &above); err != nil {
		return false, &fs.PathError{Op: "lstat", Path: filepath.Dir(dir), Err: err}
	}
	return here.Dev != above.Dev, nil
}
