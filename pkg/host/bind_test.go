//go:build linux

package host

import (
	"errors"
	"os"
	"slices"
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
