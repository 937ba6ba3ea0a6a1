package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// soon is how long the failure of a client may be seen: new opens work within that time. Tests that assert it, or another time, are
// named TestTimed…: make test runs them when nothing else runs.
const soon = time.Second

// eventually bounds waits for what an event causes. It is less than the minute between two reconcile passes.
const eventually = 20 * time.Second

const (
	podUID      = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"
	otherPodUID = "f2d7a6c0-1111-4a5b-9c3d-0123456789ab"
)

// podTarget is a target as kubelet makes it for a pod.
func (e *env) podTarget(uid, volume string) string {
	e.t.Helper()
	target := filepath.Join(e.Dir, "targets", "pods", uid, "volumes", "kubernetes.io~csi", volume, "mount")
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		e.t.Fatal(err)
	}
	return target
}

// publishAt publishes a volume at a target.
func (e *env) publishAt(v *csi.Volume, target string, changes ...change) {
	e.t.Helper()
	if err := e.tryPublish(time.Minute, v, target, changes...); err != nil {
		e.t.Fatalf("publishing %s at %s: %v", v.GetVolumeId(), target, err)
	}
}

// awaitRead waits until a file reads so, for at most limit.
func (e *env) awaitRead(limit time.Duration, path, content string) {
	e.t.Helper()
	e.await(limit, path+" to be read again", func() bool {
		b, err := os.ReadFile(path)
		return err == nil && string(b) == content
	})
}

// count is the sum of a metric's values over the labels that have all these words in them.
func (e *env) count(name string, words ...string) float64 {
	e.t.Helper()
	var sum float64
	for line := range strings.Lines(rigtest.Get(e.t, e.Driver, "/metrics")) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || !strings.HasPrefix(rest, "{") && !strings.HasPrefix(rest, " ") {
			continue
		}
		labels, value, _ := strings.Cut(rest, "} ")
		if strings.HasPrefix(rest, " ") {
			labels, value = "", rest[1:]
		}
		has := true
		for _, w := range words {
			has = has && strings.Contains(labels, w)
		}
		var f float64
		if _, err := fmt.Sscan(value, &f); has && err == nil {
			sum += f
		}
	}
	return sum
}

// A client that exits is started again, and every target shows the new mount, without a call.
func TestTimedRestartOfACrashedClient(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "heal/file", "content")
		v := static("heal", client)
		a := e.publish(v, "a")
		b := e.publish(v, "b", readOnly)
		for range 2 {
			rigtest.Kill(e.t, e.client(client))
			died := pressure.Now()
			e.awaitRead(soon, filepath.Join(a, "file"), "content")
			e.awaitRead(soon-died.Since(), filepath.Join(b, "file"), "content")
			t.Logf("healed after %s", time.Since(died.Time).Round(time.Millisecond))
			time.Sleep(1200 * time.Millisecond) // a second death in a row waits a moment
		}
		if err := os.WriteFile(filepath.Join(b, "new"), nil, 0o600); err == nil {
			t.Error("the healed read-only publication can be written to")
		}
		write(t, filepath.Join(a, "new"), "written after")
		for _, target := range []string{a, b} {
			if n := len(mountsAt(t, target)); n != 1 {
				t.Errorf("%d mounts at %s", n, target)
			}
		}
		if n := e.count("s3csi_mount_restarts_total", client, "crash"); n != 2 {
			t.Errorf("%v restarts are counted", n)
		}
		if n := e.count("s3csi_mounts", client, "healthy"); n != 1 {
			t.Errorf("%v mounts are counted", n)
		}
		e.unpublish(v, a)
		e.unpublish(v, b)
		if got := e.Object(t, bucket, "heal/new"); got != "written after" {
			t.Errorf("the object is %q", got)
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// Running containers get the new client too: without a restart, in all their mounts of the volume, and never see what lies
// below. No other mount is changed.
func TestTimedHealOfContainers(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "pods/file", "content")
		e.Put(t, bucket, "pods/sub/file", "in sub")
		v := static("pods", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		subpath := filepath.Join(e.Dir, "targets", "pods", podUID, "volume-subpaths", "pv", "app", "0")
		if err := os.MkdirAll(subpath, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(filepath.Join(target, "sub"), subpath, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		mounts := []containers.Mount{
			{Source: target, Target: "/data"}, {Source: target, Target: "/ro", ReadOnly: true}, {Source: subpath, Target: "/sub"},
			{Source: target, Target: "/slave", Propagation: "rslave"}, {Source: t.TempDir(), Target: "/data/sub"},
		}
		pod := containers.Start(t, containers.Options{PodUID: podUID, Mounts: mounts, Own: map[string]string{"data/file": "its own"}})
		stranger := containers.Start(t, containers.Options{PodUID: otherPodUID, Cgroup: containers.CgroupSystemd, Mounts: mounts[:1], Own: map[string]string{"data/file": "its own"}})
		good := map[string]string{"/data/file": "content", "/ro/file": "content", "/sub/file": "in sub", "/slave/file": "content"}
		watches := map[string]*containers.Watch{}
		for path, content := range good {
			watches[path] = pod.Watch(path)
			if _, ok := watches[path].Await(time.Time{}, 10*time.Second, containers.Reads(content)); !ok {
				t.Fatalf("%s was never read", path)
			}
		}
		rigtest.Kill(e.t, e.client(client))
		died := pressure.Now()
		for path, content := range good {
			look, ok := watches[path].Await(died.Time, 10*time.Second, containers.Reads(content))
			if took := died.Until(look.End()); !ok || took > soon {
				t.Errorf("%s reads again after %s (%t), want %s", path, took, ok, soon)
			}
			if bad := watches[path].Unwanted(content); len(bad) > 0 {
				t.Errorf("%s showed something else: %+v", path, bad[0])
			}
		}
		if n := e.count("s3csi_mount_restarts_total", client, "crash"); n != 1 {
			t.Errorf("%v restarts are counted", n)
		}
		if err := pod.Write(t.Context(), "/ro/new", "x"); err == nil {
			t.Error("the healed read-only mount can be written to")
		}
		if err := pod.Write(t.Context(), "/data/new", "from the container"); err != nil {
			t.Error(err)
		}
		// Its copy of the dead mount is of no use to anybody, and would keep the dead connection.
		e.await(5*time.Second, "the copy in another container to be detached", func() bool {
			got, err := stranger.Read(t.Context(), "/data/file")
			if err == nil && got != "its own" {
				t.Errorf("another container reads %q", got)
			}
			return err == nil
		})
		for _, w := range watches {
			w.Stop()
		}
		for _, c := range []*containers.Container{pod, stranger} {
			if err := c.Stop(); err != nil {
				t.Error(err)
			}
		}
		if err := unix.Unmount(subpath, 0); err != nil {
			t.Error(err)
		}
		e.unpublish(v, target)
		if got := e.Object(t, bucket, "pods/new"); got != "from the container" {
			t.Errorf("the object is %q", got)
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// The helper died as well: the driver's own credentials are there, so the mount comes back by itself; a secret's come with
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

// What died while no driver ran is healed by the next one.
func TestANewDriverHealsWhatDiedBefore(t *testing.T) {
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
func TestRepeatedDeathsBackOff(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("again", rclone)
	a := e.publish(v, "a")
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, p := range e.Running(programs[rclone]) {
			_ = unix.Kill(p.PID, unix.SIGKILL) // it may be dead by now
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

// The connection of an unresponsive client is aborted, which ends all waiting calls, and the client is restarted, without a call.
func TestTimedRestartOfAnUnresponsiveClient(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Kill()
		e.drive("--hang-timeout=4s")
		e.Put(t, bucket, "hang/file", "content")
		e.Put(t, bucket, "well/file", "content")
		v, w := static("hang", client), static("well", client)
		a := e.publish(v, "a")
		stopped := e.client(client)
		b := e.publish(w, "b")
		rigtest.Freeze(t, stopped.PID)
		hung := pressure.Now()
		waiting := make(chan error, 1)
		go func() {
			_, err := os.ReadFile(filepath.Join(a, "file"))
			waiting <- err
		}()
		if got := read(t, filepath.Join(b, "file")); got != "content" {
			t.Errorf("another volume reads %q", got)
		}
		if err := <-waiting; err == nil {
			t.Error("the read through the hanging client succeeded")
		}
		if took, atMost := time.Since(hung.Time), hung.Since(); took < 2*time.Second || atMost > 8*time.Second {
			t.Errorf("the reader was freed after %s", took)
		}
		e.awaitRead(2*time.Second, filepath.Join(a, "file"), "content")
		if n := e.count("s3csi_mount_restarts_total", client, "hang"); n != 1 {
			t.Errorf("%v restarts after hangs are counted", n)
		}
		e.unpublish(v, a)
		e.unpublish(w, b)
		e.awaitNothingLeft(5 * time.Second)
	})
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
