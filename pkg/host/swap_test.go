//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestReplacementShowsTheSameDirectory(t *testing.T) {
	propagation := func(flags ...uintptr) func(r *swapRig) {
		return func(r *swapRig) {
			r.run(func() error { return unix.Mount("tmpfs", r.targets, "tmpfs", 0, "") })
			for _, flag := range flags {
				r.run(func() error { return unix.Mount("", r.targets, "", flag, "") })
			}
		}
	}
	remount := func(flags uintptr) func(*swapRig, string) {
		return func(r *swapRig, target string) {
			r.run(func() error { return unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "") })
		}
	}
	retype := func(flags ...uintptr) func(*swapRig, string) {
		return func(r *swapRig, target string) {
			for _, flag := range flags {
				r.run(func() error { return unix.Mount("", target, "", flag, "") })
			}
		}
	}
	for _, tc := range []struct {
		name   string
		parent func(*swapRig)
		root   string
		attrs  BindAttrs
		change func(*swapRig, string)
	}{
		{"a directory below a private mount", propagation(unix.MS_PRIVATE), "/", BindAttrs{}, nil},
		{"below a shared mount", propagation(unix.MS_SHARED), "/", BindAttrs{}, nil},
		{"below a slave", func(r *swapRig) {
			propagation(unix.MS_SHARED)(r)
			r.run(func() error { return unix.Mount(r.targets, r.targets, "", unix.MS_BIND, "") },
				func() error { return unix.Mount("", r.targets, "", unix.MS_SLAVE, "") })
		}, "/", BindAttrs{}, nil},
		{"below a shared slave", func(r *swapRig) {
			propagation(unix.MS_SHARED)(r)
			r.run(func() error { return unix.Mount(r.targets, r.targets, "", unix.MS_BIND, "") },
				func() error { return unix.Mount("", r.targets, "", unix.MS_SLAVE, "") },
				func() error { return unix.Mount("", r.targets, "", unix.MS_SHARED, "") })
		}, "/", BindAttrs{}, nil},
		{"a subdirectory", propagation(unix.MS_SHARED), "/sub/deep", BindAttrs{}, nil},
		{"a file", propagation(unix.MS_SHARED), "/file", BindAttrs{}, nil},
		{"read-only", nil, "/", BindAttrs{ReadOnly: true}, nil},
		{"noexec", nil, "/sub", BindAttrs{NoExec: true}, nil},
		{"relatime with suid and devices", nil, "/", BindAttrs{}, remount(unix.MS_RELATIME)},
		{"strictatime", nil, "/", BindAttrs{}, remount(unix.MS_STRICTATIME | unix.MS_NOSUID)},
		{"noatime and nodiratime", nil, "/", BindAttrs{}, remount(unix.MS_NOATIME | unix.MS_NODIRATIME | unix.MS_NODEV)},
		{"nosymfollow", nil, "/", BindAttrs{}, remount(unix.MS_NOSYMFOLLOW | unix.MS_RDONLY)},
		{"a shared one", nil, "/", BindAttrs{}, retype(unix.MS_SHARED)},
		{"a shared one below a shared mount", propagation(unix.MS_SHARED), "/", BindAttrs{}, retype(unix.MS_SHARED)},
		{"an unbindable one", propagation(unix.MS_SHARED), "/", BindAttrs{}, retype(unix.MS_UNBINDABLE)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newSwapRig(t)
			if tc.parent != nil {
				tc.parent(r)
			}
			target := r.bind("target", tc.root, tc.attrs)
			if tc.change != nil {
				tc.change(r, target)
			}
			before := mountAt(t, r.n, target)
			r.restart()
			r.all(r.here(r.swap()), 1)
			after := mountAt(t, r.n, target)
			r.alive(0, target)
			if after.Root != before.Root || after.Options != asPublished(before.Options) || after.Parent != before.Parent {
				t.Errorf("was %+v\nis  %+v", before, after)
			}
			types := func(m Mount) string {
				return fmt.Sprint(m.Shared(), m.Slave(), slices.Contains(m.Optional, "unbindable"))
			}
			if types(after) != types(before) {
				t.Errorf("propagation was %q, is %q", before.Optional, after.Optional)
			}
			if group := after.peerGroup(); group != "" && group == mountAt(t, r.n, r.source).peerGroup() {
				t.Errorf("it is in the source's group: %q", after.Optional)
			}
			r.all(r.here(r.swap()), 0) // a second time
			if again := mountAt(t, r.n, target); again.ID != after.ID {
				t.Error("it was replaced again")
			}
		})
	}
}

// asPublished adds the flags to the options of a mount that every publication has.
func asPublished(options string) string {
	fields := strings.Split(options, ",")
	rest := slices.DeleteFunc(fields[1:], func(o string) bool { return o == "nosuid" || o == "nodev" })
	return strings.Join(append([]string{fields[0], "nosuid", "nodev"}, rest...), ",")
}

func TestReplacementCanBeReadOnly(t *testing.T) {
	r := newSwapRig(t)
	target, other := r.bind("target", "/", BindAttrs{}), r.bind("other", "/sub", BindAttrs{})
	r.restart()
	s := r.swap()
	s.ReadOnly = func(m Mount, cgroup string) bool { return m.Mountpoint == target && cgroup == "" }
	r.all(r.here(s), 2)
	if m := mountAt(t, r.n, target); !m.ReadOnly() {
		t.Errorf("%+v", m)
	}
	if m := mountAt(t, r.n, other); m.ReadOnly() {
		t.Errorf("%+v", m)
	}
}

func TestUnknownMountsAreReportedAndNotReplaced(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	fake := mkdir(t, r.targets, "fake")
	mountFake(t, r.n, fake, r.name).exit()
	before := mountAt(t, r.n, fake)
	known := mountAt(t, r.n, target)
	r.restart()
	s := r.swap()
	name := r.name
	s.Stale = func(m Mount) bool { return sameDevice(m, known) }
	s.Unknown = func(m Mount) bool { return m.Source == name && !sameDevice(m, known) }
	for _, s := range r.here(s) {
		if (s.Mountpoint == fake) != (fault.KindOf(s.Err) == fault.Unsupported) {
			t.Errorf("%+v", s)
		}
	}
	r.alive(0, target)
	if after := mountAt(t, r.n, fake); after.ID != before.ID {
		t.Errorf("%+v was replaced by %+v", before, after)
	}
}

func TestASlaveStaysASlave(t *testing.T) {
	r := newSwapRig(t)
	target, master := mkdir(t, r.targets, "target"), mkdir(t, r.dir, "master")
	r.run(func() error { return unix.Mount(r.source, master, "", unix.MS_BIND, "") }, // in the source's group
		func() error { return unix.Mount(r.source, target, "", unix.MS_BIND, "") },
		func() error { return unix.Mount("", target, "", unix.MS_SLAVE, "") })
	if m := mountAt(t, r.n, target); !m.Slave() {
		t.Fatalf("%+v of %+v", m, mountAt(t, r.n, r.source))
	}
	r.restart()
	r.all(r.here(r.swap()), 1)
	if m := mountAt(t, r.n, target); !m.Slave() || m.Shared() {
		t.Errorf("%+v", m)
	}
}

func TestOnlyStaleMountsAreReplaced(t *testing.T) {
	r := newSwapRig(t)
	stale, elsewhere := r.bind("stale", "/", BindAttrs{}), mkdir(t, r.dir, "elsewhere")
	r.run(func() error { return unix.Mount(r.source, elsewhere, "", unix.MS_BIND, "") })
	mountFake(t, r.n, mkdir(t, r.targets, "other"), "s3csi:other")
	r.restart()
	healthy := r.bind("healthy", "/", BindAttrs{})
	before := map[string]int{}
	for _, place := range []string{healthy, elsewhere, r.targets + "/other", r.source} {
		before[place] = mountAt(t, r.n, place).ID
	}
	s := r.swap()
	name := r.name
	s.Stale = func(m Mount) bool { return m.Source == name } // also true for healthy ones
	r.all(r.here(s), 1)
	r.alive(0, stale)
	for place, id := range before {
		if got := mountAt(t, r.n, place).ID; got != id {
			t.Errorf("%s is another mount", place)
		}
	}
	other := s
	other.Source.ID = before[healthy]
	if _, err := r.n.SwapHere(within(t, 10*time.Second), other, func(Mount) bool { return true }); fault.KindOf(err) != fault.Busy {
		t.Errorf("with another mount of the healthy client: %v", err)
	}
	s.Source.Minor++
	if _, err := r.n.SwapHere(within(t, 10*time.Second), s, func(Mount) bool { return true }); fault.KindOf(err) != fault.Busy {
		t.Errorf("with another healthy mount: %v", err)
	}
}

// TestTargetIsNeverUncoveredDuringAReplacement has a process that keeps trying to open a file in the directory that a
// target is mounted on.
func TestTargetIsNeverUncoveredDuringAReplacement(t *testing.T) {
	for _, onTop := range []bool{false, true} {
		t.Run(fmt.Sprintf("on top %v", onTop), func(t *testing.T) {
			r := newSwapRig(t)
			under := mkdir(t, r.targets, "target")
			if err := os.WriteFile(under+"/under", nil, 0o644); err != nil {
				t.Fatal(err)
			}
			target := r.bind("target", "/", BindAttrs{})
			stop, seen := make(chan struct{}), make(chan int)
			go func() {
				count := 0
				_ = r.n.Do(context.Background(), "watching", func() error {
					for {
						select {
						case <-stop:
							return nil
						default:
						}
						if fd, err := unix.Open(target+"/under", openPlace, 0); err == nil {
							unix.Close(fd)
							count++
						}
					}
				})
				seen <- count
			}()
			for range 20 {
				r.restart()
				s := r.swap()
				s.onTop = onTop
				r.all(r.here(s), 1)
			}
			close(stop)
			if count := <-seen; count != 0 {
				t.Errorf("seen %d times", count)
			}
		})
	}
}

func TestCopiesInPeersAndSlavesAreReplaced(t *testing.T) {
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shared), func(t *testing.T) { testPeersAndSlaves(t, shared) })
	}
}

func testPeersAndSlaves(t *testing.T, shared bool) {
	t.Helper()
	r := newSwapRig(t)
	r.run(func() error { return unix.Mount("tmpfs", r.targets, "tmpfs", 0, "") },
		func() error { return unix.Mount("", r.targets, "", unix.MS_SHARED, "") })
	again := mkdir(t, r.dir, "again") // the same mount again in this namespace
	r.run(func() error { return unix.Mount(r.targets, again, "", unix.MS_BIND, "") })
	peer := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "echo ready; read -r _").Process.Pid
	slave := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "mount --make-rslave / && echo ready; read -r _").Process.Pid
	late := r.bind("target", "/sub", BindAttrs{ReadOnly: true, Shared: shared})
	private := sleeper(t, r.n, "/", unix.CLONE_NEWNS).Process.Pid
	twice := again + "/target"
	for range 3 { // nothing piles up
		r.restart()
		targets := r.dir
		swapped, err := r.n.SwapHere(within(t, 10*time.Second), r.swap(), func(m Mount) bool { return isBelow(m.Mountpoint, targets) })
		if err != nil {
			t.Fatal(err)
		}
		r.all(swapped, 2)
		for _, pid := range []int{0, peer, slave} {
			for _, place := range []string{late, twice} {
				r.onlyHealthy(pid, place, 1)
				r.alive(pid, place+"/deep")
			}
		}
		if m := mountAt(t, r.n, late); m.Shared() != shared || len(m.Optional) > 1 {
			t.Errorf("its propagation has changed: %+v", m)
		}
	}
	if got := mountsOf(t, private, r.name); slices.ContainsFunc(got, func(m Mount) bool { return sameDevice(m, r.healthy) && isBelow(m.Mountpoint, r.targets) }) {
		t.Errorf("a private copy was replaced: %+v", got)
	}
	r.run(func() error { return Unmount(late) })
	for _, pid := range []int{0, peer, slave} {
		r.onlyHealthy(pid, late, 0)
	}
}

func TestStackOfStaleMountsIsReplacedByOneMount(t *testing.T) {
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shared), func(t *testing.T) {
			r := newSwapRig(t)
			if shared {
				sharedTmpfs(t, r.n, r.targets)
			}
			target := r.bind("target", "/sub", BindAttrs{})
			r.bind("target", "/sub", BindAttrs{})
			r.client.exit()
			r.restart()
			r.bind("target", "/sub", BindAttrs{}) // and one of another life
			r.restart()
			if at := mountsAt(t, r.n, target); len(at) != 3 {
				t.Fatalf("%+v", at)
			}
			r.all(r.here(r.swap()), 1)
			mountAt(t, r.n, target)
			r.alive(0, target)
		})
	}
}

func TestTopOfAStackDecidesWhatIsShown(t *testing.T) {
	for _, attrs := range []BindAttrs{{ReadOnly: true}, {}} {
		r := newSwapRig(t)
		target := r.bind("target", "/", BindAttrs{})
		r.bind("target", "/sub", attrs)
		r.restart()
		r.all(r.here(r.swap()), 1)
		top := newTree(r.tableOf(0)).topAt(target)
		if !sameDevice(top, r.healthy) || top.Root != "/sub" || top.ReadOnly() != attrs.ReadOnly {
			t.Errorf("%+v", top)
		}
		r.onlyTop(0, target) // had the first been exposed, a run killed then would show the whole volume
		r.alive(0, target)
		r.all(r.here(r.swap()), 0)
	}
}

func TestNextRunCompletesAKilledOne(t *testing.T) {
	r := newSwapRig(t)
	sharedTmpfs(t, r.n, r.targets)
	peer := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "echo ready; read -r _").Process.Pid
	target := r.bind("target", "/sub", BindAttrs{})
	r.restart()
	// Attached beneath, but nothing after that.
	r.run(func() error {
		dir, err := os.Open(r.source + "/sub")
		if err != nil {
			return err
		}
		defer dir.Close()
		h := newOpenFiles()
		defer h.release()
		clone, err := cloneMount(h, dir, r.healthy, r.healthy)
		if err != nil {
			return err
		}
		stale, err := OpenDir(target)
		if err != nil {
			return err
		}
		defer stale.Close()
		return moveMount(int(clone.Fd()), stale, moveBeneath)
	})
	if at := mountsAt(t, r.n, target); len(at) != 2 {
		t.Fatalf("%+v", at)
	}
	r.all(r.here(r.swap()), 1)
	for _, pid := range []int{0, peer} {
		r.onlyHealthy(pid, target, 1)
		r.alive(pid, target)
	}
	if m := mountAt(t, r.n, target); len(m.Optional) != 0 {
		t.Errorf("%+v", m)
	}
}

func TestReplacementIsOnTopBeforeLinux65(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	for range 2 {
		r.restart()
		s := r.swap()
		s.onTop = true
		r.all(r.here(s), 1)
		r.alive(0, target)
		r.all(r.here(s), 0) // the stale one below is out of reach
		if at := mountsAt(t, r.n, target); len(at) != 2 {
			t.Errorf("they pile up: %+v", at)
		}
	}
	r.restart()
	r.all(r.here(r.swap()), 1) // the kernel is a newer one
	mountAt(t, r.n, target)
	r.alive(0, target)
}
