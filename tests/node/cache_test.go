//go:build !lane || ordinary

package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// caches are the cache directories of mounts; beside them are the driver's own notes, and the directories of its spares.
func (e *env) caches() ([]string, error) {
	spares := e.Spares()
	dirs, err := filepath.Glob(filepath.Join(e.Cache, "*-*[0-9]"))
	return slices.DeleteFunc(dirs, func(dir string) bool { _, spare := spares[filepath.Base(dir)]; return spare }), err
}

// cacheOf is the cache directory of the only mount, and its owner. One that is being replaced is waited for.
func (e *env) cacheOf() (dir string, uid uint32) {
	e.t.Helper()
	e.await(5*time.Second, "the only cache directory", func() bool {
		dirs, err := e.caches()
		if err != nil || len(dirs) != 1 {
			return false
		}
		dir = dirs[0]
		return true
	})
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		e.t.Fatal(err)
	}
	if st.Mode&0o777 != 0o700 {
		e.t.Errorf("the cache can be read by others: mode %o", st.Mode)
	}
	return dir, st.Uid
}

// usage is how many bytes a directory takes on disk.
func usage(t *testing.T, dir string) (bytes int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil { // it may be removed just now
			bytes += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// A volume's cache is a directory of its mount's own, which no other user can read and which is removed with the mount, whatever exited before.
func TestACacheIsTheMountsOwn(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "cached/file", "content")
		v := static("cached", client, "cache", "true", "cacheSize", "64Mi")
		for _, ended := range []string{"nothing", "client", "client and helper", "everything"} {
			target := e.publish(v, "t")
			dir, uid := e.cacheOf()
			p := e.client(client)
			if int(uid) != p.UID {
				t.Errorf("the cache is user %d's, and the client user %d", uid, p.UID)
			}
			argv := strings.Split(read(t, fmt.Sprintf("/proc/%d/cmdline", p.PID)), "\x00")
			for _, arg := range map[string][]string{
				rclone:     {"--cache-dir=" + dir, "--read-cache", "--cache-size=64Mi"},
				mountpoint: {"--cache=" + dir, "--max-cache-size=64"},
			}[client] {
				if !slices.Contains(argv, arg) && !slices.Contains(argv, arg+"=true") {
					t.Errorf("the client is not given %s: %q", arg, argv)
				}
			}
			if got := read(t, filepath.Join(target, "file")); got != "content" {
				t.Errorf("read %q", got)
			}
			switch ended {
			case "client":
				rigtest.Kill(e.t, p)
				e.awaitRead(eventually, filepath.Join(target, "file"), "content")
			case "client and helper":
				e.killAll()
				e.awaitRead(10*time.Second, filepath.Join(target, "file"), "content") // no process reports the exit of a client whose helper is gone
			case "everything":
				e.Kill()
				e.killAll()
				e.drive()
			}
			// A client without a helper, which it is for a moment, makes way for another mount where it holds nothing back.
			if now, _ := e.cacheOf(); now != dir && (client == rclone || ended != "client and helper") {
				t.Errorf("after the end of %s the cache is %s, and was %s", ended, now, dir)
			}
			e.unpublish(v, target)
			e.awaitNothingLeft(5 * time.Second)
		}
	})
}

// A cache does not grow beyond its size by what is read, while reads that are repeated come out of it. This is
// rclone's; Mountpoint's is of its libraries.
func TestACacheIsBounded(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "how much is kept is the client's own doing")
	const size, files, each = 16 << 20, 24, 2 << 20
	e := start(t)
	for i := range files {
		e.Put(t, bucket, fmt.Sprintf("bounded/%d", i), string(bytes.Repeat([]byte{byte(i)}, each)))
	}
	v := static("bounded", rclone, "cache", "true", "cacheSize", "16Mi")
	target := e.publish(v, "t")
	dir, _ := e.cacheOf()
	readAll := func(i int) {
		t.Helper()
		if got := read(t, filepath.Join(target, fmt.Sprint(i))); len(got) != each || got[each-1] != byte(i) {
			t.Errorf("file %d has %d bytes", i, len(got))
		}
	}
	readAll(0)
	if n := usage(t, dir); n < each {
		t.Errorf("%d bytes are kept of a file of %d", n, each)
	}
	before := e.proxy.Requests()
	readAll(0)
	if n := e.proxy.Requests() - before; n > 2 {
		t.Errorf("a file that is in the cache takes %d requests", n)
	}
	rigtest.Kill(e.t, e.client(rclone)) // the next one uses what there is
	e.awaitRead(eventually, filepath.Join(target, "0"), string(make([]byte, each)))
	if n := e.proxy.Requests() - before; n > 12 {
		t.Errorf("a client that starts on a cache makes %d requests", n)
	}
	for i := range files {
		readAll(i)
	}
	// It is looked at now and then, so for a while there is more.
	defer func() {
		if t.Failed() {
			out, err := exec.CommandContext(context.Background(), "sh", "-c", "cd $0 && find . -type f -printf '%k KiB of %s, read %A+: %p\n'; ls -l /proc/$1/fd", dir,
				fmt.Sprint(e.client(rclone).PID)).CombinedOutput()
			t.Logf("the cache has, %v:\n%s", err, out)
		}
	}()
	e.await(90*time.Second, "the cache to shrink to its size", func() bool { return usage(t, dir) <= size+size/8 })
	if n := usage(t, dir); n < size/4 {
		t.Errorf("only %d bytes are kept", n)
	}
	e.unpublish(v, target)
	e.awaitNothingLeft(5 * time.Second)
}
