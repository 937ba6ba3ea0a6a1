//go:build linux

package host

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestInvalidTargetPaths(t *testing.T) {
	dir := t.TempDir()
	mkdir(t, dir, "root/parent/dir")
	mkdir(t, dir, "elsewhere/sub")
	if err := os.WriteFile(dir+"/root/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"root/link": dir + "/elsewhere", "root/parent/up": "..", "root/parent/last": "dir", "linked-root": "root"} {
		if err := os.Symlink(to, dir+"/"+link); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("n", 256)
	for _, tc := range []struct{ name, root, path, text string }{
		{"empty", "", "", "empty"},
		{"relative", "", "a/b", "absolute"},
		{"the root", "", "/", "below"},
		{"dots", "", dir + "/root/../root/x", "clean"},
		{"doubled slash", "", "/" + dir, "clean"},
		{"trailing slash", "", dir + "/root/x/", "clean"},
		{"NUL", "", dir + "/x\x00y", "NUL"},
		{"long name", "", dir + "/" + long, "too long"},
		{"long parent", "", dir + "/" + long + "/x", "too long"},
		{"long path", "", strings.Repeat("/abcdefg", 600), "too long"},
		{"not below the root", dir + "/root", dir + "/elsewhere/x", "not below"},
		{"the given root", dir + "/root", dir + "/root", "not below"},
		{"a name that begins like the root", dir + "/root", dir + "/rootling", "not below"},
		{"missing parent", "", dir + "/root/none/x", "none does not exist"},
		{"file as parent", "", dir + "/root/file/x", "not a directory"},
		{"file as target", "", dir + "/root/file", "file is not a directory"},
		{"symlink as target", "", dir + "/root/parent/last", "last is a symbolic link"},
		{"symlink to outside", dir + "/root", dir + "/root/link/x", "root/link is a symbolic link"},
		{"symlink that stays inside", dir + "/root", dir + "/root/parent/up/x", "parent/up is a symbolic link"},
		{"symlink with no root given", "", dir + "/linked-root/x", "linked-root is a symbolic link"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, err := MakeTarget(tc.root, tc.path)
			if err == nil {
				f.Close()
			}
			if !fault.Is(err, fault.Invalid) || !strings.HasPrefix(err.Error(), targetField+": ") || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("got %v, want %q", err, tc.text)
			}
		})
	}
	if entries, _ := os.ReadDir(dir + "/elsewhere"); len(entries) != 1 {
		t.Errorf("something was made behind a symbolic link: %v", entries)
	}
}

func TestTargetIsCreatedAndRemoved(t *testing.T) {
	dir := t.TempDir()
	mkdir(t, dir, "root")
	if err := os.Symlink("root", dir+"/linked"); err != nil {
		t.Fatal(err)
	}
	target := dir + "/linked/target"
	if _, err := OpenTarget(dir+"/linked", target); !fault.Is(err, fault.NotFound) {
		t.Errorf("a missing target: %v", err)
	}
	if _, err := OpenTarget(dir+"/linked", target+"/missing/too"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a missing parent: %v", err)
	}
	for range 2 {
		f, err := MakeTarget(dir+"/linked", target)
		if err != nil {
			t.Fatal(err)
		}
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_PATH == 0 {
			t.Errorf("flags %#x, %v", flags, err)
		}
		if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("it is inherited: %#x, %v", flags, err)
		}
		f.Close()
	}
	if st, err := os.Stat(dir + "/root/target"); err != nil || st.Mode().Perm() != targetMode {
		t.Errorf("%v, %v", st, err)
	}
	if err := os.WriteFile(target+"/data", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := RemoveTarget(dir+"/linked", target)
	if !fault.Is(err, fault.Precondition) {
		t.Errorf("a target with data in it: %v", err)
	}
	hasErrno(t, err, unix.ENOTEMPTY)
	if err := os.Remove(target + "/data"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := RemoveTarget(dir+"/linked", target); err != nil {
			t.Error(err)
		}
	}
	if err := RemoveTarget("", dir+"/none/target"); err != nil {
		t.Errorf("a missing parent: %v", err)
	}
	if err := RemoveTarget("", dir+"/linked"); !fault.Is(err, fault.Invalid) {
		t.Errorf("a symbolic link: %v", err)
	}
	if _, err := os.Lstat(dir + "/linked"); err != nil {
		t.Error("the symbolic link was removed")
	}
}

func FuzzBelow(f *testing.F) {
	for _, s := range []string{"/", "/a", "/r/a", "/r/../a", "//r", "/r/", "/r/a\x00", "r/a", "/r/./a", "/r/.."} {
		f.Add("/r", s)
		f.Add("", s)
	}
	f.Fuzz(func(t *testing.T, root, target string) {
		rel, err := below(root, target)
		if err != nil {
			return
		}
		if rel == "" || rel[0] == '/' || !strings.HasSuffix(target, "/"+rel) {
			t.Errorf("%q below %q is %q", target, root, rel)
		}
		for name := range strings.SplitSeq(rel, "/") {
			if name == "" || name == "." || name == ".." {
				t.Errorf("%q below %q is %q", target, root, rel)
			}
		}
	})
}

func TestCheckTarget_DirectoriesOfTheSystemNeedARoot(t *testing.T) {
	for target, system := range map[string]bool{
		"/": true, "/data": true, "/etc": true, "/etc/": true, "/etc/ssl/certs": true, "/usr/local/bin": true, "/proc/sys": true, "/dev/shm": true, "/boot/efi": true,
		"/lib64/security": true, "/home": true, "/home/user": true, "/run": true, "/run/secrets": true, "/run/systemd/system": true, "/var": true, "/var/lib": true,
		"/var/lib/dpkg": true, "/var/log/pods/x": true, "/run/user/0/x": true, "/etc/../etc/x": true,
		"/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount": false, "/var/snap/microk8s/common/var/lib/kubelet/pods/u/mount": false,
		"/var/lib/k0s/kubelet/pods/u":  false,
		"/opt/nomad/data/client/csi/x": false, "/srv/data": false, "/mnt/data": false, "/tmp/x": false, "/home/user/nomad/csi": false, "/run/containers/x": false,
	} {
		err := CheckTarget("", target)
		if (err != nil) != system || err != nil && fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: %v", target, err)
		}
		if err := CheckTarget("/", target); (err != nil) != system {
			t.Errorf("%s below /: %v", target, err)
		}
		if err := CheckTarget("/etc", target); err != nil {
			t.Errorf("%s, with a root: %v", target, err)
		}
	}
}

// TestOpenTarget_LinkBelowTheRootNamesTheFlag opens a target below a link, which an operator can allow with another root.
func TestOpenTarget_LinkBelowTheRootNamesTheFlag(t *testing.T) {
	root, disk := t.TempDir(), t.TempDir()
	if err := errors.Join(os.MkdirAll(disk+"/uid", 0o755), os.Symlink(disk, root+"/pods")); err != nil {
		t.Fatal(err)
	}
	target := root + "/pods/uid/mount"
	if _, err := MakeTarget(root, target); fault.KindOf(err) != fault.Invalid || !strings.Contains(err.Error(), "--target-root to "+root+"/pods") {
		t.Error(err)
	}
	dir, err := MakeTarget(root+"/pods", target)
	if err != nil {
		t.Fatal(err)
	}
	dir.Close()
	if _, err := os.Stat(disk + "/uid/mount"); err != nil {
		t.Error(err)
	}
}

func TestInspect_ReportsMountPoints(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system")
	}
	dir := t.TempDir()
	before, err := Inspect(dir)
	if err != nil || before.Mountpoint {
		t.Fatalf("%+v, %v", before, err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if p, err := Inspect(dir); err != nil || !p.Mountpoint || p.Minor == before.Minor && p.Major == before.Major {
		t.Errorf("a mount point: %+v, %v", p, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if p, err := Inspect(filepath.Join(dir, "sub")); err != nil || p.Mountpoint {
		t.Errorf("a directory of it: %+v, %v", p, err)
	}
	if err := os.Symlink(dir, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if p, err := Inspect(filepath.Join(dir, "link")); err != nil || p.Mountpoint {
		t.Errorf("a link to it: %+v, %v", p, err)
	}
	if _, err := Inspect(filepath.Join(dir, "none")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a missing path: %v", err)
	}
}
