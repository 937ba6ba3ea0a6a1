//go:build linux

package host

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// sleeper starts a process that waits in a directory until the test ends, in new namespaces if requested. A new mount namespace is
// private.
func sleeper(t *testing.T, n *Namespace, dir string, namespaces uintptr) *exec.Cmd {
	t.Helper()
	script := "echo ready; read -r _"
	if namespaces != 0 {
		script = "mount --make-rprivate / && " + script
	}
	return sleeperWith(t, n, dir, namespaces, script)
}

// sleeperWith is sleeper with a script, which says "ready" and then waits for its input to end.
func sleeperWith(t *testing.T, n *Namespace, dir string, namespaces uintptr, script string) *exec.Cmd {
	t.Helper()
	// The script changes its directory itself: until the exec, the child blocks a part of the Go runtime, which serves the mount here.
	cmd := exec.Command("/bin/sh", "-c", `cd "$0" && `+script, dir)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces}
	begin(t, n, cmd)
	return cmd
}

// begin starts a process in the namespace, waits until it is ready, and returns the line that says so. The process's input ends with the
// test.
func begin(t *testing.T, n *Namespace, cmd *exec.Cmd) (line string) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	do(t, n, "starting a process", cmd.Start)
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	if line, err = bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	return strings.TrimSpace(line)
}

// levelProcess returns a process of this test's program at a level, in a mount namespace of its own.
func levelProcess(level string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), levelEnv+"="+level)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	return cmd
}

// mountsOf returns the mounts of a source that a process sees.
func mountsOf(t *testing.T, pid int, source string) []Mount {
	t.Helper()
	mounts, err := readMounts(t.Context(), proc.Path(pid, "mountinfo"))
	if err != nil {
		t.Fatal(err)
	}
	var of []Mount
	for _, m := range mounts {
		if m.Source == source {
			of = append(of, m)
		}
	}
	return of
}

func TestCopiesInOtherNamespacesAreDetached(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place, bound, other := mkdir(t, dir, "m"), dir+"/bound", mkdir(t, dir, "other")
	f := mountFake(t, n, place, "s3csi:copied")
	mountFake(t, n, other, "s3csi:other")
	if err := bindDirs(t, n, place, bound, BindAttrs{}); err != nil {
		t.Fatal(err)
	}
	a := sleeper(t, n, "/", unix.CLONE_NEWNS)
	b := sleeperWith(t, n, place, unix.CLONE_NEWNS, "mount --make-rprivate / && umount -l /proc && echo ready; read -r _") // busy, and with no /proc
	m := mountAt(t, n, place)
	if got := len(mountsOf(t, a.Process.Pid, m.Source)); got != 2 {
		t.Fatalf("%d copies in the namespace, want 2", got)
	}
	count, err := n.DetachCopies(within(t, 10*time.Second), m)
	if count != 4 || err != nil {
		t.Errorf("detached %d, %v, want 4", count, err)
	}
	for _, cmd := range []*exec.Cmd{a, b} {
		if left := mountsOf(t, cmd.Process.Pid, m.Source); len(left) != 0 {
			t.Errorf("left: %+v", left)
		}
		if left := mountsOf(t, cmd.Process.Pid, "s3csi:other"); len(left) != 1 {
			t.Errorf("of another mount: %+v", left)
		}
	}
	mountAt(t, n, place)
	mountAt(t, n, bound)
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Errorf("the host's own mount: %v", err)
	}
	if count, err := n.DetachCopies(within(t, 10*time.Second), m); count != 0 || err != nil {
		t.Errorf("a second time: %d, %v", count, err)
	}
	wrong := m
	wrong.Source = "s3csi:was here before"
	if copies := (hostView{}).foreignTo([]Mount{m}, wrong.IsCopy); len(copies) != 0 {
		t.Error("a device number alone makes a copy")
	}
	_ = f
}

func TestClientExitsWhenCopiesAreDetached(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "m")
	f := mountFake(t, n, place, "s3csi:pinned")
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Fatal(err)
	}
	m := mountAt(t, n, place)
	sleeper(t, n, "/", unix.CLONE_NEWNS)
	do(t, n, "unmounting", func() error { return Unmount(place) })
	select {
	case <-f.done:
		t.Log("in a namespace of its own the test has no copy")
	case <-time.After(50 * time.Millisecond):
	}
	if count, err := n.DetachCopies(within(t, 10*time.Second), m); count == 0 || err != nil {
		t.Errorf("detached %d, %v", count, err)
	}
	select {
	case <-f.done:
	case <-time.After(5 * time.Second):
		t.Error("the client still runs")
	}
}

func TestHiddenCopyIsReported(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "m")
	mountFake(t, n, place, "s3csi:hidden")
	holder := sleeperWith(t, n, "/", unix.CLONE_NEWNS, "mount --make-rprivate / && mount -t tmpfs x "+dir+" && echo ready; read -r _")
	m := mountAt(t, n, place)
	count, err := n.DetachCopies(within(t, 10*time.Second), m)
	if count != 0 || err == nil || !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), processName(holder.Process.Pid)) {
		t.Errorf("detached %d, %v", count, err)
	}
}

func TestPropagatedMountsAreNotDetached(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	kubelet := mkdir(t, dir, "kubelet")
	sharedTmpfs(t, n, kubelet)
	do(t, n, "mkdir", func() error { return os.Mkdir(kubelet+"/m", 0o755) })
	place := kubelet + "/m"
	mountFake(t, n, place, "s3csi:peer")
	m := mountAt(t, n, place)
	peer := sleeperWith(t, n, "/", unix.CLONE_NEWNS, "echo ready; read -r _")
	if count, err := n.DetachCopies(within(t, 10*time.Second), m); count != 0 || err != nil {
		t.Errorf("detached %d, %v", count, err)
	}
	mountAt(t, n, place) // an unmount there would have come back
	do(t, n, "unmounting", func() error { return Unmount(place) })
	if left := mountsOf(t, peer.Process.Pid, m.Source); len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
}

// A copy on a slave of a mount of the host is unmounted with it. A copy that a container has for itself stays.
func TestLastingAfter(t *testing.T) {
	host := hostView{ids: map[int]bool{1: true}, peers: map[string]bool{"7": true}}
	parent := func(optional ...string) Mount { return Mount{ID: 20, Mountpoint: "/sources", Optional: optional} }
	stale := Mount{ID: 21, Parent: 20, Minor: 99, Mountpoint: "/sources/a"}
	for name, tc := range map[string]struct {
		parent Mount
		stays  bool
	}{
		"on a private mount":               {parent(), true},
		"on a peer":                        {parent("shared:7"), false},
		"on a slave":                       {parent("master:7"), false},
		"on a slave that is shared itself": {parent("shared:8", "master:7"), false},
		"on a slave of something else":     {parent("shared:8", "master:9"), true},
	} {
		got := host.lastingAfter([]Mount{tc.parent, stale}, func(m Mount) bool { return m.Minor == 99 })
		if (len(got) == 1) != tc.stays {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestDirectoryIn_IsOnTheNearestMount(t *testing.T) {
	all := []Mount{
		{Minor: 1, Root: "/", Mountpoint: "/"}, {Minor: 2, Root: "/", Mountpoint: "/run"}, {Minor: 3, Root: "/", Mountpoint: "/run/s3"},
		{Minor: 4, Root: "/", Mountpoint: "/run/s3-csi"}, {Minor: 5, Root: "/sub", Mountpoint: "/run"},
	}
	for path, want := range map[string]Directory{
		"/run/s3-csi/resolv.conf": {0, 4, "/resolv.conf"}, "/run/s3-csix": {0, 5, "/sub/s3-csix"}, "/var": {0, 1, "/var"}, "/run": {0, 5, "/sub"},
	} {
		if d, ok := DirectoryIn(all, path); !ok || d != want {
			t.Errorf("%s: %+v", path, d)
		}
	}
	if _, ok := DirectoryIn(nil, "/run"); ok {
		t.Error("a directory in an empty table")
	}
}
