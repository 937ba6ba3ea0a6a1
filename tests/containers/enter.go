package containers

import (
	"fmt"
	"os"
	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// Enter calls fn in the container's mount namespace, at its root, on a thread that is thrown away. A container with a user
// namespace of its own is entered as this user, so that fn may do there what the host may.
func (c *Container) Enter(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		goruntime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == os.Getpid() {
			// That thread would not end, and is what /proc/self shows: it is held while another one is used.
			done <- c.Enter(fn)
			goruntime.UnlockOSThread()
			return
		}
		done <- func() error {
			fd, err := unix.PidfdOpen(c.PID, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("entering the container's mount namespace: %w", err)
			}
			return fn()
		}()
	}()
	return <-done
}
