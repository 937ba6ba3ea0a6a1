//go:build linux

package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// bindDirs binds by path, through the calls under test.
func bindDirs(t *testing.T, n *Namespace, source, target string, attrs BindAttrs) error {
	t.Helper()
	return n.Do(within(t, 10*time.Second), "binding", func() error {
		from, err := OpenDir(source)
		if err != nil {
			return err
		}
		defer from.Close()
		to, err := MakeTarget("", target)
		if err != nil {
			return err
		}
		defer to.Close()
		return Bind(from, to, attrs)
	})
}

// sharedTmpfs mounts a tmpfs with shared propagation, as a host's root is under systemd.
func sharedTmpfs(t *testing.T, n *Namespace, dir string) {
	t.Helper()
	do(t, n, "mounting", func() error {
		return errors.Join(unix.Mount("tmpfs", dir, "tmpfs", 0, ""), unix.Mount("", dir, "", unix.MS_SHARED, ""))
	})
}

func TestBindHasItsOwnFlags(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	source := mkdir(t, dir, "source")
	mountFake(t, n, source, "s3csi:bind")
	for _, tc := range []struct {
		name  string
		attrs BindAttrs
		want  []string
	}{
		{"plain", BindAttrs{}, []string{"rw", "nosuid", "nodev"}},
		{"ro", BindAttrs{ReadOnly: true}, []string{"ro", "nosuid", "nodev"}},
		{"noexec", BindAttrs{ReadOnly: true, NoExec: true}, []string{"ro", "nosuid", "nodev", "noexec"}},
	} {
		target := dir + "/" + tc.name
		if err := bindDirs(t, n, source, target, tc.attrs); err != nil {
			t.Fatal(err)
		}
		m := mountAt(t, n, target)
		for _, option := range tc.want {
			if !hasOption(m.Options, option) {
				t.Errorf("%s: no %s in %s", tc.name, option, m.Options)
			}
		}
		if m.ReadOnly() != tc.attrs.ReadOnly || hasOption(m.Options, "noexec") != tc.attrs.NoExec || m.Source != "s3csi:bind" {
			t.Errorf("%s: %+v", tc.name, m)
		}
	}
	if m := mountAt(t, n, source); m.ReadOnly() {
		t.Error("the source became read-only")
	}
}

func TestBindIsPrivateBelowASharedMount(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	source, kubelet := mkdir(t, dir, "source"), mkdir(t, dir, "kubelet")
	sharedTmpfs(t, n, kubelet)
	sharedTmpfs(t, n, source)
	if err := bindDirs(t, n, source, kubelet+"/target", BindAttrs{}); err != nil {
		t.Fatal(err)
	}
	if m := mountAt(t, n, kubelet+"/target"); len(m.Optional) != 0 {
		t.Errorf("propagation %v", m.Optional)
	}
	if m := mountAt(t, n, source); !m.Shared() {
		t.Error("the source lost its propagation")
	}
}

func TestBindOfASubdirectoryExcludesMountsBelow(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	source := mkdir(t, dir, "source")
	sharedTmpfs(t, n, source)
	do(t, n, "mounting below", func() error {
		if err := os.MkdirAll(source+"/sub/below", 0o755); err != nil {
			return err
		}
		return unix.Mount("tmpfs", source+"/sub/below", "tmpfs", 0, "")
	})
	if err := bindDirs(t, n, source+"/sub", dir+"/target", BindAttrs{}); err != nil {
		t.Fatal(err)
	}
	if m := mountAt(t, n, dir+"/target"); m.Root != "/sub" {
		t.Errorf("%+v", m)
	}
	if got := mountsAt(t, n, dir+"/target/below"); len(got) != 0 {
		t.Errorf("%+v came along", got)
	}
}

func TestUsersAreFoundByTheirWorkingDirectory(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	source := mkdir(t, dir, "source")
	mountFake(t, n, source, "s3csi:cwd")
	user := sleeper(t, n, source, 0)
	users, err := n.Users(within(t, 10*time.Second), mountAt(t, n, source))
	if want := processName(user.Process.Pid); err != nil || !slices.Contains(users, want) {
		t.Errorf("users %q, %v, want %q", users, err, want)
	}
}

func TestUnmountBelowASharedMountpointRemovesCopies(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	for name, around := range map[string]func(string){
		"shared":  func(dir string) { sharedTmpfs(t, n, dir) },
		"private": func(string) {},
	} {
		dir := hostDir(t, n)
		state := mkdir(t, dir, "state")
		around(state)
		sources := state + "/sources"
		do(t, n, "mkdir", func() error { return os.MkdirAll(sources+"/a", 0o755) })
		for range 3 {
			do(t, n, "sharing it", func() error { return SharedMountpoint(sources) })
		}
		m := mountAt(t, n, sources)
		if len(m.Optional) != 1 || !m.Shared() {
			t.Errorf("%s: propagation %v", name, m.Optional)
		}
		mountFake(t, n, sources+"/a", "s3csi:shared")
		if got := mountsAt(t, n, sources+"/a"); len(got) != 1 {
			t.Errorf("%s: mounted %d times: %+v", name, len(got), got)
		}
		do(t, n, "doing it again with mounts below", func() error { return SharedMountpoint(sources) })
		if again := mountAt(t, n, sources); !slices.Equal(again.Optional, m.Optional) {
			t.Errorf("%s: propagation %v became %v", name, m.Optional, again.Optional)
		}

		// Publications are binds from there, not copies.
		if err := bindDirs(t, n, sources+"/a", dir+"/target", BindAttrs{}); err != nil {
			t.Fatal(err)
		}
		if m := mountAt(t, n, dir+"/target"); m.Source != "s3csi:shared" || len(m.Optional) != 0 {
			t.Errorf("%s: %+v", name, m)
		}
		// Another mount shows the state directory with the mounts in it.
		view := mkdir(t, dir, "view")
		do(t, n, "binding", func() error { return unix.Mount(state, view, "", unix.MS_BIND|unix.MS_REC, "") })
		mountAt(t, n, view+"/sources/a")
		do(t, n, "unmounting", func() error { return Unmount(sources + "/a") })
		if got := mountsAt(t, n, view+"/sources/a"); len(got) != 0 {
			t.Errorf("%s: a copy outlives the mount: %+v", name, got)
		}
		mountAt(t, n, dir+"/target")
	}
}

func TestSharedMountpointCompletesAnInterruptedCall(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	for name, propagation := range map[string]uintptr{"of the mount around it": 0, "private": unix.MS_PRIVATE, "unbindable": unix.MS_UNBINDABLE} {
		dir := mkdir(t, hostDir(t, n), "shared")
		sharedTmpfs(t, n, dir)
		sources := dir + "/sources"
		do(t, n, "mkdir", func() error { return os.MkdirAll(sources+"/a", 0o755) })
		do(t, n, "binding", func() error { return unix.Mount(sources, sources, "", unix.MS_BIND, "") })
		if propagation != 0 {
			do(t, n, "setting "+name, func() error { return unix.Mount("", sources, "", propagation, "") })
		}
		do(t, n, "sharing it", func() error { return SharedMountpoint(sources) })
		if m := mountAt(t, n, sources); len(m.Optional) != 1 || !m.Shared() || m.peerGroup() == mountAt(t, n, dir).peerGroup() {
			t.Errorf("%s: propagation %v", name, m.Optional)
		}
		mountFake(t, n, sources+"/a", "s3csi:begun")
		if got := mountsAt(t, n, sources+"/a"); len(got) != 1 {
			t.Errorf("%s: mounted %d times", name, len(got))
		}
	}
}

func TestSharedMountpointRefusesToHideMounts(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	below := mkdir(t, dir, "below")
	do(t, n, "mounting", func() error { return unix.Mount("tmpfs", below, "tmpfs", 0, "") })
	err := n.Do(t.Context(), "sharing it", func() error { return SharedMountpoint(dir) })
	if !fault.Is(err, fault.Precondition) || len(mountsAt(t, n, dir)) != 0 {
		t.Errorf("got %v", err)
	}
}

func TestUnmountIsNotLazyAndNamesItsUsers(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	source := mkdir(t, dir, "source")
	mountFake(t, n, source, "s3csi:busy")
	m := mountAt(t, n, source)
	var open *os.File
	do(t, n, "opening", func() (err error) {
		open, err = os.Open(source)
		return err
	})
	defer open.Close()
	hasErrno(t, n.Do(t.Context(), "unmounting", func() error { return Unmount(source) }), unix.EBUSY)
	users, err := n.Users(within(t, 10*time.Second), m)
	if self := processName(os.Getpid()); err != nil || !slices.Contains(users, self) {
		t.Errorf("users %q, %v, want %q", users, err, self)
	}
	open.Close()
	if users, err := n.Users(within(t, 10*time.Second), m); err != nil || len(users) != 0 {
		t.Errorf("users %q, %v", users, err)
	}
	do(t, n, "unmounting", func() error { return Unmount(source) })
}

func TestUnmountWhenIdleWaitsForTheLastUser(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	source := mkdir(t, hostDir(t, n), "source")
	mountFake(t, n, source, "s3csi:busy")
	m := mountAt(t, n, source)
	var open *os.File
	do(t, n, "opening", func() (err error) {
		open, err = os.Open(source)
		return err
	})
	attempts := 0
	err := n.UnmountWhenIdle(within(t, 10*time.Second), m, func() error {
		if attempts++; attempts == 3 {
			open.Close()
		}
		return Unmount(source)
	})
	if err != nil || attempts < 3 || len(mountsAt(t, n, source)) != 0 {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
	if err := n.UnmountWhenIdle(within(t, 10*time.Second), m, func() error { return Unmount(source) }); err != nil {
		t.Errorf("a path that is not a mount point: %v", err)
	}
}

func TestUnmountWhenIdleNamesTheUsersWhenTheContextEnds(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	source := mkdir(t, hostDir(t, n), "source")
	f := mountFake(t, n, source, "s3csi:busy")
	m := mountAt(t, n, source)
	user := sleeper(t, n, source, 0)
	f.hang()
	// A call of this process that the client does not answer uses the mount, too.
	_, err := n.Statfs(within(t, 50*time.Millisecond), source)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	start := time.Now()
	err = n.UnmountWhenIdle(within(t, 200*time.Millisecond), m, func() error { return Unmount(source) })
	if !fault.Is(err, fault.Busy) || time.Since(start) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	for _, want := range []string{source, processName(user.Process.Pid), "reading the usage of " + source} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %q", err, want)
		}
	}
	mountAt(t, n, source)
}

func TestUnmountWhenIdleReturnsOtherErrorsAtOnce(t *testing.T) {
	n := testNamespace(t)
	attempts := 0
	err := n.UnmountWhenIdle(within(t, 10*time.Second), Mount{Mountpoint: "/a"}, func() error { attempts++; return fs.ErrNotExist })
	if !errors.Is(err, fs.ErrNotExist) || fault.Is(err, fault.Busy) || attempts != 1 {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
}

// The context may end in the middle of an attempt, which is then the one without an answer.
func TestUnmountWhenIdleNamesTheUsersWhenAnAttemptIsCutOff(t *testing.T) {
	n := testNamespace(t)
	ctx, cancel := context.WithCancel(t.Context())
	attempts := 0
	err := n.UnmountWhenIdle(ctx, Mount{Mountpoint: "/a"}, func() error {
		if attempts++; attempts == 1 {
			return unix.EBUSY
		}
		cancel()
		return context.Cause(ctx)
	})
	if attempts != 2 || !fault.Is(err, fault.Busy) {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
}
