//go:build !lane || ordinary

package node

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// The helper exited as well: the driver's own credentials are there, so the mount comes back by itself; a secret's come with
// the next publication.
func TestAMountHealsWithoutItsHelper(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "own/file", "content")
		e.Put(t, bucket, "secret/file", "content")
		own, secret := static("own", client), static("secret", client)
		keys := secrets(e.user("someone"))
		a := e.publish(own, "a")
		b := e.publish(secret, "b", keys)
		e.killAll()
		e.awaitRead(3*time.Second, filepath.Join(a, "file"), "content")
		if _, err := os.ReadFile(filepath.Join(b, "file")); err == nil {
			t.Error("the mount of a secret works without its keys")
		}
		e.publish(secret, "b", keys)
		if got := read(t, filepath.Join(b, "file")); got != "content" {
			t.Errorf("read %q", got)
		}
		e.unpublish(own, a)
		e.unpublish(secret, b)
		e.awaitNothingLeft(5 * time.Second)
	})
}

// Mounts whose client exits while no driver runs are healed by the next driver.
func TestNewDriver_HealsClientsThatExitedBefore(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "before/file", "content")
		v := static("before", client)
		a := e.publish(v, "a")
		e.Kill()
		rigtest.Kill(e.t, e.client(client))
		e.drive()
		e.awaitRead(3*time.Second, filepath.Join(a, "file"), "content")
		e.unpublish(v, a)
		e.awaitNothingLeft(5 * time.Second)
	})
}

// Healing can be turned off; then the next publication heals its own target.
func TestHealingCanBeTurnedOff(t *testing.T) {
	rigtest.ProcessOnly(t, "the driver decides by itself whether it heals")
	t.Parallel()
	e := start(t, "--heal=false")
	e.Put(t, bucket, "off/file", "content")
	v := static("off", mountpoint)
	a := e.publish(v, "a")
	rigtest.Kill(e.t, e.client(mountpoint))
	time.Sleep(2 * soon)
	if _, err := os.ReadFile(filepath.Join(a, "file")); err == nil {
		t.Error("the mount was healed")
	}
	e.publish(v, "a")
	if got := read(t, filepath.Join(a, "file")); got != "content" {
		t.Errorf("read %q", got)
	}
	e.unpublish(v, a)
	e.awaitNothingLeft(5 * time.Second)
}

// A crash loop has backoff.
func TestCrashLoop_BacksOff(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("again", rclone)
	a := e.publish(v, "a")
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, p := range e.Running(programs[rclone]) {
			_ = unix.Kill(p.PID, unix.SIGKILL) // it may have exited by now
		}
	}
	if n := e.count("s3csi_mount_restarts_total") + e.count("s3csi_mount_restart_failures_total"); n < 2 || n > 5 {
		t.Errorf("%v restarts in 6 s", n)
	}
	e.await(20*time.Second, "the mount to come back", func() bool {
		_, err := os.ReadDir(a)
		return err == nil
	})
	e.unpublish(v, a)
	e.awaitNothingLeft(5 * time.Second)
}

// The unpublication of a volume whose client hangs ends within a bound.
func TestAHangingClientDoesNotHoldUpItsUnpublication(t *testing.T) {
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Kill()
		e.drive("--hang-timeout=4s")
		v := static("stuck", client)
		a := e.publish(v, "a")
		write(t, filepath.Join(a, "closed"), "stored")
		f, err := os.Create(filepath.Join(a, "open"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("not closed"); err != nil {
			t.Fatal(err)
		}
		rigtest.Freeze(t, e.client(client).PID)
		go f.Close() // waits for the client
		began := time.Now()
		e.await(20*time.Second, "the unpublication", func() bool { return e.tryUnpublish(5*time.Second, v, a) == nil })
		t.Logf("unpublished after %s", time.Since(began).Round(time.Millisecond))
		if got := e.Object(t, bucket, "stuck/closed"); got != "stored" {
			t.Errorf("the object is %q", got)
		}
		if n := e.count("s3csi_mount_unflushed_total", client); n == 0 {
			t.Error("what was lost is not counted")
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}
