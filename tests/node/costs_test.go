//go:build !lane || ordinary

package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// What a client's crash loses is what docs/reference/clients.md says: nothing that was closed; of what was open for writing, with
// Mountpoint all, with rclone nothing that had been written; open files have to be opened again.
func TestCrash_LosesWhatThePageSays(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "costs/old", "as it was")
		e.Put(t, bucket, "costs/file", "content")
		v := static("costs", client)
		target := e.publish(v, "t")
		write(t, filepath.Join(target, "closed"), "closed")
		if client == rclone {
			e.await(10*time.Second, "the upload", func() bool { return slices.Contains(e.Keys(t, bucket, "costs/"), "costs/closed") })
		}
		write(t, filepath.Join(target, "just-closed"), "closed too")
		reading, err := os.Open(filepath.Join(target, "file"))
		if err != nil {
			t.Fatal(err)
		}
		defer reading.Close()
		var writing []*os.File
		for name, flags := range map[string]int{"old": os.O_WRONLY | os.O_TRUNC, "new": os.O_WRONLY | os.O_CREATE | os.O_EXCL} {
			f, err := os.OpenFile(filepath.Join(target, name), flags, 0o666)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteString("so far"); err != nil {
				t.Fatal(err)
			}
			writing = append(writing, f)
		}
		rigtest.Kill(e.t, e.client(client))
		e.awaitRead(eventually, filepath.Join(target, "just-closed"), "closed too")
		if _, err := reading.ReadAt(make([]byte, 1), 0); !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("the file that was open for reading answers %v", err)
		}
		for _, f := range writing {
			if _, err := f.WriteString("more"); !errors.Is(err, unix.ENOTCONN) {
				t.Errorf("%s, which was open for writing, answers %v", f.Name(), err)
			}
			if err := f.Close(); err == nil {
				t.Errorf("%s is closed as if nothing were lost", f.Name())
			}
		}
		e.unpublish(v, target)
		wanted := map[string]string{"closed": "closed", "just-closed": "closed too", "old": "as it was", "file": "content"}
		if client == rclone {
			wanted["old"], wanted["new"] = "so far", "so far"
		}
		if keys := e.Keys(t, bucket, "costs/"); len(keys) != len(wanted) {
			t.Errorf("the objects are %q", keys)
		}
		for name, content := range wanted {
			if got := e.Object(t, bucket, "costs/"+name); got != content {
				t.Errorf("the object %s is %q", name, got)
			}
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}
