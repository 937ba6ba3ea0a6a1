package osfile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
)

// Locks are between processes (flock(2)). The kernel releases a lock when the last descriptor of the open file is closed, also when the
// process is killed.

// retryInterval is the time between two attempts of Lock.
const retryInterval = 20 * time.Millisecond

// TryLock takes an exclusive lock. ok is false if the file is locked by another open of it, in this process or another one.
func TryLock(f *os.File) (ok bool, err error) { return try(f, unix.LOCK_EX) }

// TryRLock takes a shared lock. ok is false if another open of the file has an exclusive one.
func TryRLock(f *os.File) (ok bool, err error) { return try(f, unix.LOCK_SH) }

// Lock is TryLock that retries while the file is locked. When ctx ends first, its error is in the chain.
func Lock(ctx context.Context, f *os.File) error {
	for {
		ok, err := TryLock(f)
		if ok || err != nil {
			return err
		}
		if !conc.Sleep(ctx, retryInterval) {
			return fmt.Errorf("lock %s: another process holds it: %w", f.Name(), ctx.Err())
		}
	}
}

func try(f *os.File, kind int) (bool, error) {
	for {
		err := unix.Flock(int(f.Fd()), kind|unix.LOCK_NB)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, unix.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, unix.EINTR):
			return false, &os.PathError{Op: "lock", Path: f.Name(), Err: err}
		}
	}
}
