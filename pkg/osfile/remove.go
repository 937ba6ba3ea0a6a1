package osfile

import (
	"context"
	"errors"
	"io/fs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// RemoveTree removes a file, or a directory and everything below it, which another user made, perhaps deep or wide on purpose. It uses two
// descriptors, and 16 bytes of memory for each level. It follows no symbolic links below the path, and fails at a mount point. If the path
// does not exist, it returns nil. What was removed before an error, or before ctx ended, stays removed, and a later call continues there.
func RemoveTree(ctx context.Context, path string) error {
	for {
		// A directory that was emptied may not be empty: file systems may skip entries while others are removed.
		full, err := unlink(unix.AT_FDCWD, path, unix.DT_UNKNOWN)
		if err == nil && full {
			err = empty(ctx, path)
		}
		if err != nil {
			return &fs.PathError{Op: "remove", Path: path, Err: err}
		}
		if !full {
			return nil
		}
	}
}

func empty(ctx context.Context, path string) error {
	w := walk{dir: unix.AT_FDCWD, entries: make([]byte, 32<<10)}
	defer w.close()
	if err := w.enter(path); err != nil {
		return err
	}
	for len(w.levels) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := unix.Getdents(w.dir, w.entries)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil && !errors.Is(err, unix.ENOENT): // the directory itself was removed
			return err
		case n > 0:
			err = w.remove(ctx, w.entries[:n])
		default:
			err = w.leave()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// walk is a position in a tree.
type walk struct {
	dir     int     // the last level
	levels  []level // from the root
	entries []byte  // the buffer for entries of a directory
}

type level struct {
	inode  uint64
	offset int64 // in the directory, of the entry that is removed next
}

func (w *walk) close() {
	if w.dir >= 0 {
		_ = unix.Close(w.dir)
	}
}

// remove removes entries of the directory. It enters the first one that is a directory with entries, and leaves the others for later.
func (w *walk) remove(ctx context.Context, entries []byte) error {
	const nameOffset = unsafe.Offsetof(unix.Dirent{}.Name)
	here := &w.levels[len(w.levels)-1]
	for len(entries) > 0 {
		e := (*unix.Dirent)(unsafe.Pointer(&entries[0])) //nolint:gosec // getdents64(2) aligns entries
		name := unix.ByteSliceToString(entries[nameOffset:e.Reclen])
		offset, kind := e.Off, e.Type
		entries = entries[e.Reclen:]
		if name != "." && name != ".." {
			if err := ctx.Err(); err != nil {
				return err
			}
			if full, err := unlink(w.dir, name, kind); err != nil {
				return err
			} else if full {
				return w.enter(name)
			}
		}
		here.offset = offset
	}
	return nil
}

// enter goes down to a directory with entries, which is therefore no mount point: rmdir(2) fails with EBUSY on those.
func (w *walk) enter(name string) error {
	dir, inode, err := open(w.dir, name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	w.close()
	w.dir, w.levels = dir, append(w.levels, level{inode: inode})
	return nil
}

// leave goes up to the entry of the directory, which is empty as a rule.
func (w *walk) leave() error {
	w.levels = w.levels[:len(w.levels)-1]
	if len(w.levels) == 0 {
		return nil
	}
	dir, inode, err := open(w.dir, "..")
	if err != nil {
		return err
	}
	w.close()
	w.dir = dir
	above := w.levels[len(w.levels)-1]
	if inode != above.inode {
		return errors.New("a directory below it was moved meanwhile")
	}
	_, err = unix.Seek(dir, above.offset, unix.SEEK_SET)
	return err
}

// unlink removes an entry. It reports whether it is a directory with entries. An entry that does not exist is no error.
func unlink(dir int, name string, kind uint8) (full bool, err error) {
	if kind != unix.DT_DIR {
		err = unix.Unlinkat(dir, name, 0)
	}
	if kind == unix.DT_DIR || errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	}
	switch {
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return true, nil
	case errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, err
}

func open(dir int, name string) (fd int, inode uint64, err error) {
	fd, err = unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, 0, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, 0, errors.Join(err, unix.Close(fd))
	}
	return fd, st.Ino, nil
}
