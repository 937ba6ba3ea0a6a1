//go:build !lane || ordinary

package node

import (
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A publication with another secret continues with it, on the same client; none with the old secret can join.
func TestARotatedSecretIsTakenOverInPlace(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		first := e.user("owner")
		second := e.anotherKey("owner")
		v := static("rotated", client)
		target := e.publish(v, "a", secrets(first))
		write(t, filepath.Join(target, "before"), "before")
		open, err := os.Open(filepath.Join(target, "before"))
		if err != nil {
			t.Fatal(err)
		}
		defer open.Close()
		for range 2 {
			e.publish(v, "a", secrets(second))
		}
		write(t, filepath.Join(target, "after"), "after")
		if b, err := io.ReadAll(open); err != nil || string(b) != "before" {
			t.Errorf("the open file reads %q, %v", b, err)
		}
		if n := e.lives(); n != 1 {
			t.Errorf("%d mounts were made", n)
		}
		e.publish(v, "b", secrets(first))
		if n := len(e.Running(programs[client])); n != 2 {
			t.Errorf("with the old secret there are %d clients", n)
		}
		e.unpublish(v, e.Target("b"))
		// What is known of it is known to the next driver.
		e.Kill()
		e.drive()
		e.publish(v, "a", secrets(second))
		if n := len(e.Running(programs[client])); n != 1 {
			t.Errorf("after a restart of the driver there are %d clients", n)
		}
		// And back again: the first secret is as good as any.
		e.publish(v, "a", secrets(first))
		e.publish(v, "c", secrets(first))
		if n := len(e.Running(programs[client])); n != 1 {
			t.Errorf("back with the first secret there are %d clients", n)
		}
		open.Close()
		e.unpublish(v, target)
		e.unpublish(v, e.Target("c"))
		for _, name := range []string{"before", "after"} {
			if got := e.Object(t, bucket, "rotated/"+name); got != name {
				t.Errorf("%s is %q in the bucket", name, got)
			}
		}
		e.NothingLeft(t)
	})
}

// Where the old keys are worthless already, the volume works again as soon as the new ones come, in containers too.
func TestASecretThatWasRotatedTooLate(t *testing.T) {
	rigtest.ProcessOnly(t, "a helper takes a new secret in the same way with each launcher")
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		const pod = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d61a"
		first := e.user("owner")
		second := e.anotherKey("owner")
		v, target := static("late", client), e.podTarget(pod, "pv")
		e.publishAt(v, target, secrets(first))
		c := containers.Start(t, containers.Options{PodUID: pod, Mounts: []containers.Mount{{Source: target, Target: "/data"}},
			Own: map[string]string{"data/file": "its own"}})
		write(t, filepath.Join(target, "file"), "content")
		e.await(10*time.Second, "the upload", func() bool { return len(e.Keys(t, bucket, "late/file")) == 1 })
		e.revoke("owner", first)
		e.await(30*time.Second, "the old keys to be refused", func() bool {
			_, err := os.ReadDir(target)
			return err != nil
		})
		e.publishAt(v, target, secrets(second))
		e.awaitRead(eventually, filepath.Join(target, "file"), "content")
		e.await(eventually, "the container to read again", func() bool {
			got, err := c.Read(t.Context(), "/data/file")
			return err == nil && got == "content"
		})
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		e.unpublish(v, target)
		e.awaitNothingLeft(eventually)
	})
}

// Publications that share a mount get a new secret one after the other. Where the client keeps nothing back, each moves to a
// mount of the new secret, and what is open stays open; else all of them stay, and have it when the last one has come with it.
func TestARotatedSecretOfASharedMount(t *testing.T) {
	rigtest.ProcessOnly(t, "a helper takes a new secret in the same way with each launcher")
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		const pod = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d61b"
		first := e.user("owner")
		second := e.anotherKey("owner")
		v, a := static("both", client), e.podTarget(pod, "pv")
		e.Put(t, bucket, "both/file", "content")
		e.publishAt(v, a, secrets(first))
		b := e.publish(v, "b", secrets(first))
		c := containers.Start(t, containers.Options{PodUID: pod, Mounts: []containers.Mount{{Source: a, Target: "/data"}},
			Own: map[string]string{"data/file": "its own"}})
		watch := c.Watch("/data/file")
		open, err := os.Open(filepath.Join(a, "file"))
		if err != nil {
			t.Fatal(err)
		}
		defer open.Close()
		before := mountsAt(t, a)[0].Source
		err = e.tryPublish(time.Minute, v, a, secrets(second))
		if client == rclone {
			want(t, err, codes.Unavailable, "keeps its session", b)
			if n := e.lives(); n != 1 {
				t.Errorf("%d mounts were made", n)
			}
		} else {
			if err != nil {
				t.Fatal(err)
			}
			if now := mountsAt(t, a)[0].Source; now == before {
				t.Errorf("the publication is on %s yet", now)
			}
			if got := mountsAt(t, b)[0].Source; got != before {
				t.Errorf("the other publication is on %s", got)
			}
			e.publishAt(v, b, secrets(first)) // which is as good as it was
		}
		e.publishAt(v, b, secrets(second))
		e.publishAt(v, a, secrets(second))
		e.publishAt(v, b, secrets(second))
		if got := mountsAt(t, b)[0].Source; got != mountsAt(t, a)[0].Source || client == rclone && got != before {
			t.Errorf("the publications are on %s and %s", mountsAt(t, a)[0].Source, got)
		}
		if got, err := io.ReadAll(open); err != nil || string(got) != "content" {
			t.Errorf("the open file reads %q, %v", got, err)
		}
		if err := open.Close(); err != nil {
			t.Error(err)
		}
		if unwanted := watch.Unwanted("content"); len(unwanted) > 0 {
			t.Errorf("the container read meanwhile: %+v", unwanted)
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		e.await(time.Minute, "the former mount to end", func() bool { return len(e.Running(programs[client])) == 1 })
		e.unpublish(v, a)
		e.unpublish(v, b)
		e.NothingLeft(t)
	})
}
