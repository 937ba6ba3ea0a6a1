//go:build linux

package host

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// inUserNamespace runs a command as the root of a process's user namespace, in its mount namespace.
func (r *swapRig) inUserNamespace(pid int, command ...string) error {
	r.t.Helper()
	out, err := exec.Command("nsenter", append([]string{"--target=" + fmt.Sprint(pid), "--user", "--mount"}, command...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// TestChildKeepsItsLockInAUserNamespace has a container in a user namespace bind a mount of the host, with flags that the
// kernel has locked there, below a volume that becomes stale.
func TestChildKeepsItsLockInAUserNamespace(t *testing.T) {
	for _, tc := range []struct {
		name    string
		flags   uintptr // of the host's mount that the container has
		option  string  // that its container must not take off
		bind    string  // what the container does: %[1]s is the mount, %[2]s the place below the volume
		refused bool
	}{
		{"read-only", unix.MS_RDONLY, "rw", "mount --bind %[1]s %[2]s", true},
		{"noexec", unix.MS_NOEXEC, "exec", "mount --bind %[1]s %[2]s", true},
		{"nosuid", unix.MS_NOSUID, "suid", "mount --bind %[1]s %[2]s", true},
		{"nodev", unix.MS_NODEV, "dev", "mount --bind %[1]s %[2]s", true},
		{"noatime", unix.MS_NOATIME, "strictatime", "mount --bind %[1]s %[2]s", true},
		{"two levels deep", unix.MS_RDONLY, "rw",
			"mount -t tmpfs tmpfs /mnt && mkdir /mnt/inner && mount --bind %[3]s %[2]s && mount --bind %[1]s %[2]s/inner", true},
		{"two levels deep and unlocked", 0, "", "mount --bind %[3]s %[2]s && mount --bind %[1]s %[2]s/inner", true},
		{"as the host has it", 0, "", "mount --bind %[1]s %[2]s", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newSwapRig(t)
			target := r.bind("target", "/", BindAttrs{})
			volume, given, outer := mkdir(t, r.dir, "volume"), mkdir(t, r.dir, "given"), mkdir(t, r.dir, "outer")
			r.run(func() error { return unix.Mount("tmpfs", volume, "tmpfs", 0, "mode=777") },
				func() error { return unix.Mount(volume, given, "", unix.MS_BIND, "") },
				func() error { return unix.Mount("", given, "", unix.MS_REMOUNT|unix.MS_BIND|tc.flags, "") },
				func() error { return unix.Mount("tmpfs", outer, "tmpfs", 0, "mode=777") },
				func() error { return os.Mkdir(outer+"/inner", 0o755) })
			place := target + "/sub"
			pod := r.userContainer(0, fmt.Sprintf("mount --make-rprivate / && "+tc.bind+" && ", given, place, outer))
			if tc.name[0] == 't' {
				place += "/inner"
			}
			if tc.option != "" && r.inUserNamespace(pod, "mount", "-o", "remount,bind,"+tc.option, given) == nil {
				t.Fatal("the kernel has locked nothing")
			}
			before := r.tableOf(pod)
			r.restart()
			for _, s := range r.elsewhere() {
				if s.Mountpoint == target && (fault.KindOf(s.Err) == fault.Unsupported) != tc.refused {
					t.Errorf("%+v", s)
				}
			}
			if !tc.refused {
				r.alive(pod, target)
				return
			}
			if after := newTree(r.tableOf(pod)).topAt(target); after.ID != newTree(before).topAt(target).ID {
				t.Errorf("%+v was attached", after)
			}
			if tc.option != "" && r.inUserNamespace(pod, "mount", "-o", "remount,bind,"+tc.option, place) == nil {
				t.Errorf("the container has taken its restriction off %+v", newTree(r.tableOf(pod)).topAt(place))
			}
		})
	}
}

// TestLockedChildKeepsCoveringItsMountPoint has a mount below the volume already when the user namespace is made.
func TestLockedChildKeepsCoveringItsMountPoint(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	r.volumeBelow(target + "/sub")
	r.run(func() error { return unix.Mount("", target+"/sub", "", unix.MS_REMOUNT|unix.MS_BIND, "") })
	pod := r.userContainer(0, "mount --make-rprivate / && ")
	if err := r.inUserNamespace(pod, "umount", target+"/sub"); err == nil {
		t.Fatal("the kernel has not locked the child")
	}
	r.restart()
	for _, s := range r.elsewhere() {
		if s.Mountpoint == target && fault.KindOf(s.Err) != fault.Unsupported {
			t.Errorf("%+v", s)
		}
	}
	if top := newTree(r.tableOf(pod)).topAt(target); sameDevice(top, r.healthy) {
		t.Errorf("%+v was attached", top)
	}
}

// TestStricterMountStaysStaleInAUserNamespace has mounts with restrictions that the publication does not have.
func TestStricterMountStaysStaleInAUserNamespace(t *testing.T) {
	r := newSwapRig(t)
	strict, usual := r.bind("strict", "/", BindAttrs{NoExec: true}), r.bind("usual", "/", BindAttrs{})
	pod := r.userContainer(0, "mount --make-rprivate / && ")
	r.restart()
	for _, s := range r.elsewhere() {
		if want := s.Mountpoint == strict; want != (fault.KindOf(s.Err) == fault.Unsupported) {
			t.Errorf("%+v", s)
		}
	}
	r.alive(pod, usual)
	if _, err := os.Stat(proc.Path(pod, "root", strict)); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("the strict mount answers %v", err)
	}
}
