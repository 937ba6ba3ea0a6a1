package proc

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThrowawayThread runs fn on an OS thread that ends with it, so that fn may change the thread's root, working directory, namespaces
// and privileges. It returns when fn has.
//
// The process's first thread is never used: the runtime does not end it, and /proc/self shows its state, which would then look like
// the whole process's.
func OnThrowawayThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so the thread ends with this goroutine
		if unix.Gettid() == os.Getpid() {
			OnThrowawayThread(fn) // this thread is locked until then, so fn gets another one
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}
