package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// A volume can be a snapshot itself. No pod can write to it.
func TestASnapshotIsMountedReadOnly(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, ".s3-csi/snapshots/s@1/data/dir/file", "content")
		e.Put(t, bucket, ".s3-csi/snapshots/s@1/manifest/00000000", "{}")
		e.Put(t, bucket, ".s3-csi/snapshots/s@10/data/other", "of another snapshot")
		v := static("snapshot", client, "snapshot", "s@1")
		delete(v.VolumeContext, "prefix")
		target := e.publish(v, "snapshot")
		if got := read(t, filepath.Join(target, "dir", "file")); got != "content" {
			t.Errorf("the file reads %q", got)
		}
		if got := list(t, target); !slices.Equal(got, []string{"dir"}) {
			t.Errorf("the root lists %q", got)
		}
		for _, name := range []string{"new", "dir/file"} {
			if err := os.WriteFile(filepath.Join(target, name), []byte("x"), 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing %s: %v", name, err)
			}
		}
		e.unpublish(v, target)
	})
}
