//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/containers/agent"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A process of a container that has a read-only subpath of a volume, and /dev/fuse, mounts a file system that has the volume's
// name and is stale. When the volume heals, that one does not become the volume.
func TestAForgedMountIsNotHealed(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	rigtest.ProcessOnly(t, "the tests' host with a systemd has no whole /proc, without which the kernel refuses to mount one in a user namespace")
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "victim/tenant/file", "of the tenant")
		e.Put(t, bucket, "victim/other/file", "of another tenant")
		v := static("victim", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		subpath := e.subpath(podUID, "pv", "tenant")
		c := containers.Start(t, containers.Options{
			PodUID: podUID, Capabilities: true, Fuse: true, Own: map[string]string{"fake/file": "under the fake"},
			Mounts: []containers.Mount{{Source: subpath, Target: "/sub", ReadOnly: true}},
		})
		if err := c.Nest(t.Context()); err != nil {
			t.Skipf("needs user namespaces in containers: %v", err)
		}
		name := mountsAt(t, target)[0].Source
		if _, err := c.Nested(t.Context(), agent.OpFuse, "/fake", name); err != nil {
			t.Skipf("needs FUSE in user namespaces: %v", err)
		}
		if _, err := c.Nested(t.Context(), agent.OpDrop, "", ""); err != nil {
			t.Fatal(err)
		}
		rigtest.Kill(e.t, e.client(client))
		reads(t, c, eventually, "/sub/file", "of the tenant")
		e.await(eventually, "the containers to be looked at", func() bool { return e.count("s3csi_mount_heals_total", "container", "failed") > 0 })
		for _, path := range []string{"/fake/other/file", "/fake/file"} {
			if got, err := c.Nested(t.Context(), agent.OpRead, path, ""); !errors.Is(err, unix.ENOTCONN) {
				t.Errorf("%s reads %q, %v", path, got.Content, err)
			}
		}
		if _, err := c.Nested(t.Context(), agent.OpWrite, "/fake/other/file", "changed"); err == nil {
			t.Error("the container wrote to the whole volume")
		}
		if _, err := c.Nested(t.Context(), agent.OpRemount, "/sub", ""); err == nil {
			t.Error("the container made its read-only subpath writable")
		}
		if err := c.Write(t.Context(), "/sub/new", "x"); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to the read-only subpath: %v", err)
		}
		e.logged("Stale mount not replaced", "at /fake ", "forged")
		stop(t, c)
		if err := unix.Unmount(subpath, 0); err != nil {
			t.Error(err)
		}
		e.unpublish(v, target)
		e.awaitNothingLeft(eventually)
	})
}

// Former file systems are pinned only as long as something shows them.
func TestFormerFileSystemsAreForgottenWhenNothingShowsThem(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	rigtest.ProcessOnly(t, "the tests' host with a systemd has no whole /proc, without which the kernel refuses to mount one in a user namespace")
	e := start(t)
	v := static("pins", mountpoint)
	target := e.podTarget(podUID, "pv")
	e.publishAt(v, target)
	pins := func() []string {
		all, err := filepath.Glob(filepath.Join(e.State, "sources", "*.*"))
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	kill := func() {
		t.Helper()
		rigtest.Kill(e.t, e.client(mountpoint))
		e.await(eventually, "the target to be healed", func() bool {
			_, err := os.Stat(target)
			return err == nil
		})
	}
	kill()
	e.await(eventually, "the former file system to be forgotten", func() bool { return len(pins()) == 0 })
	// A read-only copy in a user namespace is left until its container ends.
	c := containers.Start(t, containers.Options{PodUID: podUID, UserNamespace: true, Mounts: []containers.Mount{{Source: target, Target: "/ro", ReadOnly: true}}})
	kill()
	e.logged("Stale mount not replaced", "at /ro ")
	if got := pins(); len(got) != 1 {
		t.Errorf("pinned: %q", got)
	}
	e.restart() // it is known to the next driver too
	if n := len(ours(t, c.PID, "pins")); n != 1 {
		t.Errorf("the container has %d mounts of the volume", n)
	}
	stop(t, c)
	e.unpublish(v, target)
	if got := pins(); len(got) != 0 {
		t.Errorf("left: %q", got)
	}
	e.awaitNothingLeft(eventually)
}

// Where the source was unmounted by hand the host's targets still tell which file system is the volume's.
func TestAVolumeHealsWhoseSourceWasUnmountedByHand(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "hand/file", "content")
		v := static("hand", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		c := containers.Start(t, containers.Options{PodUID: podUID, Mounts: []containers.Mount{{Source: target, Target: "/data"}}})
		reads(t, c, eventually, "/data/file", "content")
		e.Kill()
		rigtest.Kill(e.t, e.client(client))
		shown := mountsAt(t, target)[0].Source
		source := filepath.Join(e.State, "sources", shown[strings.LastIndexByte(shown, ':')+1:])
		if err := unix.Unmount(source, unix.UMOUNT_NOFOLLOW); err != nil {
			t.Fatal(fmt.Errorf("unmounting %s: %w", source, err))
		}
		e.drive()
		reads(t, c, eventually, "/data/file", "content")
		stop(t, c)
		e.unpublish(v, target)
		e.awaitNothingLeft(eventually)
	})
}
