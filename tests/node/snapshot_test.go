//go:build !lane || ordinary

package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A volume can be a snapshot itself. No pod can write to it.
func TestASnapshotIsMountedReadOnly(t *testing.T) {
	rigtest.ProcessOnly(t, "snapshots are mounted like any volume")
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

// What a snapshot has of files that a node still has to store: those that are stored when it is made, and no others, also when the node comes back and
// stores them later. When the unpublish has returned, a snapshot has everything.
func TestASnapshotHasWhatIsStored(t *testing.T) {
	rigtest.ProcessOnly(t, "snapshots are mounted like any volume")
	t.Parallel()
	e := newEnv(t)
	e.Driver = e.Drive(t, "all")
	v := e.create("source", rclone, 0)
	snapshot := func(name string) []string {
		t.Helper()
		for {
			s, err := e.CreateSnapshot(rigtest.Context(t, time.Minute), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.GetVolumeId()})
			if status.Code(err) == codes.Aborted {
				continue
			}
			if err != nil || !s.GetSnapshot().GetReadyToUse() {
				t.Fatal(s, err)
			}
			return e.inSnapshot(name)
		}
	}
	target := e.publish(v, "t")
	write(t, filepath.Join(target, "first"), "content")
	e.unpublish(v, target)
	if got := snapshot("exact"); !slices.Equal(got, []string{"first"}) {
		t.Errorf("after the unpublish: %q", got)
	}

	target = e.publish(v, "t")
	e.proxy.Set(crawling)
	write(t, filepath.Join(target, "second"), random(3<<20))
	e.awaitBusy(v, target, "draining: ")
	if got := snapshot("draining"); !slices.Equal(got, []string{"first"}) {
		t.Errorf("while the node drains: %q", got)
	}
	e.Kill()
	e.Driver = e.Drive(t, "all")
	e.proxy.Set(faultproxy.Faults{})
	e.await(time.Minute, "the drain to end", func() bool { return e.tryUnpublish(20*time.Second, v, target) == nil })
	if got := e.inSnapshot("draining"); !slices.Equal(got, []string{"first"}) {
		t.Errorf("the snapshot, when the node is back: %q", got)
	}
	if got := snapshot("later"); !slices.Equal(got, []string{"first", "second"}) {
		t.Errorf("when all is stored: %q", got)
	}
}

// inSnapshot returns the keys of a snapshot.
func (e *env) inSnapshot(name string) []string {
	e.t.Helper()
	data := ".s3-csi/snapshots/" + name + "@1/data/"
	keys := e.Keys(e.t, bucket, data)
	for i, key := range keys {
		keys[i] = strings.TrimPrefix(key, data)
	}
	return keys
}
