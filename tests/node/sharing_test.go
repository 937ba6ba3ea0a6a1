//go:build !lane || ordinary

package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Publications of equal specs share a client; a difference in what decides a mount, or in whose it is, separates them.
func TestPublicationsShareAClientOnlyWithEqualSpecs(t *testing.T) {
	t.Parallel()
	e := start(t)
	one, two := e.user("one"), e.user("two")
	v := static("shared", rclone)
	type publication struct {
		volume  *csi.Volume
		target  string
		clients int // that run once it is there
		changes []change
	}
	publications := []publication{
		{v, "a", 1, nil},
		{v, "b", 1, nil},
		{v, "c", 1, []change{readOnly}},
		{static("another-handle", rclone, "prefix", "shared/"), "d", 1, nil},
		{v, "e", 2, []change{flags("transfers=2")}},
		{v, "f", 2, []change{flags("--transfers=2")}},
		{v, "g", 3, []change{secrets(one)}},
		{v, "h", 3, []change{secrets(one)}},
		{v, "i", 4, []change{secrets(two)}},
		{static("shared", rclone, "readOnly", "true"), "j", 5, nil},
		{v, "k", 6, []change{group("4000")}},
		{static("elsewhere", rclone), "l", 7, nil},
	}
	for _, p := range publications {
		e.publish(p.volume, p.target, p.changes...)
		if n := len(e.Running(programs[rclone])); n != p.clients {
			t.Errorf("after publication %s %d clients run, want %d", p.target, n, p.clients)
		}
	}
	write(t, filepath.Join(e.Target("a"), "file"), "x")
	if got := read(t, filepath.Join(e.Target("c"), "file")); got != "x" {
		t.Errorf("the other publication reads %q", got)
	}
	for _, p := range publications {
		e.unpublish(p.volume, e.Target(p.target))
	}
	e.NothingLeft(t)
}

// An access key without its secret does not give access to what its owner sees.
func TestAnAccessKeyAloneOpensNothing(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("private", rclone)
	owner := e.user("owner")
	a := e.publish(v, "a", secrets(owner))
	thief := map[string]string{"accessKeyID": owner["accessKeyID"], "secretAccessKey": "not-the-secret-of-this-access-key-0000"}
	want(t, e.tryPublish(30*time.Second, v, e.Target("b"), secrets(thief)), codes.Unauthenticated)
	want(t, e.tryPublish(30*time.Second, v, a, secrets(thief)), codes.Unavailable, "keeps its session")
	write(t, filepath.Join(a, "file"), "still works")
	e.unpublish(v, a)
	e.NothingLeft(t)
	if got := e.Object(t, bucket, "private/file"); got != "still works" {
		t.Errorf("the object is %q", got)
	}
}

// A read-only publication lies beside a read-write one of the same mount; a read-only volume cannot be written at all.
func TestReadOnlyIsOfThePublicationOrOfTheVolume(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("ro", client)
		rw, ro := e.publish(v, "rw"), e.publish(v, "ro", readOnly)
		e.client(client)
		write(t, filepath.Join(rw, "file"), "x")
		for _, m := range mountsAt(t, ro) {
			checkOptions(t, m, "ro", "nosuid", "nodev")
		}
		if err := os.WriteFile(filepath.Join(ro, "other"), nil, 0o644); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing through the read-only publication: %v", err)
		}
		if got := read(t, filepath.Join(ro, "file")); got != "x" {
			t.Errorf("reading through it: %q", got)
		}
		e.unpublish(v, rw)
		e.unpublish(v, ro)

		locked := static("ro", client, "readOnly", "true")
		target := e.publish(locked, "locked")
		if err := os.WriteFile(filepath.Join(target, "other"), nil, 0o644); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to a read-only volume: %v", err)
		}
		if err := os.Remove(filepath.Join(target, "file")); !errors.Is(err, unix.EROFS) {
			t.Errorf("removing from a read-only volume: %v", err)
		}
		if got := read(t, filepath.Join(target, "file")); got != "x" {
			t.Errorf("reading a read-only volume: %q", got)
		}
		e.unpublish(locked, target)

		for _, m := range []csi.VolumeCapability_AccessMode_Mode{csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
			csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY} {
			target := e.publish(v, "reader", mode(m))
			if err := os.WriteFile(filepath.Join(target, "other"), nil, 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing with access mode %s: %v", m, err)
			}
			// A container runtime may make a bind mount writable: the file system must not be.
			if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT, ""); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(target, "other"), nil, 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing with access mode %s where the target was made writable: %v", m, err)
			}
			e.unpublish(v, target)
		}
		e.NothingLeft(t)
	})
}

func TestAccessModes(t *testing.T) {
	rigtest.ProcessOnly(t, "publications are compared before anything is started")
	t.Parallel()
	e := start(t)
	v := static("modes", rclone)
	for _, m := range []csi.VolumeCapability_AccessMode_Mode{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
	} {
		a, b := e.publish(v, "a", mode(m)), e.publish(v, "b", mode(m))
		write(t, filepath.Join(a, "file"), m.String())
		if got := read(t, filepath.Join(b, "file")); got != m.String() {
			t.Errorf("%s: %q", m, got)
		}
		e.unpublish(v, a)
		e.unpublish(v, b)
	}

	const single = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	a := e.publish(v, "a", mode(single))
	e.publish(v, "a", mode(single)) // again is fine
	for _, second := range []csi.VolumeCapability_AccessMode_Mode{single, csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER} {
		want(t, e.tryPublish(30*time.Second, v, e.Target("b"), mode(second)), codes.FailedPrecondition, a)
	}
	e.restart() // it is remembered
	want(t, e.tryPublish(30*time.Second, v, e.Target("b"), mode(single)), codes.FailedPrecondition, a)
	if _, err := os.Lstat(e.Target("b")); err == nil {
		t.Error("the refused target was made")
	}
	e.unpublish(v, a)
	e.unpublish(v, e.publish(v, "b", mode(single)))
	e.NothingLeft(t)

	target := e.Target("c")
	want(t, e.tryPublish(30*time.Second, v, target, func(r *csi.NodePublishVolumeRequest) {
		r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	}), codes.InvalidArgument, "block")
	want(t, e.tryPublish(30*time.Second, v, target, mode(csi.VolumeCapability_AccessMode_UNKNOWN)), codes.InvalidArgument, "access_mode")
	e.undone(target)
}

// A repeated publication changes nothing; one that asks for something else gets an error that says so.
func TestRepublication(t *testing.T) {
	rigtest.ProcessOnly(t, "publications are compared before anything is started")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("again", client)
		target := e.publish(v, "t")
		write(t, filepath.Join(target, "file"), "x")
		before := e.client(client)
		for range 3 {
			e.publish(v, "t")
		}
		if n := len(mountsAt(t, target)); n != 1 {
			t.Errorf("%d mounts are stacked on the target", n)
		}
		if after := e.client(client); after != before {
			t.Errorf("the client was replaced: %v, %v", before, after)
		}
		other := e.user("other")
		for name, change := range map[string]change{
			"another group": group("4000"), "read-only": readOnly, "another option": flags("debug"), "other credentials": secrets(other),
		} {
			err := e.tryPublish(30*time.Second, v, target, change)
			if status := err; status == nil {
				t.Errorf("%s: no error", name)
				continue
			}
			want(t, err, codes.AlreadyExists, target)
		}
		want(t, e.tryPublish(30*time.Second, static("different", client), target), codes.AlreadyExists, target)
		if got := read(t, filepath.Join(target, "file")); got != "x" {
			t.Errorf("afterwards the file reads %q", got)
		}
		e.unpublish(v, target)
		e.unpublish(v, target) // again is fine
		e.NothingLeft(t)
	})
}
