package launcher_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// fixed is a Resolver that has nothing to do.
type fixed []resolvconf.Bind

func (f fixed) Binds(context.Context) ([]resolvconf.Bind, error) { return f, nil }

// failing is a Resolver that cannot.
type failing struct{ error }

func (f failing) Binds(context.Context) ([]resolvconf.Bind, error) { return nil, f.error }

// TestHelperWithAResolverHoldsNoMountsOfTheHost makes hosts of its own whose mounts propagate, and whose mounts do not.
func TestHelperWithAResolverHoldsNoMountsOfTheHost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	switch level := os.Getenv(containerLevel); level {
	case "":
		for _, level := range []string{"shared", "private"} {
			out, err := respawn(level, t.Name(), syscall.CLONE_NEWNS)
			if err != nil {
				t.Errorf("on a host whose mounts are %s: %v\n%s", level, err, out)
			}
			if strings.Contains(out, "--- SKIP") {
				t.Skip(out)
			}
		}
	default:
		for _, propagation := range []uintptr{unix.MS_PRIVATE, map[string]uintptr{"shared": unix.MS_SHARED, "private": unix.MS_PRIVATE}[level]} {
			if err := unix.Mount("", "/", "", unix.MS_REC|propagation, ""); err != nil {
				t.Fatal(err)
			}
		}
		holdsNothing(t, level == "shared")
	}
}

// holdsNothing tests that a helper keeps no file system that the host unmounts. On a host with shared mounts it has copies until then, in the
// mount namespace of all helpers.
func holdsNothing(t *testing.T, shared bool) {
	u := prepare(t, firstUID+21)
	write := func(path, content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	mount := func(fstype, path, options string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(path, 0o755), unix.Mount("volume", path, fstype, 0, options)); err != nil {
			t.Fatal(err)
		}
	}
	// What is needed is on mounts of its own, as on a host, and what is not: a disk, a client's file system that answers nothing,
	// on top of another, below the disk, and hidden below another mount.
	mount("tmpfs", u.dir, "mode=755")
	t.Cleanup(func() { _ = unix.Unmount(u.dir, unix.MNT_DETACH) })
	helpertest.Program(t, u.dir)
	mount("tmpfs", u.state(), "mode=700")
	if err := os.Chown(u.state(), int(u.uid), int(u.uid)); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(u.dir, "disk")
	mount("tmpfs", disk, "")
	if err := os.Mkdir(u.dir+"/hidden", 0o755); err != nil {
		t.Fatal(err)
	}
	volumes := map[string]*volume{}
	for _, path := range []string{disk + "/nested", u.dir + "/stacked", u.dir + "/stacked/", u.dir + "/hidden/below"} {
		volumes[path] = mountVolume(t, path)
	}
	mount("tmpfs", u.dir+"/hidden", "")
	aside := u.dir + "/aside" // its mounts do not propagate on any host
	mount("tmpfs", aside, "")
	if err := unix.Mount("", aside, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	volumes[aside+"/volume"] = mountVolume(t, aside+"/volume")

	own, target := filepath.Join(u.dir, "resolv.conf"), "/etc/resolv.conf"
	before := string(readAll(t, target))
	write(own, "nameserver 10.96.0.10\n")
	if resolved, err := filepath.EvalSymlinks(target); err == nil {
		target = resolved
	}
	p := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{
		UIDs: launcher.UIDRange{First: u.uid, Last: u.uid + 10}, Resolver: fixed{{Source: own, Target: own}, {Source: own, Target: target}},
	})
	startBy(t, p, u)
	s := u.run("credentials", "wait:"+u.state()+"/go")
	if line := u.says("credentials "); !strings.HasPrefix(line, "credentials 200 ") {
		t.Errorf("the client and its helper: %s", line)
	}
	for who, pid := range map[string]int{"helper": s.PID, "client": s.ClientPID} {
		if got := field(t, pid, "CapBnd") + field(t, pid, "CapEff") + field(t, pid, "NoNewPrivs"); got != "000000000000000000000000000000001" {
			t.Errorf("%s: privileges %s", who, got)
		}
		view := fmt.Sprintf("/proc/%d/root", pid)
		if got := string(readAll(t, view+"/etc/resolv.conf")); got != "nameserver 10.96.0.10\n" {
			t.Errorf("%s sees %q", who, got)
		}
		for _, path := range []string{"/proc/self/status", "/dev/null", "/sys/kernel", u.state()} {
			if _, err := os.Stat(view + path); err != nil {
				t.Errorf("%s: %v", who, err)
			}
		}
	}
	if got := string(readAll(t, "/etc/resolv.conf")); got != before {
		t.Errorf("the host sees %q", got)
	}
	write(own, "nameserver 10.96.0.11\n")
	if got := string(readAll(t, fmt.Sprintf("/proc/%d/root/etc/resolv.conf", s.ClientPID))); got != "nameserver 10.96.0.11\n" {
		t.Errorf("after a change the client sees %q", got)
	}
	late := u.dir + "/late"
	volumes[late] = mountVolume(t, late)
	for line := range strings.SplitSeq(string(readAll(t, fmt.Sprintf("/proc/%d/mountinfo", s.PID))), "\n") {
		if strings.Contains(line, "shared:") || !shared && (strings.Contains(line, "master:") ||
			strings.Contains(line, " - fuse ") || strings.Contains(line, disk) || strings.Contains(line, late)) {
			t.Errorf("the helper holds %s", line)
		}
	}
	// The directory of another helper is mounted after the namespace was made.
	other := &unit{t: t, uid: u.uid + 1, dir: u.dir + "/other", peer: helper.NewPeer(helper.Dial(u.dir + "/other/sock")), p: p}
	mount("tmpfs", other.dir, "mode=755")
	mount("tmpfs", other.state(), fmt.Sprintf("mode=700,uid=%d,gid=%d", other.uid, other.uid))
	startBy(t, p, other)
	if one := sameNamespace(t, s.PID, other.hello().PID); one != shared {
		t.Errorf("both helpers are in one mount namespace: %v, want %v", one, shared)
	}
	if _, err := other.peer.Quit(bounded(t)); err != nil {
		t.Error(err)
	}
	other.mustGo()
	for _, path := range []string{other.state(), other.dir} {
		if err := unix.Unmount(path, 0); err != nil {
			t.Errorf("unmounting %s: %v", path, err)
		}
	}

	for _, path := range []string{
		u.dir + "/hidden", u.dir + "/hidden/below", u.dir + "/stacked", u.dir + "/stacked", disk + "/nested", disk, late, aside + "/volume", aside,
	} {
		if err := unix.Unmount(path, 0); err != nil {
			t.Errorf("unmounting %s: %v", path, err)
		}
	}
	for path, v := range volumes {
		if !v.over() {
			t.Errorf("%s is unmounted, and its client does not end", path)
		}
	}
	write(u.state()+"/go", "")
	u.until("the client's end", exited)
	if _, err := u.peer.Quit(bounded(t)); err != nil {
		t.Error(err)
	}
	u.mustGo()
}

// startBy starts the helper of a unit.
func startBy(t *testing.T, p *launcher.Process, u *unit) {
	t.Helper()
	socket, err := helper.Listen(filepath.Join(u.dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if err := p.Start(bounded(t), launcher.Unit{Name: "test-1", UID: u.uid, GID: u.uid, StateDir: u.state(), Socket: socket}); err != nil {
		t.Fatal(err)
	}
}

// sameNamespace reports whether two processes are in one mount namespace.
func sameNamespace(t *testing.T, pids ...int) bool {
	t.Helper()
	var seen [2]string
	for i, pid := range pids {
		var err error
		if seen[i], err = os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err != nil {
			t.Fatal(err)
		}
	}
	return seen[0] == seen[1]
}

func readAll(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// volume is a FUSE file system whose client answers nothing.
type volume struct{ dev int }

func mountVolume(t *testing.T, path string) *volume {
	t.Helper()
	if err := unix.Mkdir(path, 0o755); err != nil && !errors.Is(err, unix.EEXIST) { // it asks nothing of what is mounted there
		t.Fatal(err)
	}
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("needs /dev/fuse: %v", err)
	}
	t.Cleanup(func() { _ = unix.Close(dev) })
	if err := unix.Mount("volume", path, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)); err != nil {
		t.Fatal(err)
	}
	return &volume{dev}
}

// over reports whether the client learns that its file system is gone, which makes clients exit.
func (v *volume) over() bool {
	buf := make([]byte, 1<<18)
	for range 10 {
		if _, err := unix.Read(v.dev, buf); errors.Is(err, unix.ENODEV) {
			return true
		} else if err != nil {
			return false
		}
	}
	return false
}

func TestHelperIsNotStartedWhenTheResolverFails(t *testing.T) {
	u := prepare(t, firstUID+22)
	broken := errors.New("no resolv.conf")
	for _, r := range []launcher.Resolver{failing{broken}, fixed{{Source: "/nowhere", Target: "/nowhere"}}} {
		p := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{UIDs: launcher.UIDRange{First: u.uid, Last: u.uid}, Resolver: r})
		socket, err := helper.Listen(filepath.Join(u.dir, "sock"))
		if err != nil {
			t.Fatal(err)
		}
		err = p.Start(bounded(t), launcher.Unit{Name: "test-1", UID: u.uid, GID: u.uid, StateDir: u.state(), Socket: socket})
		socket.Close()
		_ = os.Remove(filepath.Join(u.dir, "sock"))
		if err == nil || !errors.Is(err, broken) && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%T: %v", r, err)
		}
		if u.alive() {
			t.Errorf("%T: there is a process", r)
		}
	}
}
