package helper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// The files in the state directory that record how a client exited. They outlive the helper.
const (
	FileExit  = "mount.exit"  // the exit was expected
	FileError = "mount.error" // it was not
)

// maxEnd bounds such a file, in bytes.
const maxEnd = 64 << 10

// End is how a mount's client exited.
type End struct {
	Expected bool      `json:"-"` // which of the files it is
	Code     int       `json:"code"`
	Signal   string    `json:"signal,omitempty"`
	When     time.Time `json:"when"`
	Reason   string    `json:"reason,omitempty"` // for an operator; empty after a clean exit
	Tail     []string  `json:"tail,omitempty"`   // the end of the client's output, unless it exited cleanly
	Starts   int       `json:"starts"`           // clients that this helper started; 0: the mount was never ready
}

// writeEnd writes the file of this exit and removes the other one. The space in the directory is limited: if the client used it
// up, its files are removed, because it has exited.
func writeEnd(stateDir string, end End) error {
	err := tryWriteEnd(stateDir, end)
	if !errors.Is(err, unix.ENOSPC) {
		return err
	}
	cleared := clearState(stateDir)
	if err := tryWriteEnd(stateDir, end); err != nil {
		return errors.Join(err, cleared)
	}
	return nil
}

// clearState removes everything from the state directory, the helper's log included.
func clearState(stateDir string) error {
	entries, err := os.ReadDir(stateDir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, osfile.RemoveTree(context.Background(), filepath.Join(stateDir, e.Name()))) // its file system is small
	}
	return errors.Join(errs...)
}

func tryWriteEnd(stateDir string, end End) error {
	name, other := FileError, FileExit
	if end.Expected {
		name, other = FileExit, FileError
	}
	body, err := json.Marshal(end)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := (osfile.Writer{}).Write(filepath.Join(stateDir, name), append(body, '\n')); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return os.RemoveAll(filepath.Join(stateDir, other))
}

func removeEnd(stateDir string) error {
	return errors.Join(os.RemoveAll(filepath.Join(stateDir, FileExit)), os.RemoveAll(filepath.Join(stateDir, FileError)))
}

// ReadEnd reads how the last client exited from a mount's state directory; ok is false if there is no record. The directory
// belongs to the mount's uid, so links are not followed and the read is bounded.
func ReadEnd(stateDir string) (end End, ok bool, err error) {
	for _, name := range []string{FileExit, FileError} {
		end, err := readEnd(filepath.Join(stateDir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return End{}, false, fmt.Errorf("read %s of the mount: %w", name, err)
		}
		end.Expected = name == FileExit
		return end, true, nil
	}
	return End{}, false, nil
}

func readEnd(path string) (End, error) {
	// NONBLOCK: a FIFO with this name must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return End{}, err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return End{}, errors.Join(errors.New("not a regular file"), err)
	}
	body, err := io.ReadAll(io.LimitReader(f, maxEnd))
	if err != nil {
		return End{}, err
	}
	var end End
	if err := json.Unmarshal(body, &end); err != nil {
		return End{}, fmt.Errorf("not a valid record: %w", err)
	}
	return end, nil
}
