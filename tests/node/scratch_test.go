//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// fill writes files as a uid until it gets an error, at most limit bytes and files, and returns how many it wrote. Half of the
// space goes to a file, the rest to names, so that a file system without any kind of space is left.
func fill(dir string, uid int, limit int64) (bytes, files int64, err error) {
	done := make(chan struct{})
	go func() { // the thread ends with it, because it is never unlocked
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			bytes, files, err = fill(dir, uid, limit)
			runtime.UnlockOSThread()
			return
		}
		if err = (intruder{uid: uid}).become(); err != nil {
			return
		}
		var f *os.File
		if f, err = os.Create(filepath.Join(dir, "large")); err != nil {
			return
		}
		defer f.Close()
		block := make([]byte, 64<<10)
		for bytes < limit && err == nil {
			var n int
			n, err = f.Write(block)
			bytes += int64(n)
		}
		if !errors.Is(err, unix.ENOSPC) {
			return
		}
		for err = nil; files < limit>>10 && err == nil; files++ {
			err = os.WriteFile(filepath.Join(dir, fmt.Sprint(files)), nil, 0o600)
		}
	}()
	<-done
	return bytes, files, err
}

// A client that was taken over can use up its own space, and neither the host's /run nor another mount's.
func TestAClientCannotFillTheStateDirectory(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v, other := static("filled", client), static("other", client)
		target := e.publish(v, "t")
		write(t, filepath.Join(target, "file"), "stored")
		c := e.client(client)
		states, err := filepath.Glob(filepath.Join(e.State, "mounts", "*", "state"))
		if err != nil || len(states) != 1 {
			t.Fatalf("states %q, %v", states, err)
		}
		bytes, files, err := fill(states[0], c.UID, 64<<20)
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("after %d bytes and %d files: %v", bytes, files, err)
		}
		var filled, host unix.Stat_t
		if err := errors.Join(unix.Stat(states[0], &filled), unix.Stat(e.State, &host)); err != nil || filled.Dev == host.Dev {
			t.Errorf("it filled the host's file system, %v", err)
		}
		place := e.publish(other, "other")
		write(t, filepath.Join(place, "file"), "x")
		e.restart()
		e.unpublish(v, target)
		e.unpublish(other, place)
		e.NothingLeft(t)
		if got := e.Object(t, bucket, "filled/file"); got != "stored" {
			t.Errorf("the object is %q", got)
		}
	})
}

// A driver that was killed, or an older one that knows nothing of them, leaves file systems of mounts that are gone.
func TestFileSystemsOfHelpersThatAreGoneAreRemoved(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.Kill()
	dir := filepath.Join(e.State, "scratch", "aaaaaaaaaaaaaaaaaaaaaaaa-1")
	if err := errors.Join(os.Mkdir(dir, 0o700), unix.Mount("s3csi-scratch", dir, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "file"), "x")
	e.drive()
	e.awaitNothingLeft(30e9)
}
