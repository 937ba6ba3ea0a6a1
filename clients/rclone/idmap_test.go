package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// mapped is the first ID on the host of a container's user namespace, which has as many IDs as kubelet assigns.
const (
	mapped      = 1 << 20
	mappedCount = 1 << 16
)

// idMap mounts an ID-mapped clone of a mount, as container runtimes do.
func idMap(t *testing.T, from, to string) error {
	t.Helper()
	ids := []syscall.SysProcIDMap{{HostID: mapped, Size: mappedCount}}
	holder := exec.Command("sleep", "60")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL}
	check(t, holder.Start())
	defer func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	}()
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", holder.Process.Pid))
	check(t, err)
	defer ns.Close()
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	check(t, err)
	defer unix.Close(tree)
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns.Fd())}); err != nil {
		return err
	}
	check(t, unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH))
	t.Cleanup(func() { _ = unix.Unmount(to, unix.MNT_DETACH) })
	return nil
}

// shell runs a shell command as a user, whose group is the next number.
func shell(uid uint32, script string) ([]byte, error) {
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid + 1}}
	return cmd.CombinedOutput()
}

// TestIDMappedMounts uses a mount like a container with a user namespace: the files' owner is user 1001 of the container, which is
// another user on the host.
func TestIDMappedMounts(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	s.put("vol/old", "old")
	m := startMount(t, mountOptions{s3: s, prefix: "vol/"})
	at := filepath.Join(filepath.Dir(m.dir), "mapped")
	check(t, os.Mkdir(at, 0o755))
	if err := idMap(t, m.dir, at); errors.Is(err, unix.EINVAL) && olderThan(t, 6, 12) {
		t.Skip("needs Linux 6.12: ", err)
	} else {
		check(t, err)
	}
	fi, err := os.Stat(filepath.Join(at, "old"))
	check(t, err)
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != mapped+1001 || st.Gid != mapped+1002 {
		t.Errorf("the file's owner is shown as %d:%d", st.Uid, st.Gid)
	}
	work := fmt.Sprintf("cd %s && mkdir dir && echo new >dir/new && echo more >>old && mv dir/new dir/moved && cat old dir/moved && rm -r dir", at)
	if out, err := shell(mapped+1001, work); err != nil || string(out) != "oldmore\nnew\n" {
		t.Errorf("the owner: %v, %q", err, out)
	}
	// Other users have no access, on the host and in the container.
	for uid, dir := range map[uint32]string{mapped + 1001: m.dir, 1001: at} {
		if out, err := shell(uid, "cat "+filepath.Join(dir, "old")); err == nil {
			t.Errorf("user %d reads %q in %s", uid, out, filepath.Base(dir))
		}
	}
	check(t, unix.Unmount(at, 0))
	m.finish()
	s.want("vol/old", []byte("oldmore\n"))
	if _, ok := s.get("vol/dir/moved"); ok {
		t.Error("what was removed is stored")
	}
}

func olderThan(t *testing.T, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	check(t, unix.Uname(&u))
	var a, b int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b); err != nil {
		t.Fatal(err)
	}
	return a < major || a == major && b < minor
}
