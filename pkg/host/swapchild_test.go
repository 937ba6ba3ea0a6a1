//go:build linux

package host

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// volumeBelow mounts a directory of a tmpfs, which the host has mounted elsewhere as it has every volume of a pod, on
// a place, with a file in it.
func (r *swapRig) volumeBelow(place string) {
	r.t.Helper()
	volume := mkdir(r.t, r.dir, "volume")
	r.run(func() error { return unix.Mount("tmpfs", volume, "tmpfs", 0, "") },
		func() error { return os.MkdirAll(volume+"/of a pod/inner", 0o755) },
		func() error { return os.WriteFile(volume+"/of a pod/kept", nil, 0o644) },
		func() error { return unix.Mount(volume+"/of a pod", place, "", unix.MS_BIND, "") },
		func() error {
			return unix.Mount("", place, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOEXEC|unix.MS_NOATIME, "")
		})
}

// seenAt returns the mount that a path leads to.
func (r *swapRig) seenAt(place string) Mount {
	r.t.Helper()
	var seen Mount
	r.run(func() error {
		fd, err := unix.Open(place, openPlace, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), place)
		defer f.Close()
		seen, _, err = findMount(r.t.Context(), f)
		return err
	})
	return seen
}

func TestChildrenMoveToTheReplacement(t *testing.T) {
	for _, shared := range []bool{false, true} {
		for _, onTop := range []bool{false, true} {
			r := newSwapRig(t)
			if shared {
				sharedTmpfs(t, r.n, r.targets)
			}
			target := r.bind("target", "/", BindAttrs{})
			place := target + "/sub"
			r.volumeBelow(place)
			r.run(func() error { return unix.Mount("tmpfs", r.dir+"/volume/of a pod/inner", "tmpfs", unix.MS_RDONLY, "") },
				func() error { return unix.Mount(r.dir+"/volume/of a pod/inner", place+"/inner", "", unix.MS_BIND, "") })
			before, inner := mountAt(t, r.n, place), mountAt(t, r.n, place+"/inner")
			r.restart()
			s := r.swap()
			s.onTop = onTop
			r.all(r.here(s), 1)
			r.alive(0, target)
			after, innerAfter := r.seenAt(place), r.seenAt(place+"/inner")
			if after.Root != before.Root || after.Options != before.Options || after.Source != before.Source {
				t.Errorf("was %+v\nis  %+v", before, after)
			}
			if !sameDevice(inner, innerAfter) || innerAfter.Options != inner.Options {
				t.Errorf("was %+v\nis  %+v", inner, innerAfter)
			}
			if top := newTree(r.tableOf(0)).byID[after.Parent]; !sameDevice(top, r.healthy) {
				t.Errorf("it is mounted on %+v", top)
			}
			if got := len(mountsAt(t, r.n, place)); !onTop && got != 1 {
				t.Errorf("%d mounts on %s, want one", got, place)
			}
			r.run(func() error { _, err := os.Stat(place + "/kept"); return err })
			r.all(r.here(r.swap()), 0)
		}
	}
}

func TestCachedChildIsMovedItself(t *testing.T) {
	r := newSwapRig(t)
	r.client.exit()
	do(t, r.n, "unmounting", func() error { return Unmount(r.source) })
	r.start(3600, 3600)
	target := r.bind("target", "/", BindAttrs{})
	place := target + "/sub"
	r.run(func() error { return unix.Mount("tmpfs", place, "tmpfs", 0, "") }, // the container's own
		func() error { return os.WriteFile(place+"/kept", nil, 0o644) })
	before := mountAt(t, r.n, place)
	r.restart()
	r.all(r.here(r.swap()), 1)
	r.alive(0, target)
	r.run(func() error { _, err := os.Stat(place + "/kept"); return err })
	if after := mountAt(t, r.n, place); after.ID != before.ID {
		t.Errorf("was %+v\nis  %+v", before, after)
	}
}

func TestMountStaysStaleIfAChildWouldBeLost(t *testing.T) {
	r := newSwapRig(t)
	r.client.exit()
	do(t, r.n, "unmounting", func() error { return Unmount(r.source) })
	// A look-up would fail, and the kernel would take that for a removed directory and detach the mounts on it.
	r.start(3600, 0)
	target, other := r.bind("target", "/", BindAttrs{}), r.bind("other", "/", BindAttrs{})
	r.run(func() error { return unix.Mount("tmpfs", target+"/sub", "tmpfs", 0, "") })
	r.restart()
	before := mountAt(t, r.n, target)
	for range 2 {
		for _, s := range r.here(r.swap()) {
			if (s.Mountpoint == target) != (fault.KindOf(s.Err) == fault.Precondition) {
				t.Errorf("%+v", s)
			}
			if s.Err != nil && !strings.Contains(s.Err.Error(), target+"/sub") {
				t.Errorf("it does not say what is in the way: %v", s.Err)
			}
		}
		if after := mountAt(t, r.n, target); after.ID != before.ID {
			t.Errorf("was %+v\nis  %+v", before, after)
		}
		mountAt(t, r.n, target+"/sub")
	}
	r.alive(0, other)
}

func TestMissingMountPointOfAChildIsMade(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	r.run(func() error { return os.MkdirAll(target+"/made/by runtime", 0o755) })
	r.volumeBelow(target + "/made/by runtime")
	r.restart() // and it has no such directory
	r.all(r.here(r.swap()), 1)
	r.run(func() error { _, err := os.Stat(target + "/made/by runtime/kept"); return err })
}

func TestStaleChildIsReplacedWithItsParent(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	r.bind("target/sub", "/sub", BindAttrs{ReadOnly: true})
	r.restart()
	r.all(r.here(r.swap()), 2)
	r.alive(0, target)
	r.alive(0, target+"/sub/deep")
	if m := mountAt(t, r.n, target+"/sub"); !m.ReadOnly() || m.Root != "/sub" {
		t.Errorf("%+v", m)
	}
	r.all(r.here(r.swap()), 0)
}
