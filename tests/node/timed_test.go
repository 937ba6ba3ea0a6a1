//go:build !lane || timed

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// The check takes each client through everything, and says what its declaration should say. Renewal is checked if that is asked for.
//
// The first session must last until the renewal is awaited, so the test runs when the machine has nothing else to do.
func TestTimedCheckOfAClient(t *testing.T) {
	t.Parallel()
	const renewal = "--session-duration=15s"
	for name, tc := range map[string]struct {
		client  string
		flags   func(e *env) []string
		renewal check.Result
	}{
		"rclone":        {rclone, func(*env) []string { return nil }, check.Unknown},
		"mountpoint-s3": {mountpoint, func(*env) []string { return nil }, check.Unknown},
		"declared, session": {debian, func(e *env) []string {
			return []string{e.declared("rclone", debian, e.withSessions(e.declaration("path", "mount2", ""))), renewal}
		}, check.Yes},
		"declared, fusermount": {debian, func(e *env) []string {
			return []string{e.declared("rclone", debian, e.declaration("fusermount", "mount", ""))}
		}, check.Unknown},
		"declared, static": {s3fs, func(e *env) []string { return []string{e.declaredS3fs(), renewal} }, check.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			s, code := e.report(e.checkClient(tc.client, tc.flags(e)...))
			var table []string
			for _, row := range s.Rows {
				table = append(table, row.Check+" "+string(row.Result))
				if row.Needed && row.Result != check.Yes || row.Check == "clientRenewal" && row.Result != tc.renewal {
					t.Errorf("%+v", row)
				}
			}
			if len(table) != 17 || code != 0 {
				t.Errorf("exit code %d, rows %q", code, table)
			}
			t.Logf("%+v, notes %q", s.Rows, s.Notes)
			notes := strings.Join(s.Notes, "\n")
			for _, want := range []string{"drain: exits", "needs: [delete]"} {
				if !strings.Contains(notes, want) {
					t.Errorf("the notes do not say %q: %q", want, s.Notes)
				}
			}
		})
	}
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
			time.Sleep(1200 * time.Millisecond) // a second exit in a row waits a moment
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
		stranger := containers.Start(t, containers.Options{PodUID: otherPodUID, Cgroup: containers.CgroupSystemd, Mounts: mounts[:1],
			Own: map[string]string{"data/file": "its own"}})
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
		// Its copy of the stale mount is of no use, and would keep the aborted connection.
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

// Pods that share a mount all get the healthy one, whatever their cgroups are called and wherever they have it, and what is
// mounted below it stays. (No process looks there meanwhile: for a moment after the exit, such a look can make the kernel take
// away what is mounted on a directory that the file system does not vouch for any more.)
func TestTimedHealOfPodsThatShareAMount(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		for key, content := range map[string]string{"file": "content", "sub/file": "in sub", "child/file": "under the child"} {
			e.Put(t, bucket, "shared/"+key, content)
		}
		v := static("shared", client)
		child := t.TempDir()
		write(t, filepath.Join(child, "file"), "the child's")
		var pods []*containers.Container
		var targets []string
		watches := map[*containers.Watch]string{}
		for i, uid := range []string{podUID, otherPodUID} {
			target := e.podTarget(uid, "pv")
			e.publishAt(v, target)
			targets = append(targets, target)
			pod := containers.Start(t, containers.Options{
				PodUID: uid, Cgroup: []containers.CgroupStyle{containers.CgroupFS, containers.CgroupSystemd}[i],
				Mounts: []containers.Mount{
					{Source: target, Target: "/one"},
					{Source: target, Target: "/two", ReadOnly: true},
					{Source: child, Target: "/one/child"},
				},
			})
			pods = append(pods, pod)
			for path, content := range map[string]string{"/one/file": "content", "/two/sub/file": "in sub"} {
				w := pod.Watch(path)
				watches[w] = content
				if _, ok := w.Await(time.Time{}, 10*time.Second, containers.Reads(content)); !ok {
					t.Fatalf("pod %d never read %s", i, path)
				}
			}
		}
		if n := e.count("s3csi_mounts"); n != 1 {
			t.Fatalf("the pods have %v mounts", n)
		}
		rigtest.Kill(e.t, e.client(client))
		died := pressure.Now()
		for w, content := range watches {
			look, ok := w.Await(died.Time, 10*time.Second, containers.Reads(content))
			if took := died.Until(look.End()); !ok || took > soon {
				t.Errorf("%q is read again after %s (%t), want %s", content, took, ok, soon)
			}
		}
		// They are counted when the stale ones are detached, too, all at once.
		e.await(eventually, "four mounts in containers to be replaced", func() bool { return e.count("s3csi_mount_heals_total", "container", "replaced") >= 4 })
		for w, content := range watches {
			if bad := w.Unwanted(content); len(bad) > 0 {
				t.Errorf("in place of %q was %+v", content, bad[0])
			}
			w.Stop()
		}
		for i, pod := range pods {
			if n := len(ours(t, pod.PID, "shared")); n != 2 {
				t.Errorf("pod %d has %d mounts of the volume", i, n)
			}
			for path, content := range map[string]string{"/one/child/file": "the child's", "/two/child/file": "under the child"} {
				if got, err := pod.Read(t.Context(), path); err != nil || got != content {
					t.Errorf("pod %d reads %q of %s, %v", i, got, path, err)
				}
			}
			if err := pod.Write(t.Context(), fmt.Sprintf("/one/from-%d", i), "x"); err != nil {
				t.Error(err)
			}
			stop(t, pod)
			e.unpublish(v, targets[i])
		}
		for i := range pods {
			e.Object(t, bucket, fmt.Sprintf("shared/from-%d", i))
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// A pod that is deleted while its volume heals takes nothing from the others, and its unpublication waits for no more than
// that.
func TestTimedUnpublishDuringAHeal(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "going/file", "content")
		v := static("going", client)
		stays, goes := e.podTarget(podUID, "pv"), e.podTarget(otherPodUID, "pv")
		for i := range 5 {
			e.publishAt(v, stays)
			e.publishAt(v, goes)
			pod := containers.Start(t, containers.Options{PodUID: podUID, Mounts: []containers.Mount{{Source: stays, Target: "/data"}}})
			going := containers.Start(t, containers.Options{PodUID: otherPodUID, Cgroup: containers.CgroupSystemd,
				Mounts: []containers.Mount{{Source: goes, Target: "/data"}}})
			w := pod.Watch("/data/file")
			rigtest.Kill(e.t, e.client(client))
			died := pressure.Now()
			time.Sleep(time.Duration(i) * 15 * time.Millisecond) // any moment of the heal will do
			var all sync.WaitGroup
			all.Go(func() {
				stop(t, going)
				if err := e.tryUnpublish(20*time.Second, v, goes); err != nil {
					t.Errorf("round %d: %v", i, err)
				}
			})
			if _, ok := w.Await(died.Time, 10*time.Second, containers.Reads("content")); !ok {
				t.Errorf("round %d: the pod that stays does not read", i)
			}
			all.Wait()
			if took := died.Since(); took > 5*time.Second {
				t.Errorf("round %d took %s", i, took)
			}
			if _, err := os.Lstat(goes); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("round %d: the target that goes is still there: %v", i, err)
			}
			stop(t, pod)
			e.unpublish(v, stays)
			e.awaitNothingLeft(5 * time.Second)
		}
	})
}

// A client that does not answer lets the calls of its own volume time out, and no others.
func TestTimedStatsOfAnUnresponsiveClient(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v, other := static("hung", client), static("fine", client)
		target := e.publish(v, "hung")
		hung := e.client(client)
		rigtest.Freeze(t, hung.PID)
		defer func() { _ = unix.Kill(hung.PID, unix.SIGCONT) }()
		for range 3 {
			began := pressure.Now()
			_, err := e.stats(time.Second, v, target)
			if took := began.Since(); err == nil || took > 3*time.Second {
				t.Errorf("statistics of a hung volume: %v after %s", err, took)
			}
		}
		fine := e.publish(other, "fine")
		write(t, filepath.Join(fine, "file"), "x")
		if _, err := e.stats(5*time.Second, other, fine); err != nil {
			t.Errorf("statistics of another volume: %v", err)
		}
		e.unpublish(other, fine)
		// The driver's own call keeps the target busy until the client goes on.
		e.awaitBusy(v, target, "this driver", target)
		if err := unix.Kill(hung.PID, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		e.unpublish(v, target)
		e.NothingLeft(t)
	})
}

// A client that does not answer delays no status, and neither do many mounts.
func TestTimedStatus(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "the status is read from memory and from records, which are the same with either launcher")
	eachClient(t, func(t *testing.T, e *env, client string) {
		var targets []string
		for i := range 10 {
			targets = append(targets, e.publish(static(fmt.Sprint("timed-", i), client), fmt.Sprint("t", i)))
		}
		for _, process := range e.Running(programs[client]) {
			rigtest.Freeze(t, process.PID)
		}
		for _, target := range targets {
			e.askInVain(target)
		}
		for _, v := range []string{"timed-0", "timed-9"} {
			e.awaitStatus(static(v, client), "the state of an unresponsive client", func(m status.Mount) bool { return m.State == status.Unresponsive })
		}
		for range 3 {
			if _, took, err := e.status("-o", "json"); err != nil || took > time.Second {
				t.Errorf("the status took %s: %v", took, err)
			}
		}
		for _, process := range e.Running(programs[client]) {
			if err := unix.Kill(process.PID, unix.SIGCONT); err != nil {
				t.Error(err)
			}
		}
	}, "--hang-timeout=40s")
}
