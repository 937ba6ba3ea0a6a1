//go:build !lane || ordinary

package node

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A publication waits for a draining mount below the same prefix, whatever differs otherwise, and its data stays.
func TestAMountWaitsForADrainingMountOfAnotherKey(t *testing.T) {
	t.Parallel()
	const name = "shared"
	volume := func(prefix, client string, pairs ...string) *csi.Volume {
		v := static(name, client, pairs...)
		v.VolumeContext["prefix"] = prefix
		return v
	}
	for _, tc := range []struct {
		what          string
		second        *csi.Volume
		first, change func(e *env) change
		path          string // of the first volume's file in the second
		readOnly      bool
		minio         bool
	}{
		{what: "fsGroup", second: volume("shared/", rclone), first: groupOf("4001"), change: groupOf("4002"), path: "file"},
		{what: "fsGroup, on MinIO", second: volume("shared/", rclone), first: groupOf("4001"), change: groupOf("4002"), path: "file", minio: true},
		{what: "option", second: volume("shared/", rclone, "dirMode", "0750"), path: "file"},
		{what: "secret", second: volume("shared/", rclone), first: secretOf("one"), change: secretOf("another"), path: "file"},
		{what: "client", second: volume("shared/", mountpoint), path: "file", readOnly: true}, // it could not overwrite
		{what: "read-only", second: volume("shared/", rclone, "readOnly", "true"), path: "file", readOnly: true},
		{what: "prefix above", second: volume("", rclone), path: "shared/file"},
	} {
		t.Run(tc.what, func(t *testing.T) {
			t.Parallel()
			begin := start
			if tc.minio {
				begin = startOnMinIO
			}
			e := begin(t, "--mount-timeout=10s")
			none := func(*env) change { return func(*csi.NodePublishVolumeRequest) {} }
			if tc.first == nil {
				tc.first = none
			}
			if tc.change == nil {
				tc.change = none
			}
			before, after := tc.first(e), tc.change(e)
			v := static(name, rclone)
			target := e.publish(v, "first", before)
			e.proxy.Set(faultproxy.Faults{Reset: true, Match: uploads("/shared/file")})
			write(t, filepath.Join(target, "file"), "old")
			e.awaitBusy(v, target, "draining: 1 upload")

			next := e.Target("next")
			want(t, e.tryPublish(time.Minute, tc.second, next, after), codes.Aborted, "draining: 1 upload", name)
			if len(mountsAt(t, next)) > 0 {
				t.Error("the target is mounted beside a mount that drains")
			}
			e.restart("--mount-timeout=10s")
			e.proxy.Set(faultproxy.Faults{})
			e.await(2*time.Minute, "the publication", func() bool {
				err := e.tryPublish(time.Minute, tc.second, next, after)
				if err != nil && status.Code(err) != codes.Aborted {
					t.Fatal(err)
				}
				return err == nil
			})
			if got := read(t, filepath.Join(next, tc.path)); got != "old" {
				t.Errorf("the next mount reads %q", got)
			}
			expected := "old"
			if !tc.readOnly {
				expected = "newer"
				write(t, filepath.Join(next, tc.path), expected)
			}
			e.unpublish(v, target)
			e.unpublish(tc.second, next)
			if got := e.Object(t, bucket, "shared/file"); got != expected {
				t.Errorf("the object is %q, want %q", got, expected)
			}
			e.NothingLeft(t)
		})
	}
}

// Mounts that are in use share a prefix without waiting, and prefixes that do not overlap do not wait for a drain.
func TestMountsThatNeedNotWait(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("a", rclone)
	used := e.publish(v, "used", group("4001"))
	e.publish(v, "beside", group("4002")) // would wait for as long as the first is used
	e.unpublish(v, e.Target("beside"))

	e.proxy.Set(faultproxy.Faults{Reset: true, Match: uploads("/a/file")})
	write(t, filepath.Join(used, "file"), "old")
	e.awaitBusy(v, used, "draining: 1 upload")
	ab := static("ab", rclone)
	e.publish(ab, "ab")
	e.unpublish(ab, e.Target("ab"))
	e.proxy.Set(faultproxy.Faults{})
	e.unpublish(v, used)
	e.NothingLeft(t)
}

func groupOf(gid string) func(*env) change {
	return func(*env) change { return group(gid) }
}

func secretOf(user string) func(*env) change {
	return func(e *env) change { return secrets(e.user(user)) }
}

// uploads are the requests that store an object whose path ends so.
func uploads(path string) func(*http.Request) bool {
	return func(r *http.Request) bool { return r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, path) }
}

// Publications that wait for each other's former mounts do not block each other.
func TestPublicationsThatWaitForEachOther(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("crossed", rclone)
	groups := []string{"4001", "4002"}
	targets := map[string]string{}
	for _, g := range groups {
		targets[g] = e.publish(v, "first-"+g, group(g))
		write(t, filepath.Join(targets[g], g), g)
	}
	e.proxy.Set(faultproxy.Faults{Reset: true, Match: func(r *http.Request) bool { return r.Method == http.MethodPut }})
	for _, g := range groups {
		write(t, filepath.Join(targets[g], "late-"+g), g)
		e.awaitBusy(v, targets[g], "draining: ")
	}
	published := make(chan error, len(groups))
	for _, g := range groups {
		next := e.Target("next-" + g)
		go func() { published <- e.tryPublish(2*time.Minute, v, next, group(g)) }()
	}
	e.await(20*time.Second, "a publication that waits", func() bool {
		return strings.Contains(e.Logs(), "Waiting for draining mount") || e.requests("NodePublishVolume") == 4
	})
	e.proxy.Set(faultproxy.Faults{})
	for range groups {
		if err := <-published; err != nil {
			t.Fatal(err)
		}
	}
	for _, g := range groups {
		for _, other := range groups {
			if got := read(t, filepath.Join(e.Target("next-"+g), "late-"+other)); got != other {
				t.Errorf("the mount of group %s reads %q", g, got)
			}
		}
		e.unpublish(v, targets[g])
	}
	for _, g := range groups {
		e.unpublish(v, e.Target("next-"+g))
	}
	e.NothingLeft(t)
}

// What drains with keys that are worth nothing any more is stored with those of the volume's changed secret.
func TestADrainGoesOnWithTheChangedSecret(t *testing.T) {
	t.Parallel()
	for _, who := range []string{"the helper lives", "the helper is dead"} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			e := start(t)
			former := e.user("owner")
			changed := e.anotherKey("owner")
			v := static("changed", rclone)
			target := e.publish(v, "first", secrets(former))
			e.proxy.Set(faultproxy.Faults{Reset: true, Match: uploads("/changed/file")})
			write(t, filepath.Join(target, "file"), "old")
			e.awaitBusy(v, target, "draining: 1 upload")
			e.revoke("owner", former)
			if who == "the helper is dead" {
				for _, p := range e.Running("") {
					rigtest.Kill(e.t, p)
				}
			}
			e.proxy.Set(faultproxy.Faults{})
			next := e.publish(v, "next", secrets(changed))
			if got := read(t, filepath.Join(next, "file")); got != "old" {
				t.Errorf("the next mount reads %q", got)
			}
			e.unpublish(v, target)
			e.unpublish(v, next)
			e.NothingLeft(t)
		})
	}
}

// What a reboot left of a mount is stored before a mount of the volume's changed secret starts.
func TestAMountWaitsForWhatARebootLeft(t *testing.T) {
	t.Parallel()
	e := start(t)
	former := e.user("owner")
	changed := e.anotherKey("owner")
	v := static("rebooted", rclone)
	target := e.publish(v, "first", secrets(former))
	var tried atomic.Bool
	of := uploads("/rebooted/file")
	e.proxy.Set(faultproxy.Faults{Reset: true, Match: func(r *http.Request) bool {
		match := of(r)
		if match {
			tried.Store(true)
		}
		return match
	}})
	write(t, filepath.Join(target, "file"), "old")
	e.await(20*time.Second, "an upload", tried.Load)
	e.Kill()
	for _, p := range e.Running("") {
		rigtest.Kill(e.t, p)
	}
	sources, err := filepath.Glob(filepath.Join(e.State, "sources", "*"))
	if err != nil || len(sources) != 1 {
		t.Fatal(sources, err)
	}
	for _, path := range []string{target, sources[0]} {
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
			t.Fatal(path, err)
		}
	}
	for _, gone := range []string{filepath.Join(e.State, "mounts"), sources[0], filepath.Join(e.State, "publications"), target} {
		if err := os.RemoveAll(gone); err != nil {
			t.Fatal(err)
		}
	}
	e.revoke("owner", former)
	e.proxy.Set(faultproxy.Faults{})
	e.drive()
	next := e.publish(v, "next", secrets(changed))
	if got := read(t, filepath.Join(next, "file")); got != "old" {
		t.Errorf("the next mount reads %q", got)
	}
	e.unpublish(v, next)
	e.NothingLeft(t)
}

// A drain can be given up as docs/explanation/mounts.md says, and nothing waits for it any more.
func TestADrainThatIsGivenUp(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("given-up", rclone)
	target := e.publish(v, "first", group("4001"))
	e.proxy.Set(faultproxy.Faults{Reset: true, Match: uploads("/given-up/file")})
	write(t, filepath.Join(target, "file"), "old")
	e.awaitBusy(v, target, "draining: 1 upload")
	caches, err := e.caches()
	if err != nil || len(caches) != 1 {
		t.Fatal(caches, err)
	}
	if err := os.RemoveAll(caches[0]); err != nil {
		t.Fatal(err)
	}
	for _, p := range e.Running("") {
		rigtest.Kill(e.t, p)
	}
	next := e.publish(v, "next", group("4002"))
	e.unpublish(v, target)
	e.unpublish(v, next)
	e.NothingLeft(t)
}

// requests is how many calls of a method the drivers were asked for.
func (e *env) requests(method string) int {
	return strings.Count(e.Logs(), `"Request" method="`+method+`"`)
}
