package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// uidLocks is the directory of this host with a file for each range of uids in use, <first>-<last>. It is the same for all drivers.
const uidLocks = "/run/s3-csi-uids"

// locks exclude other drivers from directories and uids for as long as the files are open. A child that a driver was starting when it was
// killed has the locks until it executes its own program.
type locks []*os.File

// Close releases the locks.
func (l locks) Close() error {
	var errs []error
	for _, f := range l {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// lockDirs locks the state directory, and the cache directory, which a driver with another state directory may use.
func (s *Store) lockDirs() (held locks, err error) {
	for _, d := range []struct{ dir, flags string }{{s.Dir, "--state-dir, --cache-dir and --uid-range"}, {s.Cache, "--cache-dir"}} {
		f, err := s.lockFile(filepath.Join(d.dir, "lock"), "another driver is using "+d.dir, d.flags)
		if err != nil {
			return nil, errors.Join(err, held.Close())
		}
		held = append(held, f)
	}
	return held, nil
}

// LockUIDs fails if another driver of this host uses any of the uids: each finds, and kills, the processes of its mounts by their uids. The
// lock is held until Close.
func (s *Store) LockUIDs(ctx context.Context, first, last uint32) error {
	f, err := host.Call(ctx, s.ns, "locking user ids", func(f *os.File) { f.Close() }, func() (*os.File, error) {
		return s.lockUIDs(ctx, uidLocks, first, last)
	})
	if err != nil {
		return fmt.Errorf("--uid-range %d-%d: %w", first, last, err)
	}
	s.held = append(s.held, f)
	return nil
}

func (s *Store) lockUIDs(ctx context.Context, dir string, first, last uint32) (*os.File, error) {
	if err := os.MkdirAll(dir, modeClosed); err != nil {
		return nil, err
	}
	all, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer all.Close()
	if err := osfile.Lock(ctx, all); err != nil { // for this function only
		return nil, err
	}
	names, err := all.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	const used = "another driver uses some of these user ids"
	for _, name := range names {
		var from, to uint32
		if _, err := fmt.Sscanf(name, "%d-%d", &from, &to); err != nil || to < first || last < from {
			continue
		}
		f, err := s.lockFile(filepath.Join(dir, name), used, "--uid-range")
		if err != nil {
			return nil, err
		}
		// Its driver has exited.
		if err := errors.Join(os.Remove(f.Name()), f.Close()); err != nil {
			return nil, err
		}
	}
	return s.lockFile(filepath.Join(dir, fmt.Sprintf("%d-%d", first, last)), used, "--uid-range")
}

// lockFile locks a file and writes there who has the lock, for the error of another driver.
func (s *Store) lockFile(file, used, flags string) (*os.File, error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockBound)
	defer cancel()
	if err = osfile.Lock(ctx, f); err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintf(f, "pid %d, --state-dir %s", os.Getpid(), s.Dir)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		other, _ := io.ReadAll(io.LimitReader(f, 1<<10)) // only for the text
		err = fmt.Errorf("%s (%s): stop that driver, or give this one its own %s", used, other, flags)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
