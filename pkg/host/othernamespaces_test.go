//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

func TestDoInOtherNamespacesRunsInSelectedOnes(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "place")
	sleeper(t, n, "/", unix.CLONE_NEWNS)
	const mount = "mount --make-rprivate / && mount -t tmpfs elsewhere %s && echo ready; read -r _"
	want := map[string]bool{}
	for range 2 {
		cmd := sleeperWith(t, n, "/", unix.CLONE_NEWNS, fmt.Sprintf(mount, place))
		want[processName(cmd.Process.Pid)] = true
	}
	picked := func(mounts []Mount) bool {
		return slices.ContainsFunc(mounts, func(m Mount) bool { return m.Mountpoint == place && m.Source == "elsewhere" })
	}
	err := n.DoInOtherNamespaces(within(t, 10*time.Second), "looking around", picked, func(who string) error {
		if !want[who] {
			t.Errorf("work for %s", who)
		}
		delete(want, who)
		var at unix.Statfs_t
		if err := unix.Statfs(place, &at); err != nil || at.Type != unix.TMPFS_MAGIC {
			t.Errorf("it is not done where %s is: %v", who, err)
		}
		return nil
	})
	if err != nil || len(want) > 0 {
		t.Errorf("%v, without %v", err, want)
	}
	broken := errors.New("broken")
	err = n.DoInOtherNamespaces(within(t, 10*time.Second), "failing", picked, func(string) error { return broken })
	if !errors.Is(err, broken) || strings.Count(err.Error(), broken.Error()) != 2 {
		t.Errorf("of two failures: %v", err)
	}
	if err := n.DoInOtherNamespaces(within(t, 10*time.Second), "nothing", func([]Mount) bool { return false }, func(string) error { return broken }); err != nil {
		t.Error(err)
	}
}

// testCgroup makes a cgroup with a name prefix, as a container runtime does, and returns its directory. It is removed after the
// processes that the caller starts.
func testCgroup(t *testing.T, n *Namespace, prefix string) string {
	t.Helper()
	var made string
	err := n.Do(within(t, 10*time.Second), "making a cgroup", func() error {
		var errs []error
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/pids"} {
			dir, err := os.MkdirTemp(root, prefix) //nolint:usetesting // t.TempDir is not a cgroup
			if err == nil {
				made = dir
				if _, err = os.Stat(dir + "/cgroup.procs"); err == nil { // the first is a tmpfs with version 1
					return nil
				}
				_ = os.Remove(dir)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Skipf("needs a cgroup that can be made: %v", err)
	}
	t.Cleanup(func() {
		_ = n.Do(context.Background(), "removing a cgroup", func() error {
			for i := 0; i < 200 && unix.Rmdir(made) != nil; i++ { // until the process has gone
				time.Sleep(5 * time.Millisecond)
			}
			return nil
		})
	})
	return made
}

// join puts a process into a cgroup.
func join(t *testing.T, n *Namespace, cgroup string, pid int) {
	t.Helper()
	do(t, n, "joining a cgroup", func() error {
		procs, err := os.OpenFile(cgroup+"/cgroup.procs", os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer procs.Close()
		_, err = procs.WriteString(strconv.Itoa(pid))
		return err
	})
}

// container starts a process in its own cgroup and its own private mount namespace, which a script prepares.
func (r *swapRig) container(cgroup, script string) int {
	r.t.Helper()
	if cgroup != "" {
		cgroup = testCgroup(r.t, r.n, cgroup)
	}
	pid := sleeperWith(r.t, r.n, "/", unix.CLONE_NEWNS, "mount --make-rprivate / && "+script+" echo ready; read -r _").Process.Pid
	if cgroup != "" {
		join(r.t, r.n, cgroup, pid)
	}
	return pid
}

// ofPod reports whether a cgroup is one that container made for "pod…".
func ofPod() Owners {
	return Owners{ByCgroup: func(cgroup string) string {
		if strings.Contains(cgroup, "/s3csitest-pod") {
			return "pod"
		}
		return ""
	}}
}

func (r *swapRig) elsewhere() []Swapped {
	r.t.Helper()
	swapped, err := r.n.SwapInOtherNamespaces(within(r.t, 20*time.Second), r.swap(), ofPod())
	if err != nil {
		r.t.Fatal(err)
	}
	return swapped
}

func TestSwapElsewhereReplacesOnlyInSelectedNamespaces(t *testing.T) {
	r := newSwapRig(t)
	target, sub := r.bind("target", "/", BindAttrs{}), r.bind("of a subdirectory", "/sub", BindAttrs{ReadOnly: true})
	other := r.container("s3csitest-pod", "umount "+r.source+" && (while umount -l /proc; do :; done) 2>&- ; ") // a container need not have one
	cgroup := testCgroup(t, r.n, "s3csitest-pod")
	// A namespace is selected if any process in it is.
	pod := r.container("", "umount "+r.source+" && ")
	second := exec.Command("nsenter", "--mount="+proc.Path(pod, "ns", "mnt"), "cat")
	stdin, err := second.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.run(second.Start)
	t.Cleanup(func() { stdin.Close(); _ = second.Wait() })
	join(t, r.n, cgroup, second.Process.Pid)
	entered := func() bool {
		own, err := os.Readlink(proc.Path(pod, "ns", "mnt"))
		theirs, _ := os.Readlink(proc.Path(second.Process.Pid, "ns", "mnt"))
		return err != nil || theirs == own
	}
	for !entered() {
		time.Sleep(time.Millisecond)
	}
	agent := r.container("", "umount "+r.source+" && ")
	r.restart()
	r.all(r.elsewhere(), 4)
	for _, pid := range []int{pod, other} {
		for _, place := range []string{target, sub} {
			r.onlyHealthy(pid, place, 1)
			r.alive(pid, place)
		}
		for _, m := range mountsOf(t, pid, r.name) {
			if m.ReadOnly() != (m.Mountpoint == sub) || (m.Root == "/sub") != (m.Mountpoint == sub) || len(m.Optional) > 0 {
				t.Errorf("%+v", m)
			}
		}
	}
	for _, pid := range []int{agent, 0} {
		for _, m := range r.tableOf(pid) {
			if m.Source == r.name && m.Mountpoint != r.source && sameDevice(m, r.healthy) {
				t.Errorf("replaced for pid %d: %+v", pid, m)
			}
		}
	}
	if got := len(mountsOf(t, agent, r.name)); got != 2 {
		t.Errorf("the agent has %d mounts, want 2", got)
	}
	r.all(r.elsewhere(), 0)
	r.all(r.here(r.swap()), 2)

	// Only the mounts in other containers are detached.
	count, err := r.n.DetachStale(within(t, 10*time.Second), r.swap().Stale, ofPod())
	if count != 2 || err != nil {
		t.Errorf("detached %d, %v, want 2", count, err)
	}
	if left := mountsOf(t, agent, r.name); len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
	r.onlyHealthy(pod, target, 1)
	r.onlyHealthy(0, target, 1)
}

func TestDetachStale_SkipsSparedNamespaces(t *testing.T) {
	r := newSwapRig(t)
	r.bind("target", "/", BindAttrs{})
	pod := r.container("s3csitest-pod", "")
	agent := r.container("", "")
	r.restart()
	count, err := r.n.DetachStale(within(t, 10*time.Second), r.swap().Stale, ofPod())
	if count != 2 || err != nil { // its copies of the source and of the target
		t.Errorf("detached %d, %v, want 2", count, err)
	}
	if got := len(mountsOf(t, pod, r.name)); got != 2 {
		t.Errorf("the pod has %d mounts, want 2", got)
	}
	if got := len(mountsOf(t, agent, r.name)); got != 0 {
		t.Errorf("the agent has %d mounts", got)
	}
	if m := mountAt(t, r.n, r.targets+"/target"); sameDevice(m, r.healthy) {
		t.Errorf("%+v", m)
	}
}

func TestSwapElsewhereKeepsAChildOfAContainer(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	volume := mkdir(t, r.dir, "volume")
	r.run(func() error { return unix.Mount("tmpfs", volume, "tmpfs", 0, "") },
		func() error { return os.WriteFile(volume+"/kept", nil, 0o644) })
	pod := r.container("s3csitest-pod", fmt.Sprintf("umount %s && mount --bind %s %s/sub && ", r.source, volume, target))
	r.restart()
	r.all(r.elsewhere(), 1)
	r.alive(pod, target)
	if _, err := os.Stat(proc.Path(pod, "root", target, "sub/kept")); err != nil {
		t.Error(err)
	}
}

// userContainer is container in a user namespace of its own, whose root is that user.
func (r *swapRig) userContainer(root int, script string) int {
	r.t.Helper()
	cgroup := testCgroup(r.t, r.n, "s3csitest-pod-user")
	cmd := exec.Command("/bin/sh", "-c", script+" echo ready; read -r _")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUSER, Credential: &syscall.Credential{NoSetGroups: true},
		UidMappings: []syscall.SysProcIDMap{{HostID: root, Size: 1000}}, GidMappings: []syscall.SysProcIDMap{{HostID: root, Size: 1000}}}
	if err := exec.Command("unshare", "--user", "true").Run(); err != nil {
		r.t.Skipf("needs user namespaces: %v", err)
	}
	begin(r.t, r.n, cmd)
	join(r.t, r.n, cgroup, cmd.Process.Pid)
	return cmd.Process.Pid
}

func TestSwapInAUserNamespace(t *testing.T) {
	r := newSwapRig(t)
	inherited, readOnly := r.bind("inherited", "/", BindAttrs{}), r.bind("read-only", "/", BindAttrs{ReadOnly: true})
	bound := mkdir(t, r.dir, "bound")
	pod := r.userContainer(0, fmt.Sprintf("mount --make-rprivate / && mount --bind %s %s &&", inherited, bound))
	r.restart()
	swapped := r.elsewhere()
	for _, s := range swapped {
		if want := s.Mountpoint == readOnly; want != (fault.KindOf(s.Err) == fault.Unsupported) {
			t.Errorf("%+v", s)
		}
	}
	r.alive(pod, inherited)
	r.alive(pod, bound)
	r.onlyHealthy(pod, bound, 1) // mounted by the container's own root
	r.onlyTop(pod, inherited)    // on top of the one that it cannot detach
	if m := newTree(r.tableOf(pod)).topAt(readOnly); sameDevice(m, r.healthy) {
		t.Errorf("%+v", m)
	}
	for _, s := range r.elsewhere() {
		if s.Mountpoint != readOnly {
			t.Errorf("a second time: %+v", s)
		}
	}
}

func TestStartingAndExitingProcessesAreNoError(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	pod := r.container("s3csitest-pod", "umount "+r.source+" && ")
	stop := make(chan struct{})
	var all sync.WaitGroup
	t.Cleanup(func() { close(stop); all.Wait() })
	for range 3 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_ = r.n.Do(context.Background(), "starting", func() error { return exec.Command("unshare", "--mount", "true").Run() })
				}
			}
		})
	}
	for range 10 {
		r.restart()
		swapped, err := r.n.SwapInOtherNamespaces(within(t, 20*time.Second), r.swap(), Owners{ByCgroup: func(string) string { return "all" }})
		if err != nil {
			t.Error(err)
		}
		for _, s := range swapped {
			if s.Err != nil {
				t.Errorf("%+v", s)
			}
		}
		r.alive(pod, target)
		if _, err := r.n.DetachStale(within(t, 20*time.Second), r.swap().Stale, Owners{}); err != nil {
			t.Error(err)
		}
	}
}

func TestManyNamespacesAreFast(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/sub", BindAttrs{})
	const many = 50
	var pods []int
	for range many {
		pods = append(pods, sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "mount --make-rprivate / && umount "+r.source+" && echo ready; read -r _").Process.Pid)
	}
	everybody := Owners{ByCgroup: func(string) string { return "all" }}
	r.restart()
	start := time.Now()
	r.all(r.here(r.swap()), 1)
	t.Logf("SwapHere of one mount: %s", time.Since(start))
	start = time.Now()
	swapped, err := r.n.SwapInOtherNamespaces(within(t, 20*time.Second), r.swap(), everybody)
	took := time.Since(start)
	if err != nil {
		t.Fatal(err)
	}
	r.all(swapped, many)
	t.Logf("SwapInOtherNamespaces in %d namespaces: %s", many, took)
	for _, pid := range pods {
		r.onlyHealthy(pid, target, 1)
	}
	start = time.Now()
	_, err = r.n.SwapInOtherNamespaces(within(t, 20*time.Second), r.swap(), everybody)
	t.Logf("with nothing to do: %s, %v", time.Since(start), err)
	if took > 10*time.Second {
		t.Errorf("SwapInOtherNamespaces took %s", took)
	}
}
