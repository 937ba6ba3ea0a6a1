//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A target that is not a clean absolute path below the root, or that symbolic links lead to, is refused and nothing is
// made.
func TestTargetsThatAreRefused(t *testing.T) {
	rigtest.ProcessOnly(t, "targets are checked before anything is started")
	t.Parallel()
	e := newEnv(t)
	root := filepath.Join(e.Dir, "targets")
	e.drive("--target-root=" + root)
	v := static("v", rclone)
	outside := filepath.Join(e.Dir, "outside")
	for _, dir := range []string{outside, filepath.Join(root, "real")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for from, to := range map[string]string{"link": outside, "inner": "real", "real/target-link": outside} {
		if err := os.Symlink(to, filepath.Join(root, from)); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(root, "file"), "")
	targets := map[string]string{
		"relative":                  "targets/real/t",
		"empty":                     "",
		"with ..":                   root + "/real/../../outside/t",
		"with .. inside":            root + "/real/../real/t",
		"outside the root":          outside + "/t",
		"the root itself":           root,
		"a symlink that leads out":  root + "/link/t",
		"a symlink that stays":      root + "/inner/t",
		"a symlink as the target":   root + "/real/target-link",
		"a parent that is missing":  root + "/missing/t",
		"a parent that is a file":   root + "/file/t",
		"a file":                    root + "/file",
		"NUL":                       root + "/real/t\x00",
		"over-long":                 root + "/real/" + strings.Repeat("x", 300),
		"like the root, but longer": root + "-not/t",
	}
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			want(t, e.tryPublish(30*time.Second, v, target), codes.InvalidArgument, "target_path")
			e.NothingLeft(t)
			if entries, _ := os.ReadDir(outside); len(entries) > 0 {
				t.Errorf("made outside: %v", entries)
			}
		})
	}
	if entries, _ := os.ReadDir(filepath.Join(root, "real")); len(entries) != 1 {
		t.Errorf("in the real directory: %v", entries)
	}
	if got := e.lives(); got != 0 {
		t.Errorf("%d mounts were made", got)
	}
	e.unpublish(v, e.publish(v, "fine"))
}

// A file that is the target of an unpublish, or a directory with files in it, is no publication: it stays.
func TestUnpublishRemovesOnlyEmptyTargets(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("v", rclone)
	target := e.Target("t")
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(target, "precious"), "x")
	want(t, e.tryUnpublish(10*time.Second, v, target), codes.FailedPrecondition, target, "not empty")
	if got := read(t, filepath.Join(target, "precious")); got != "x" {
		t.Errorf("the file reads %q", got)
	}
	e.unpublish(v, e.Target("never"))
	e.unpublish(v, filepath.Join(e.Dir, "targets", "no", "parent"))
}

// A foreign mount on the target is left alone, and the error says what it is.
func TestForeignMountsAreLeftAlone(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("v", rclone)
	target := e.Target("t")
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatal(err)
	}
	tmpfs := func() {
		t.Helper()
		if err := unix.Mount("stranger", target, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	tmpfs()
	want(t, e.tryPublish(10*time.Second, v, target), codes.FailedPrecondition, "stranger", "tmpfs", target)
	want(t, e.tryUnpublish(10*time.Second, v, target), codes.FailedPrecondition, "stranger", "tmpfs", target)
	if got := mountsAt(t, target); len(got) != 1 || got[0].Source != "stranger" {
		t.Errorf("on the target: %v", got)
	}
	if err := unix.Unmount(target, 0); err != nil {
		t.Fatal(err)
	}
	// Over a publication, too.
	e.publish(v, "t")
	tmpfs()
	want(t, e.tryPublish(10*time.Second, v, target), codes.FailedPrecondition, "stranger")
	want(t, e.tryUnpublish(10*time.Second, v, target), codes.FailedPrecondition, "stranger")
	if err := unix.Unmount(target, 0); err != nil {
		t.Fatal(err)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// The mount table alone is enough to unpublish, if the publication's record or the mount's is lost, and still nothing that
// was written is.
func TestUnpublishWithoutRecords(t *testing.T) {
	t.Parallel()
	const publication, mount = "publications/*.json", "mounts/*/mount.json"
	for _, lost := range [][]string{{publication}, {mount}, {publication, mount}} {
		t.Run(strings.Join(lost, " and "), func(t *testing.T) {
			e := start(t)
			v := static("lost", rclone)
			target := e.publish(v, "t")
			for _, pattern := range lost {
				files, err := filepath.Glob(filepath.Join(e.State, pattern))
				if err != nil || len(files) != 1 {
					t.Fatalf("files like %s: %v, %v", pattern, files, err)
				}
				if err := os.Remove(files[0]); err != nil {
					t.Fatal(err)
				}
			}
			e.restart() // its first sweep finds the mount, and must leave alone what is in use
			e.await(10*time.Second, "the first sweep", func() bool { return strings.Count(e.Logs(), "Serving") == 2 })
			time.Sleep(200 * time.Millisecond)
			content := random(3 << 20)
			e.proxy.Set(slow)
			write(t, filepath.Join(target, "file"), content)
			if err := e.tryUnpublish(brief, v, target); err != nil && status.Code(err) != codes.DeadlineExceeded {
				want(t, err, codes.Aborted)
			}
			e.proxy.Set(faultproxy.Faults{})
			e.unpublish(v, target)
			e.awaitNothingLeft(5 * time.Second)
			if got := e.Object(t, bucket, "lost/file"); got != content {
				t.Errorf("the object has %d bytes of %d, equal: %t", len(got), len(content), got == content)
			}
			e.unpublish(v, e.publish(v, "t"))
			e.awaitNothingLeft(5 * time.Second)
		})
	}
}

// A target that is in use is not unmounted lazily: the error names the processes that use it, and the retry succeeds.
func TestUnpublishSaysWhoUsesTheTarget(t *testing.T) {
	e := start(t)
	v := static("busy", rclone)
	target := e.publish(v, "t")
	write(t, filepath.Join(target, "file"), "x")
	users := map[string]*exec.Cmd{
		"sleep": exec.CommandContext(t.Context(), "sleep", "1000"),
		"tail":  exec.CommandContext(t.Context(), "tail", "-f", filepath.Join(target, "file")),
	}
	users["sleep"].Dir = target
	for name, cmd := range users {
		t.Run(name, func(t *testing.T) {
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
			e.await(10*time.Second, "it to use the target", func() bool {
				links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", cmd.Process.Pid))
				return slices.ContainsFunc(append(links, fmt.Sprintf("/proc/%d/cwd", cmd.Process.Pid)), func(link string) bool {
					place, _ := os.Readlink(link)
					return strings.HasPrefix(place, target)
				})
			})
			e.awaitBusy(v, target, name+" (pid ", target)
		})
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// A process that took a private copy of the mount into a namespace of its own does not keep the client alive.
func TestPrivateCopiesDoNotKeepAMountAlive(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("copied", client)
		target := e.publish(v, "t")
		write(t, filepath.Join(target, "file"), "x")
		cmd := exec.CommandContext(t.Context(), "unshare", "-m", "--propagation", "private", "sh", "-c", "cat "+filepath.Join(target, "file")+"; exec sleep 1000")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		e.unpublish(v, target)
		t.Logf("unpublished after %s", time.Since(began))
		e.NothingLeft(t)
		if err := cmd.Process.Signal(unix.Signal(0)); err != nil {
			t.Errorf("the holder of the copy is gone, this test proves nothing: %v", err)
		}
		if got := e.Object(t, bucket, "copied/file"); got != "x" {
			t.Errorf("the object is %q", got)
		}
	})
}
