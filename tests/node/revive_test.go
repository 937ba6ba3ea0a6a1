//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// unsent publishes a volume at the target and leaves a file in the client's cache that S3 does not take.
func (e *env) unsent(name, content string, changes ...change) (target string) {
	e.t.Helper()
	v := static(name, rclone)
	target = e.publish(v, "t", changes...)
	e.proxy.Set(faultproxy.Faults{Refuse: true})
	write(e.t, filepath.Join(target, "file"), content)
	time.Sleep(300 * time.Millisecond) // the close is asynchronous where the kernel is concerned
	return target
}

func (e *env) killAll() {
	e.t.Helper()
	for _, p := range e.Running("") {
		rigtest.Kill(e.t, p)
	}
}

// A helper that was started to restart an exited client, and could not, has stored nothing: what the client had left is
// kept until one does.
func TestWhatCouldNotBeStoredIsKept(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("kept", rclone)
	content := random(100 << 10)
	target := e.unsent("kept", content)
	program := e.ClientProgram(t, programs[rclone])
	if err := os.Rename(program, program+".away"); err != nil { // before the driver can start another one
		t.Fatal(err)
	}
	e.killAll()
	want(t, e.tryUnpublish(20*time.Second, v, target), codes.Unavailable, "restarting it")
	want(t, e.tryUnpublish(20*time.Second, v, target), codes.Unavailable, "restarting it")
	e.restart()
	if err := os.Rename(program+".away", program); err != nil {
		t.Fatal(err)
	}
	e.proxy.Set(faultproxy.Faults{})
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "kept/file"); got != content {
		t.Errorf("the object has %d bytes of %d, equal: %t", len(got), len(content), got == content)
	}
	e.awaitNothingLeft(5 * time.Second)
}

// The keys of a secret die with the helper; the next publication brings them back, and with them what was left is stored.
func TestAPublicationBringsTheSecretBack(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("secretly", rclone)
	secret := secrets(e.user("owner"))
	content := random(100 << 10)
	target := e.unsent("secretly", content, secret)
	e.killAll()
	e.proxy.Set(faultproxy.Faults{})
	want(t, e.tryUnpublish(20*time.Second, v, target), codes.Unavailable, "republish the volume")
	e.publish(v, "t", secret)
	if got := read(t, filepath.Join(target, "file")); got != content {
		t.Errorf("the file has %d bytes, equal: %t", len(got), got == content)
	}
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "secretly/file"); got != content {
		t.Errorf("the object has %d bytes, equal: %t", len(got), got == content)
	}
	e.awaitNothingLeft(5 * time.Second)
}

// What an exited client that several targets share had left is stored before another generation of the mount serves the prefix: it
// must not come later, over what was written since.
func TestOldDataDoesNotComeAfterNew(t *testing.T) {
	t.Parallel()
	for _, who := range []string{"client", "client and helper"} {
		t.Run(who, func(t *testing.T) {
			e := start(t, "--heal=false") // so that the next generation starts with the publication, when S3 is back
			v := static("ordered", rclone)
			b := e.publish(v, "b")
			a := e.unsent("ordered", "old")
			if who == "client" {
				rigtest.Kill(e.t, e.client(rclone))
			} else {
				e.killAll()
			}
			e.proxy.Set(faultproxy.Faults{})
			c := e.publish(v, "c")
			if got := read(t, filepath.Join(c, "file")); got != "old" {
				t.Errorf("the new publication reads %q", got)
			}
			write(t, filepath.Join(c, "file"), "new")
			e.unpublish(v, c)
			e.unpublish(v, a)
			e.unpublish(v, b)
			if got := e.Object(t, bucket, "ordered/file"); got != "new" {
				t.Errorf("the object is %q", got)
			}
			e.awaitNothingLeft(5 * time.Second)
		})
	}
}

// Where the driver is not to heal by itself, a container that runs on a stale mount gets errors, as long as its volume is
// published: without the stale mount it would write into its own directory below, unnoticed.
func TestStaleMount_StaysInAContainer(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("shown", client)
		target := e.publish(v, "t")
		pid := container(t)
		inside := fmt.Sprintf("/proc/%d/root%s", pid, target)
		rigtest.Kill(e.t, e.client(client))
		e.await(10*time.Second, "the target to be dead", func() bool {
			_, err := os.Lstat(filepath.Join(target, "file"))
			return errors.Is(err, unix.ENOTCONN)
		})
		e.publish(v, "t")
		write(t, filepath.Join(target, "file"), "x")
		if err := os.WriteFile(filepath.Join(inside, "stray"), nil, 0o600); !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("the container could write: %v", err)
		}
		e.unpublish(v, target)
		e.NothingLeft(t)
	}, "--heal=false")
}

// As long as a stale mount cannot be replaced, its target goes on to show it: a container that is restarted there must not
// find an empty directory.
func TestStaleMount_StaysUntilItIsReplaced(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("stays", mountpoint)
	target := e.publish(v, "t")
	e.proxy.Set(faultproxy.Faults{Refuse: true}) // before it heals
	rigtest.Kill(e.t, e.client(mountpoint))
	if err := e.tryPublish(20*time.Second, v, target); err == nil {
		t.Fatal("published while S3 was away")
	}
	if err := os.WriteFile(filepath.Join(target, "stray"), nil, 0o600); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("the target could be written to: %v", err)
	}
	e.proxy.Set(faultproxy.Faults{})
	e.publish(v, "t")
	write(t, filepath.Join(target, "file"), "x")
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// A helper that does not answer may be busy or swapped out: a mount that works is not torn down for that.
func TestAMountIsNotReplacedOnSuspicion(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("suspect", rclone)
	target := e.publish(v, "t")
	write(t, filepath.Join(target, "file"), "x")
	for _, p := range e.Running("s3-csi-helper") {
		rigtest.Freeze(t, p.PID)
	}
	want(t, e.tryPublish(30*time.Second, v, target), codes.Unavailable, "does not answer")
	if got := read(t, filepath.Join(target, "file")); got != "x" {
		t.Errorf("the file reads %q", got)
	}
	for _, p := range e.Running("s3-csi-helper") {
		if err := unix.Kill(p.PID, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	before := e.lives()
	e.publish(v, "t")
	if after := e.lives(); after != before {
		t.Errorf("the mount was replaced: %d lives, then %d", before, after)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// Mounts from before a change of --uid-range can still be ended.
func TestAnotherRangeOfUserIDs(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("ranged", client)
		middle := e.FirstUID + (e.LastUID-e.FirstUID)/2
		e.restart(fmt.Sprintf("--uid-range=%d-%d", e.FirstUID, middle))
		target := e.publish(v, "t")
		e.restart(fmt.Sprintf("--uid-range=%d-%d", middle+1, e.LastUID))
		write(t, filepath.Join(target, "file"), "x")
		e.publish(v, "other")
		e.unpublish(v, target)
		e.unpublish(v, e.Target("other"))
		e.NothingLeft(t)
	})
}

// A client that lost its helper, which alone could renew its keys and end it, makes way for another one, and what it had to
// store is stored. As a unit of systemd it ends with its helper.
//
// It runs alone: a namespace that another test makes meanwhile would keep a copy of the mount, and the old client with it.
func TestAClientThatLostItsHelperIsReplaced(t *testing.T) {
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("orphan", client)
		target := e.publish(v, "t")
		write(t, filepath.Join(target, "file"), "x")
		lost := e.client(client)
		for _, p := range e.Running("s3-csi-helper") {
			rigtest.Kill(e.t, p)
		}
		e.publish(v, "t")
		if got := read(t, filepath.Join(target, "file")); got != "x" {
			t.Errorf("the file reads %q", got)
		}
		if now := e.client(client); now == lost {
			t.Errorf("the client %v still runs without a helper", now)
		}
		if helpers := e.Running("s3-csi-helper"); len(helpers) != 1 {
			t.Errorf("the helpers: %v", helpers)
		}
		other := e.publish(v, "other")
		write(t, filepath.Join(other, "more"), "y")
		e.unpublish(v, other)
		e.unpublish(v, target)
		for name, content := range map[string]string{"file": "x", "more": "y"} {
			if got := e.Object(t, bucket, "orphan/"+name); got != content {
				t.Errorf("the object %s is %q", name, got)
			}
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// What a client put aside, because it could not store it, is kept for a human when its mount ends, and the log says where.
func TestWhatAClientPutAsideIsKept(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("aside", rclone)
	target := e.publish(v, "t")
	caches, err := e.caches() // beside it are the driver's own notes
	if err != nil || len(caches) != 1 {
		t.Fatalf("caches: %v, %v", caches, err)
	}
	if err := os.Mkdir(filepath.Join(caches[0], "lost"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(caches[0], "lost", "file"), "torn")
	e.unpublish(v, target)
	kept := filepath.Join(e.Cache, "kept-"+filepath.Base(caches[0]))
	if got := read(t, filepath.Join(kept, "file")); got != "torn" {
		t.Errorf("it reads %q", got)
	}
	e.restart()
	e.await(10*time.Second, "the log to say twice where it is", func() bool { return strings.Count(e.Logs(), kept) >= 2 })
	if err := os.RemoveAll(kept); err != nil {
		t.Fatal(err)
	}
	e.NothingLeft(t)
}
