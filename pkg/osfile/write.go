// Package osfile writes, locks and removes files, also those that other users may change, and passes descriptors.
package osfile

import (
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
	dir, temp := filepath.Dir(file), file+TempSuffix
	if w.Temp != "" {
		temp = filepath.Join(dir, w.Temp)
	}
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// O_EXCL follows no symbolic link, and never writes to a file that has another name.
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
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
		err = os.Rename(temp, file)
	}
	if err != nil {
		_ = os.Remove(temp) // the cause matters more
		return err
	}
	if w.Durable {
		return SyncDir(dir)
	}
	return nil
}

// SyncDir makes the names in a directory survive a power cut.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return errors.Join(f.Sync(), f.Close())
}
