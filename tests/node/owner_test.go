//go:build !lane || ordinary

package node

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// as runs a shell command as a user and gives its output and whether it succeeded.
func as(t *testing.T, uid, gid uint32, groups []uint32, command string) (string, bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid, Groups: groups}}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err == nil
}

// Only processes with the volume's group can use it.
func TestVolumeMountGroup(t *testing.T) {
	rigtest.ProcessOnly(t, "owners are options of the mount")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "group/dir/file", "x")
		v := static("group", client)
		target := e.publish(v, "t", group("4321"))
		uid := e.client(client).UID
		for path, mode := range map[string]string{"": "0770", "dir": "0770", "dir/file": "0660"} {
			if got, want := look(t, filepath.Join(target, path)), fmt.Sprintf("%d:4321 %s", uid, mode); got != want {
				t.Errorf("%q is shown as %s, want %s", path, got, want)
			}
		}
		if out, ok := as(t, 12345, 12345, []uint32{4321}, "cat "+target+"/dir/file && echo y > "+target+"/new && cat "+target+"/new"); !ok || out != "xy" {
			t.Errorf("a process with the group: %q, %t", out, ok)
		}
		for _, command := range []string{"ls " + target, "cat " + target + "/dir/file", "echo z > " + target + "/other"} {
			if out, ok := as(t, 12345, 12345, nil, command); ok || !strings.Contains(out, "Permission denied") {
				t.Errorf("a process without the group: %s: %q, %t", command, out, ok)
			}
		}
		if got := look(t, filepath.Join(target, "new")); got != fmt.Sprintf("%d:4321 0660", uid) {
			t.Errorf("the new file is shown as %s", got)
		}
		e.unpublish(v, target)
		for _, bad := range []string{"wheel", "-1", "4294967295", "1 "} {
			want(t, e.tryPublish(10*time.Second, v, e.Target("t"), group(bad)), codes.InvalidArgument, "volume_mount_group")
		}
		e.NothingLeft(t)
	})
}

// Without a group any pod can read and write, root or not; the parameters change that.
func TestOwnersAndModes(t *testing.T) {
	rigtest.ProcessOnly(t, "owners are options of the mount")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		plain := static("plain", client)
		target := e.publish(plain, "plain")
		if out, ok := as(t, 12345, 12345, nil, "echo x > "+target+"/file && cat "+target+"/file"); !ok || out != "x" {
			t.Errorf("a non-root process: %q, %t", out, ok)
		}
		if out, ok := as(t, 0, 0, nil, "cat "+target+"/file && echo y > "+target+"/root"); !ok || out != "x" {
			t.Errorf("root: %q, %t", out, ok)
		}
		e.unpublish(plain, target)

		e.Put(t, bucket, "owned/dir/file", "x")
		owned := static("owned", client, "uid", "1234", "gid", "2345", "dirMode", "0750", "fileMode", "640")
		target = e.publish(owned, "owned")
		for path, mode := range map[string]string{"": "0750", "dir": "0750", "dir/file": "0640"} {
			if got, want := look(t, filepath.Join(target, path)), "1234:2345 "+mode; got != want {
				t.Errorf("%q is shown as %s, want %s", path, got, want)
			}
		}
		if out, ok := as(t, 1234, 99, nil, "echo y > "+target+"/dir/mine && cat "+target+"/dir/mine"); !ok || out != "y" {
			t.Errorf("the owner: %q, %t", out, ok)
		}
		if out, ok := as(t, 99, 2345, nil, "cat "+target+"/dir/file"); !ok || out != "x" {
			t.Errorf("the group: %q, %t", out, ok)
		}
		if _, ok := as(t, 99, 2345, nil, "echo z > "+target+"/dir/group"); ok {
			t.Error("the group can write to a directory of mode 0750")
		}
		if _, ok := as(t, 99, 99, nil, "ls "+target); ok {
			t.Error("others can list a directory of mode 0750")
		}
		e.unpublish(owned, target)

		// What the author says wins over the group.
		both := static("both", client, "gid", "2345", "dirMode", "0755")
		target = e.publish(both, "both", group("4321"))
		if got, want := look(t, target), fmt.Sprintf("%d:2345 0755", e.client(client).UID); got != want {
			t.Errorf("gid, dirMode and a group: %s, want %s", got, want)
		}
		e.unpublish(both, target)
		e.NothingLeft(t)
	})
}

// Root's ids are refused by name where a client cannot show them, and shown where it can.
func TestRootAsOwner(t *testing.T) {
	rigtest.ProcessOnly(t, "owners are options of the mount")
	t.Parallel()
	e := start(t)
	v := static("rooted", mountpoint, "uid", "0")
	want(t, e.tryPublish(10*time.Second, v, e.Target("t")), codes.InvalidArgument, "uid", mountpoint)
	e.undone(e.Target("t"))
	v = static("rooted", rclone, "uid", "0", "gid", "0")
	target := e.publish(v, "t")
	if got := look(t, target); !strings.HasPrefix(got, "0:0 ") {
		t.Errorf("the root is shown as %s", got)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// An SELinux context is an option of mount(2); a host without SELinux refuses it in words.
func TestSELinuxContext(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("label", rclone)
	const label = `context="system_u:object_r:container_file_t:s0:c1,c2"`
	target := e.Target("t")
	err := e.tryPublish(10*time.Second, v, target, flags(label))
	if err == nil {
		e.unpublish(v, target) // this host has SELinux
	} else {
		want(t, err, codes.FailedPrecondition, "SELinux is not enabled on this host")
		e.undone(target)
	}
	for _, bad := range []string{"context=", "context=a:b", `context="a:b:c",fd=9`, "context=a:b:c d", "context=a:b:c:s0,fd=3\"", "context=a:b:c\n"} {
		want(t, e.tryPublish(10*time.Second, v, target, flags(bad)), codes.InvalidArgument, "mount_flags")
	}
	want(t, e.tryPublish(10*time.Second, v, target, flags("context=a:b:c", "context=a:b:d")), codes.InvalidArgument, "mount_flags")
	e.undone(target)
}
