//go:build !lane || linger

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// lingering is how many mounts linger.
func (e *env) lingering() int { return int(e.count("s3csi_mounts", `state="lingering"`)) }

// ended is how many lingering mounts ended for a reason.
func (e *env) ended(reason string) int {
	return int(e.count("s3csi_linger_ends_total", fmt.Sprintf("reason=%q", reason)))
}

// lingers fails the test unless the client of that pid is the only one and lingers.
func (e *env) lingers(client string, pid int) {
	e.t.Helper()
	if now := e.client(client).PID; now != pid {
		e.t.Fatalf("the client was process %d and is %d", pid, now)
	}
	e.await(5*time.Second, "a lingering mount", func() bool { return e.lingering() == 1 })
}

// A mount lingers with everything stored, and the next publication uses the same client. It sees what others wrote meanwhile.
func TestALingeringMountIsUsedAgain(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		reports(t, client)
		v := static("warm", client, "linger", "1h")
		target := e.publish(v, "first")
		write(t, filepath.Join(target, "file"), "content")
		write(t, filepath.Join(target, "changed"), "before")
		write(t, filepath.Join(target, "empty"), "")
		pid := e.client(client).PID
		e.unpublish(v, target)
		for name, want := range map[string]string{"file": "content", "changed": "before", "empty": ""} {
			if got := e.Object(t, bucket, "warm/"+name); got != want {
				t.Errorf("%s is %q in the bucket", name, got)
			}
		}
		e.lingers(client, pid)
		if e.count("s3csi_linger_memory_bytes", client) < 1<<20 {
			t.Error("its memory is not shown")
		}
		e.Put(t, bucket, "warm/changed", "afterwards")
		e.Put(t, bucket, "warm/new", "new")

		target = e.publish(v, "second")
		for name, want := range map[string]string{"file": "content", "new": "new"} {
			if got := read(t, filepath.Join(target, name)); got != want {
				t.Errorf("%s reads %q, want %q", name, got, want)
			}
		}
		e.awaitRead(20*time.Second, filepath.Join(target, "changed"), "afterwards")
		names, err := os.ReadDir(target)
		if err != nil || len(names) != 4 {
			t.Errorf("the root lists %v, %v", names, err)
		}
		if now := e.client(client).PID; now != pid || e.lingering() != 0 || e.count("s3csi_linger_hits_total", client) != 1 {
			t.Errorf("client %d, now %d; %d linger; %v hits", pid, now, e.lingering(), e.count("s3csi_linger_hits_total", client))
		}
		write(t, filepath.Join(target, "again"), "again")
		e.unpublish(v, target)
		if got := e.Object(t, bucket, "warm/again"); got != "again" {
			t.Errorf("again is %q in the bucket", got)
		}
		e.lingers(client, pid)

		// It outlives the driver, and is not healed.
		e.restart()
		e.lingers(client, pid)
		target = e.publish(v, "third")
		if now := e.client(client).PID; now != pid {
			t.Errorf("after a restart of the driver client %d is %d", pid, now)
		}
		e.unpublish(v, target)
		e.lingers(client, pid)
		rigtest.Kill(t, e.client(client))
		e.awaitNothingLeft(10 * time.Second)
		if n := e.ended("client"); n != 1 {
			t.Errorf("%d mounts ended with their clients", n)
		}
	})
}

// When its time is over, nothing of a lingering mount is left, also if the driver did not run then.
func TestALingeringMountEndsInTime(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		reports(t, client)
		for _, driver := range []string{"runs", "is started again"} {
			v := static("short", client, "linger", "6s")
			target := e.publish(v, "t")
			write(t, filepath.Join(target, "file"), driver)
			pid := e.client(client).PID
			unpublished := time.Now()
			e.unpublish(v, target)
			if driver == "runs" {
				e.lingers(client, pid)
			} else {
				e.restart()
			}
			e.awaitNothingLeft(20 * time.Second)
			if took := time.Since(unpublished); took < 6*time.Second {
				t.Errorf("it ended after %s", took)
			}
			e.await(5*time.Second, "the end to be counted", func() bool { return e.ended("time") == 1 && e.lingering() == 0 })
		}
	})
}

// An unpublication that lasts longer than its call ends with a lingering mount, whatever happened to the driver in between.
func TestAMountLingersAfterALongDrain(t *testing.T) {
	t.Parallel()
	e := start(t)
	for _, name := range []string{"calm", "crash"} {
		v := static(name, rclone, "linger", "1h")
		content := random(3 << 20)
		target := e.publish(v, name)
		e.proxy.Set(crawling)
		write(t, filepath.Join(target, "data.bin"), content)
		pid := e.client(rclone).PID
		e.awaitBusy(v, target, "draining: ", "upload", " MiB", "a retry waits for it")
		if name == "crash" {
			e.restart()
			e.awaitBusy(v, target, "draining: ")
		}
		e.proxy.Set(faultproxy.Faults{})
		e.unpublish(v, target)
		if got := e.Object(t, bucket, name+"/data.bin"); got != content {
			t.Errorf("the object has %d bytes, %d were written", len(got), len(content))
		}
		e.lingers(rclone, pid)
		e.restart("--linger-max-mounts=0")
		e.awaitNothingLeft(10 * time.Second)
		e.restart()
	}
}

// The least recently used ends when there are too many, or when they use too much memory.
func TestLingeringMountsAreBounded(t *testing.T) {
	t.Parallel()
	e := start(t, "--linger-max-mounts=2")
	uses := func(name string) {
		t.Helper()
		v := static(name, rclone, "linger", "1h")
		e.unpublish(v, e.publish(v, name))
	}
	warm := func(name string) bool {
		t.Helper()
		before := e.lives()
		v := static(name, rclone, "linger", "1h")
		e.unpublish(v, e.publish(v, name))
		return e.lives() == before
	}
	uses("a")
	uses("b")
	if !warm("a") {
		t.Error("a does not linger")
	}
	uses("c") // b is the least recently used
	if n := e.ended("mounts"); n != 1 || e.lingering() != 2 {
		t.Errorf("%d ended, %d linger", n, e.lingering())
	}
	if !warm("a") || !warm("c") || warm("b") {
		t.Error("the wrong one ended")
	}
	one := e.count("s3csi_linger_memory_bytes") / float64(e.lingering())
	e.restart(fmt.Sprintf("--linger-max-memory=%d", int(1.5*one)))
	e.await(10*time.Second, "one to end for the others' memory", func() bool { return e.ended("memory") == 1 && e.lingering() == 1 })
	if !warm("b") {
		t.Error("the wrong one ended")
	}
	e.restart("--linger-max-memory=16Mi") // less than one has
	e.awaitNothingLeft(10 * time.Second)
	uses("a")
	e.NothingLeft(t)
	e.restart("--linger-max-mounts=0")
	uses("a")
	e.NothingLeft(t)
}

// A change of the backend or of the operator's rules ends a lingering mount.
func TestALingeringMountEndsWithItsConfiguration(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	config := filepath.Join(e.Dir, "config.yaml")
	configure := func(more string) {
		t.Helper()
		text := fmt.Sprintf("backends:\n  default:\n    endpoint: %s\n    region: us-east-1\n    addressing: path\n%s", e.proxy.Endpoint(), more)
		if err := errors.Join(os.WriteFile(config+".new", []byte(text), 0o600), os.Rename(config+".new", config)); err != nil {
			t.Fatal(err)
		}
	}
	for _, change := range []string{
		"    allow:\n      - buckets: [another]\n",
		"    expectedBucketOwner: \"111122223333\"\n",
	} {
		configure("")
		e.drive("--config=" + config)
		v := static("configured", rclone, "linger", "1h")
		e.unpublish(v, e.publish(v, "t"))
		e.lingers(rclone, e.client(rclone).PID)
		configure(change)
		e.awaitNothingLeft(30 * time.Second)
		if n := e.ended("backend"); n != 1 {
			t.Errorf("%d mounts ended with their configuration", n)
		}
		e.Kill()
	}
}

// A lingering mount has no credentials of a secret. It is used again with that secret alone, and only while it works.
func TestALingeringMountHasNoSecret(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		reports(t, client)
		first := e.user("owner")
		v := static("secret", client, "linger", "1h")
		target := e.publish(v, "t", secrets(first))
		write(t, filepath.Join(target, "file"), "content")
		pid := e.client(client).PID
		e.unpublish(v, target)
		e.lingers(client, pid)
		e.await(5*time.Second, "no session in the metrics", func() bool { return e.count("s3csi_mount_sessions") == 0 })
		e.publish(v, "t", secrets(first))
		if now := e.client(client).PID; now != pid {
			t.Errorf("client %d is %d", pid, now)
		}
		if got := read(t, filepath.Join(target, "file")); got != "content" {
			t.Errorf("read %q", got)
		}
		write(t, filepath.Join(target, "more"), "more")
		e.unpublish(v, target)
		e.lingers(client, pid)

		second := e.anotherKey("owner")
		e.revoke("owner", first)
		if err := e.tryPublish(time.Minute, v, target, secrets(first)); err == nil {
			t.Fatal("a secret that was revoked lets a pod in")
		}
		e.lingers(client, pid)
		e.publish(v, "t", secrets(second))
		if now := e.client(client).PID; now == pid {
			t.Error("the mount of another secret is used")
		}
		if n := e.ended("volume"); n != 1 {
			t.Errorf("%d mounts ended for another secret", n)
		}
		if got := read(t, filepath.Join(target, "more")); got != "more" {
			t.Errorf("read %q", got)
		}
		e.unpublish(v, target)
	})
}

// A mount that overlaps with a lingering one starts without it, and one of the same volume with other settings, too.
func TestAMountThatALingeringOneGivesWayTo(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("outer/inner", rclone, "linger", "1h")
	e.unpublish(v, e.publish(v, "inner"))
	outer := static("outer", mountpoint)
	target := e.publish(outer, "outer")
	if n := e.ended("overlap"); n != 1 || len(e.Running(programs[rclone])) != 0 {
		t.Errorf("%d mounts ended, clients: %v", n, e.Processes())
	}
	e.unpublish(outer, target)

	reading := static("reading", mountpoint, "linger", "1h", "readOnly", "true")
	e.unpublish(reading, e.publish(reading, "reading"))
	pid := e.client(mountpoint).PID
	e.lingers(mountpoint, pid)
	changed := static("reading", mountpoint, "linger", "1h", "readOnly", "true", "dirMode", "0755")
	e.unpublish(changed, e.publish(changed, "reading"))
	if n := e.ended("volume"); n != 1 {
		t.Errorf("%d mounts ended for other settings", n)
	}
	if now := e.client(mountpoint).PID; now == pid {
		t.Error("the mount with other settings is used")
	}
}

// The longest of the times of its publications is a mount's, and one without a time uses a mount that lingers for the last time.
func TestTheLongestTimeToLingerWins(t *testing.T) {
	t.Parallel()
	e := start(t)
	short, long, none := static("shared", rclone, "linger", "1s"), static("shared", rclone, "linger", "1h"), static("shared", rclone)
	one, other := e.publish(short, "one"), e.publish(long, "other")
	pid := e.client(rclone).PID
	e.unpublish(long, other)
	e.unpublish(short, one)
	e.lingers(rclone, pid)
	target := e.publish(none, "last")
	if now := e.client(rclone).PID; now != pid {
		t.Errorf("client %d is %d", pid, now)
	}
	e.unpublish(none, target)
	e.NothingLeft(t)
}

func TestLingerThatIsRefused(t *testing.T) {
	t.Parallel()
	e := start(t)
	for _, value := range []string{"", "0s", "-1m", "25h", "10", "1500ms"} {
		v := static("refused", rclone, "linger", value)
		want(t, e.tryPublish(time.Minute, v, e.Target("t")), codes.InvalidArgument, "linger")
		e.undone(e.Target("t"))
	}
}
