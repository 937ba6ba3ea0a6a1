package isolate

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Enter calls fn in namespaces of another process (CLONE_NEW…), at the root of its mount namespace, on a thread that is thrown
// away. Commands that fn runs are there too.
func Enter(pid, namespaces int, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == os.Getpid() {
			// That thread would not end, and is what /proc/self shows: it is held while another one is used.
			done <- Enter(pid, namespaces, fn)
			runtime.UnlockOSThread()
			return
		}
		done <- func() error {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Setns(fd, namespaces); err != nil {
				return fmt.Errorf("entering the namespaces of process %d: %w", pid, err)
			}
			return fn()
		}()
	}()
	return <-done
}
