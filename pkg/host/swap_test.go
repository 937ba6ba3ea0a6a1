//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// swapRig is a mount whose client can be restarted, with a directory for its targets. Sources share what is mounted
// there, as the driver's do.
type swapRig struct {
	t       *testing.T
	n       *Namespace
	dir     string
	source  string // the mount point of the source
	targets string
	name    string // the source string
	client  *fakeFuse
	living  Mount
}

func newSwapRig(t *testing.T) *swapRig {
	t.Helper()
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	r := &swapRig{t: t, n: n, dir: dir, name: "s3csi:swap:" + path.Base(t.Name()), targets: mkdir(t, dir, "targets")}
	sources := mkdir(t, dir, "sources")
	do(t, n, "sharing", func() error { return SharedMountpoint(sources) })
	r.source = mkdir(t, sources, "m")
	r.start(0)
	return r
}

// start mounts a client on the source.
func (r *swapRig) start(cached uint64) {
	r.t.Helper()
	r.client = startFake(r.t, r.n, r.source, &fakeFuse{source: r.name, nodes: fakeNodes(), cached: cached})
	r.living = mountAt(r.t, r.n, r.source)
}

// restart kills the client and puts a new one in its place, on the source alone.
func (r *swapRig) restart() {
	r.t.Helper()
	r.client.die()
	do(r.t, r.n, "unmounting the dead source", func() (err error) {
		for range 1000 { // a process that was just forked has all descriptors until it execs
			if err = Unmount(r.source); !errors.Is(err, unix.EBUSY) {
				break
			}
			time.Sleep(time.Millisecond)
		}
		return err
	})
	r.start(0)
}

// swap is the replacement of everything that is of the rig's mount and not of its living client.
func (r *swapRig) swap() Swap {
	living, name := r.living, r.name
	return Swap{Living: living, Bound: 5 * time.Second, Dead: func(m Mount) bool { return m.Source == name && !sameDevice(m, living) }}
}

// here runs SwapHere for the targets and fails the test with an error of the whole.
func (r *swapRig) here(s Swap) []Swapped {
	r.t.Helper()
	targets := r.targets
	swapped, err := r.n.SwapHere(within(r.t, 20*time.Second), s, func(m Mount) bool { return isBelow(m.Mountpoint, targets) })
	if err != nil {
		r.t.Fatal(err)
	}
	return swapped
}

// all fails the test if not just that many mounts were replaced.
func (r *swapRig) all(swapped []Swapped, want int) {
	r.t.Helper()
	for _, s := range swapped {
		if s.Err != nil {
			r.t.Errorf("%+v", s)
		}
	}
	if len(swapped) != want {
		r.t.Errorf("replaced %d, want %d: %+v", len(swapped), want, swapped)
	}
}

// bind makes a target that shows a directory or file of the source.
func (r *swapRig) bind(name, root string, attrs BindAttrs) string {
	r.t.Helper()
	target := r.targets + "/" + name
	do(r.t, r.n, "binding", func() error {
		make := os.Mkdir
		if root == "/file" {
			make = func(name string, mode os.FileMode) error { return os.WriteFile(name, nil, mode) }
		}
		if err := make(target, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		from, err := unix.Open(r.source+root, openPlace, 0)
		if err != nil {
			return err
		}
		to, err := unix.Open(target, openPlace, 0)
		if err != nil {
			return err
		}
		source, place := os.NewFile(uintptr(from), root), os.NewFile(uintptr(to), target)
		defer source.Close()
		defer place.Close()
		return Bind(source, place, attrs)
	})
	return target
}

// alive fails the test if a path does not lead to the living file system, seen from a process (0: the namespace).
func (r *swapRig) alive(pid int, target string) {
	r.t.Helper()
	var st unix.Stat_t
	err := r.n.Do(within(r.t, 10*time.Second), "stat", func() error {
		if pid != 0 {
			target = procPath(pid, "root") + target
		}
		return unix.Stat(target, &st)
	})
	if err != nil {
		r.t.Errorf("%s: %v", target, err)
		return
	}
	if dev := (Mount{Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev)}); !sameDevice(dev, r.living) {
		r.t.Errorf("%s is on device %d:%d, want %d:%d", target, dev.Major, dev.Minor, r.living.Major, r.living.Minor)
	}
}

// onlyLiving fails the test if a process sees another number of mounts of the rig on a place, or a dead one.
func (r *swapRig) onlyLiving(pid int, target string, want int) {
	r.t.Helper()
	var at []Mount
	for _, m := range r.tableOf(pid) {
		if m.Source == r.name && m.Mountpoint == target {
			at = append(at, m)
		}
	}
	if len(at) != want || slices.ContainsFunc(at, func(m Mount) bool { return !sameDevice(m, r.living) }) {
		r.t.Errorf("pid %d sees on %s %+v, want %d on %d:%d", pid, target, at, want, r.living.Major, r.living.Minor)
	}
}

// tableOf is the mount table of a process, 0: of the namespace.
func (r *swapRig) tableOf(pid int) []Mount {
	r.t.Helper()
	mounts, err := r.n.Mounts(within(r.t, 10*time.Second))
	if pid != 0 {
		mounts, err = readMounts(within(r.t, 10*time.Second), procPath(pid, "mountinfo"))
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return mounts
}

// run does a step in the namespace.
func (r *swapRig) run(steps ...func() error) {
	r.t.Helper()
	do(r.t, r.n, "a step", func() error {
		for _, step := range steps {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestSwapPutsTheSameInTheSamePlace(t *testing.T) {
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
			if after.Root != before.Root || after.Options != before.Options || after.Parent != before.Parent {
				t.Errorf("was %+v\nis  %+v", before, after)
			}
			types := func(m Mount) string {
				return fmt.Sprint(peerGroup(m) != "", isSlave(m), slices.Contains(m.Optional, "unbindable"))
			}
			if types(after) != types(before) {
				t.Errorf("propagation was %q, is %q", before.Optional, after.Optional)
			}
			if group := peerGroup(after); group != "" && group == peerGroup(mountAt(t, r.n, r.source)) {
				t.Errorf("it is in the source's group: %q", after.Optional)
			}
			r.all(r.here(r.swap()), 0) // a second time
			if again := mountAt(t, r.n, target); again.ID != after.ID {
				t.Error("it was replaced again")
			}
		})
	}
}

func TestASlaveStaysASlave(t *testing.T) {
	r := newSwapRig(t)
	target, master := mkdir(t, r.targets, "target"), mkdir(t, r.dir, "master")
	r.run(func() error { return unix.Mount(r.source, master, "", unix.MS_BIND, "") }, // in the source's group
		func() error { return unix.Mount(r.source, target, "", unix.MS_BIND, "") },
		func() error { return unix.Mount("", target, "", unix.MS_SLAVE, "") })
	if m := mountAt(t, r.n, target); !isSlave(m) {
		t.Fatalf("%+v of %+v", m, mountAt(t, r.n, r.source))
	}
	r.restart()
	r.all(r.here(r.swap()), 1)
	if m := mountAt(t, r.n, target); !isSlave(m) || peerGroup(m) != "" {
		t.Errorf("%+v", m)
	}
}

func TestOnlyDeadMountsAreReplaced(t *testing.T) {
	r := newSwapRig(t)
	dead, elsewhere := r.bind("dead", "/", BindAttrs{}), mkdir(t, r.dir, "elsewhere")
	r.run(func() error { return unix.Mount(r.source, elsewhere, "", unix.MS_BIND, "") })
	mountFake(t, r.n, mkdir(t, r.targets, "other"), "s3csi:other")
	r.restart()
	living := r.bind("living", "/", BindAttrs{})
	before := map[string]int{}
	for _, place := range []string{living, elsewhere, r.targets + "/other", r.source} {
		before[place] = mountAt(t, r.n, place).ID
	}
	s := r.swap()
	name := r.name
	s.Dead = func(m Mount) bool { return m.Source == name } // says so of the living ones too
	r.all(r.here(s), 1)
	r.alive(0, dead)
	for place, id := range before {
		if got := mountAt(t, r.n, place).ID; got != id {
			t.Errorf("%s is another mount", place)
		}
	}
	s.Living.Minor++
	if _, err := r.n.SwapHere(within(t, 10*time.Second), s, func(Mount) bool { return true }); fault.KindOf(err) != fault.Busy {
		t.Errorf("with another living mount: %v", err)
	}
}

// TestNobodySeesWhatLiesUnderATarget has a process try all the time to open a file that lies in the directory that a
// target is mounted on.
func TestNobodySeesWhatLiesUnderATarget(t *testing.T) {
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

func TestAReplacedMountIsInThePlaceInPeersAndSlavesToo(t *testing.T) {
	r := newSwapRig(t)
	r.run(func() error { return unix.Mount("tmpfs", r.targets, "tmpfs", 0, "") },
		func() error { return unix.Mount("", r.targets, "", unix.MS_SHARED, "") })
	again := mkdir(t, r.dir, "again") // the same once more in this namespace
	r.run(func() error { return unix.Mount(r.targets, again, "", unix.MS_BIND, "") })
	peer := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "echo ready; read -r _").Process.Pid
	slave := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "mount --make-rslave / && echo ready; read -r _").Process.Pid
	late := r.bind("target", "/sub", BindAttrs{ReadOnly: true})
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
				r.onlyLiving(pid, place, 1)
				r.alive(pid, place+"/deep")
			}
		}
		if m := mountAt(t, r.n, late); len(m.Optional) != 0 {
			t.Errorf("it is not private any more: %+v", m)
		}
	}
	if got := mountsOf(t, private, r.name); slices.ContainsFunc(got, func(m Mount) bool { return sameDevice(m, r.living) && isBelow(m.Mountpoint, r.targets) }) {
		t.Errorf("a private copy was replaced: %+v", got)
	}
	r.run(func() error { return Unmount(late) })
	for _, pid := range []int{0, peer, slave} {
		r.onlyLiving(pid, late, 0)
	}
}

func TestAStackOfDeadMountsIsReplacedByOne(t *testing.T) {
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shared), func(t *testing.T) {
			r := newSwapRig(t)
			if shared {
				sharedTmpfs(t, r.n, r.targets)
			}
			target := r.bind("target", "/sub", BindAttrs{})
			r.bind("target", "/sub", BindAttrs{})
			r.client.die()
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

func TestOfAStackTheTopOneIsShownOn(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	r.bind("target", "/sub", BindAttrs{ReadOnly: true})
	r.restart()
	r.all(r.here(r.swap()), 1)
	at := mountsAt(t, r.n, target)
	top := newTree(r.tableOf(0)).top(at[0])
	if !sameDevice(top, r.living) || top.Root != "/sub" || !top.ReadOnly() {
		t.Errorf("%+v", at)
	}
	r.alive(0, target)
	r.all(r.here(r.swap()), 0)
}

func TestARunThatWasKilledIsFinished(t *testing.T) {
	r := newSwapRig(t)
	sharedTmpfs(t, r.n, r.targets)
	peer := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "echo ready; read -r _").Process.Pid
	target := r.bind("target", "/sub", BindAttrs{})
	r.restart()
	// Attached beneath, and no further.
	r.run(func() error {
		dir, err := os.Open(r.source + "/sub")
		if err != nil {
			return err
		}
		defer dir.Close()
		h := hold()
		defer h.drop()
		clone, err := cloneMount(h, dir, r.living, r.living)
		if err != nil {
			return err
		}
		dead, err := OpenDir(target)
		if err != nil {
			return err
		}
		defer dead.Close()
		return unix.MoveMount(int(clone.Fd()), "", int(dead.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH|moveBeneath)
	})
	if at := mountsAt(t, r.n, target); len(at) != 2 {
		t.Fatalf("%+v", at)
	}
	r.all(r.here(r.swap()), 1)
	for _, pid := range []int{0, peer} {
		r.onlyLiving(pid, target, 1)
		r.alive(pid, target)
	}
	if m := mountAt(t, r.n, target); len(m.Optional) != 0 {
		t.Errorf("%+v", m)
	}
}

func TestOnTopWhereThereIsNoBeneath(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	for range 2 {
		r.restart()
		s := r.swap()
		s.onTop = true
		r.all(r.here(s), 1)
		r.alive(0, target)
		r.all(r.here(s), 0) // the dead one below is out of reach
		if at := mountsAt(t, r.n, target); len(at) != 2 {
			t.Errorf("they pile up: %+v", at)
		}
	}
	r.restart()
	r.all(r.here(r.swap()), 1) // the kernel is a newer one
	mountAt(t, r.n, target)
	r.alive(0, target)
}

func TestABusyDeadMountIsReplaced(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	holder := exec.Command("/bin/sh", "-c", "cd "+target+" && exec 3<. && echo ready && read -r _")
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.run(holder.Start)
	t.Cleanup(func() { in.Close(); _ = holder.Wait() })
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	r.restart()
	r.all(r.here(r.swap()), 1)
	r.onlyLiving(0, target, 1)
	r.alive(0, target)
	if _, err := os.Stat(procPath(holder.Process.Pid, "cwd")); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("the working directory of a process: %v, it was said to stay dead", err)
	}
}

func TestWhatIsGoneFromTheVolumeIsLeftDead(t *testing.T) {
	for _, tc := range []struct{ name, root, lost, remade string }{
		{"a directory", "/sub", "sub", ""},
		{"one above it", "/sub/deep", "sub", ""},
		{"a file", "/file", "file", ""},
		{"now a link", "/sub", "sub", "link"},
		{"now a file", "/sub", "sub", "file"},
		{"now a directory", "/file", "file", "sub"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newSwapRig(t)
			target, whole := r.bind("target", tc.root, BindAttrs{}), r.bind("whole", "/", BindAttrs{})
			r.restart()
			r.client.lose(tc.lost)
			if tc.remade != "" {
				r.client.mu.Lock()
				for i := range r.client.nodes {
					if r.client.nodes[i].name == tc.remade {
						r.client.nodes[i].name = tc.lost
					}
				}
				r.client.mu.Unlock()
			}
			before := mountAt(t, r.n, target)
			swapped := r.here(r.swap())
			r.alive(0, whole)
			after := mountAt(t, r.n, target)
			if before.ID != after.ID {
				t.Errorf("the dead one was replaced by %+v", after)
			}
			i := slices.IndexFunc(swapped, func(s Swapped) bool { return s.Mountpoint == target })
			if i < 0 || fault.KindOf(swapped[i].Err) != fault.NotFound || swapped[i].Root != tc.root || !strings.Contains(swapped[i].Err.Error(), target) {
				t.Errorf("%+v", swapped)
			}
		})
	}
}

func TestAHiddenDeadMountIsReported(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	r.restart()
	r.run(func() error { return unix.Mount("tmpfs", target, "tmpfs", 0, "") })
	swapped := r.here(r.swap())
	if len(swapped) != 1 || fault.KindOf(swapped[0].Err) != fault.Precondition {
		t.Errorf("%+v", swapped)
	}
	if at := mountsAt(t, r.n, target); len(at) != 2 {
		t.Errorf("%+v", at)
	}
}

func TestAHungClientHoldsNothingUp(t *testing.T) {
	r := newSwapRig(t)
	whole, target := r.bind("whole", "/", BindAttrs{}), r.bind("a target", "/sub", BindAttrs{})
	more := r.bind("another", "/sub/deep", BindAttrs{})
	r.restart()
	r.client.hang()
	s := r.swap()
	s.Bound = 200 * time.Millisecond
	start := time.Now()
	swapped := r.here(s)
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
	for _, s := range swapped {
		if want := s.Mountpoint != whole; (fault.KindOf(s.Err) == fault.Timeout) != want {
			t.Errorf("%+v", s)
		}
	}
	if len(swapped) != 3 || !sameDevice(mountAt(t, r.n, whole), r.living) {
		t.Errorf("%+v", swapped)
	}
	if count := r.n.Overdue(); count > 1 {
		t.Errorf("%d calls are overdue: %q", count, r.n.OverdueCalls())
	}
	r.client.die()
	for r.n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
	for _, place := range []string{target, more} { // nothing was attached when the call came back
		if m := mountAt(t, r.n, place); sameDevice(m, r.living) {
			t.Errorf("%+v", m)
		}
	}
}

func TestNothingIsReplacedAfterTheCallerGaveUp(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	r.restart()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if swapped, err := r.n.SwapHere(ctx, r.swap(), func(Mount) bool { return true }); !errors.Is(err, context.Canceled) || len(swapped) != 0 {
		t.Errorf("%+v, %v", swapped, err)
	}
	ctx, cancel = context.WithCancel(context.Background())
	defer cancel()
	swapped, err := r.n.SwapHere(ctx, r.swap(), func(Mount) bool { cancel(); return true })
	if !errors.Is(err, context.Canceled) || len(swapped) != 0 {
		t.Errorf("%+v, %v", swapped, err)
	}
	if m := mountAt(t, r.n, target); sameDevice(m, r.living) {
		t.Errorf("%+v", m)
	}
}
