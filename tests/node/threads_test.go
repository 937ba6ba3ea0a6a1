//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// onThread calls fn on an OS thread of its own and gives the thread's id.
func onThread(fn func()) (id int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with it
		id = unix.Gettid()
		fn()
	}()
	<-done
	return id
}

// What Mountpoint is given is stored when close returns, also where another thread of the program closes the file than opened
// it, as it goes in programs of many threads. Mountpoint has to see its callers for that: it takes the close of another
// process for one of many.
func TestAClosedFileIsStoredWhicheverThreadClosesIt(t *testing.T) {
	rigtest.ProcessOnly(t, "closing files is the client's own doing")
	t.Parallel()
	e := start(t)
	v := static("threads", mountpoint)
	target := e.publish(v, "t")
	keep := make(chan struct{}) // a thread that has ended has no process any more
	defer close(keep)
	for i := range 3 {
		name := fmt.Sprintf("file-%d", i)
		var f *os.File
		var err error
		opened := make(chan int)
		go func() {
			runtime.LockOSThread()
			f, err = os.Create(filepath.Join(target, name))
			opened <- unix.Gettid()
			<-keep
		}()
		opener := <-opened
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("closed"); err != nil {
			t.Fatal(err)
		}
		if closer := onThread(func() { err = f.Close() }); err != nil || closer == opener {
			t.Fatalf("thread %d opened, thread %d closed: %v", opener, closer, err)
		}
		rigtest.Kill(e.t, e.client(mountpoint)) // so it stores nothing any more
		if got := e.Object(t, bucket, "threads/"+name); got != "closed" {
			t.Errorf("the object is %q", got)
		}
		e.await(30*time.Second, "the mount to come back", func() bool { _, err := os.ReadDir(target); return err == nil })
	}
	e.unpublish(v, target)
	e.awaitNothingLeft(5 * time.Second)
}
