// Package osfile writes, locks and removes files, also those that other users may change, and passes descriptors.
package osfile

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// TempSuffix ends the name of a temporary file that has no other name.
const TempSuffix = ".tmp"

// Writer replaces files as a whole: a reader, or a process that starts after a crash, sees the old content or the new content and never
// a part of it. There must be only one writer of a file at a time, because a temporary file that a killed writer left
// behind is removed. The zero value writes files of mode 0600 that are not synced.
type Writer struct {
	// Root is the directory that the file's path is relative to. nil: the path is absolute, or relative to the working directory.
	Root *os.Root
	// Mode is the file's mode, regardless of the umask. 0 is 0600.
	Mode fs.FileMode
	// Durable syncs the file before the rename and its directory after it, so that the new content survives a power cut.
	Durable bool
	// Temp is the name of the temporary file, in the file's directory. "" is the file's name with TempSuffix.
	Temp string
	// BeforeRename is called when the temporary file is complete. nil: nothing is called.
	BeforeRename func()
}

// Write replaces the content of a file, or creates it.
func (w Writer) Write(file string, content []byte) error {
	return w.WriteFrom(file, func(to io.Writer) error {
		_, err := to.Write(content)
		return err
	})
}

// WriteFrom is Write for content that fill writes. If fill fails, its error is returned as it is and the file stays unchanged.
func (w Writer) WriteFrom(file string, fill func(io.Writer) error) error {
	if w.Root != nil {
		return w.write(w.Root, file, fill)
	}
	root, err := os.OpenRoot(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := w.write(root, filepath.Base(file), fill); err != nil {
		return fmt.Errorf("writing %s: %w", file, err)
	}
	return nil
}

func (w Writer) write(root *os.Root, file string, fill func(io.Writer) error) error {
	temp := filepath.Join(filepath.Dir(file), cmp.Or(w.Temp, filepath.Base(file)+TempSuffix))
	if err := root.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// O_EXCL follows no symbolic link, and never writes to a file that has another name.
	f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = fill(f)
	if err == nil && w.Mode != 0 {
		err = f.Chmod(w.Mode)
	}
	if err == nil && w.Durable {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		if w.BeforeRename != nil {
			w.BeforeRename()
		}
		err = root.Rename(temp, file)
	}
	if err != nil {
		_ = root.Remove(temp) // the cause matters more
		return err
	}
	if w.Durable {
		return syncNames(root.Open(filepath.Dir(file)))
	}
	return nil
}

// SyncDir makes the names in a directory survive a power cut.
func SyncDir(dir string) error { return syncNames(os.Open(dir)) }

func syncNames(dir *os.File, err error) error {
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return errors.Join(dir.Sync(), dir.Close())
}
