//go:build linux

package host

import (
	"errors"
	"os"
	"path"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// swapRig is a mount whose client can be restarted, with a directory for its targets. The sources directory is shared, as the
// driver's is.
type swapRig struct {
	t       *testing.T
	n       *Namespace
	dir     string
	source  string // the mount point of the source
	targets string
	name    string // the source string
	mapped  bool   // clients let themselves be id-mapped
	client  *fakeFuse
	healthy Mount
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
	r.start(0, 0)
	return r
}

// start mounts a client on the source.
func (r *swapRig) start(cached, names uint64) {
	r.t.Helper()
	r.client = startFake(r.t, r.n, r.source, &fakeFuse{source: r.name, nodes: fakeNodes(), cached: cached, names: names, mapped: r.mapped})
	r.healthy = mountAt(r.t, r.n, r.source)
}

// restart kills the client and mounts a new one, on the source only.
func (r *swapRig) restart() {
	r.t.Helper()
	r.client.exit()
	do(r.t, r.n, "unmounting the stale source", func() (err error) {
		for range 1000 { // a process that was just forked has all descriptors until it execs
			if err = Unmount(r.source); !errors.Is(err, unix.EBUSY) {
				break
			}
			time.Sleep(time.Millisecond)
		}
		return err
	})
	r.start(0, 0)
}

// swap replaces every mount of the rig that is not of its healthy client.
func (r *swapRig) swap() Swap {
	healthy, name := r.healthy, r.name
	return Swap{Source: healthy, Bound: 5 * time.Second, Stale: func(m Mount) bool { return m.Source == name && !sameDevice(m, healthy) }}
}

// here runs SwapHere for the targets, and fails the test with its error.
func (r *swapRig) here(s Swap) []Swapped {
	r.t.Helper()
	targets := r.targets
	swapped, err := r.n.SwapHere(within(r.t, 20*time.Second), s, func(m Mount) bool { return isBelow(m.Mountpoint, targets) })
	if err != nil {
		r.t.Fatal(err)
	}
	return swapped
}

// all fails the test unless exactly that many mounts were replaced.
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
		mk := os.Mkdir
		if root == "/file" {
			mk = func(name string, mode os.FileMode) error { return os.WriteFile(name, nil, mode) }
		}
		if err := mk(target, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
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

// alive fails the test if a path does not lead to the healthy file system, seen from a process (0: the namespace).
func (r *swapRig) alive(pid int, target string) {
	r.t.Helper()
	var st unix.Stat_t
	err := r.n.Do(within(r.t, 10*time.Second), "stat", func() error {
		if pid != 0 {
			target = proc.Path(pid, "root") + target
		}
		return unix.Stat(target, &st)
	})
	if err != nil {
		r.t.Errorf("%s: %v", target, err)
		return
	}
	if dev := (Mount{Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev)}); !sameDevice(dev, r.healthy) {
		r.t.Errorf("%s is on device %d:%d, want %d:%d", target, dev.Major, dev.Minor, r.healthy.Major, r.healthy.Minor)
	}
}

// onlyHealthy fails the test if a process sees another number of mounts of the rig on a place, or a stale one.
func (r *swapRig) onlyHealthy(pid int, target string, want int) {
	r.t.Helper()
	var at []Mount
	for _, m := range r.tableOf(pid) {
		if m.Source == r.name && m.Mountpoint == target {
			at = append(at, m)
		}
	}
	if len(at) != want || slices.ContainsFunc(at, func(m Mount) bool { return !sameDevice(m, r.healthy) }) {
		r.t.Errorf("pid %d sees on %s %+v, want %d on %d:%d", pid, target, at, want, r.healthy.Major, r.healthy.Minor)
	}
}

// tableOf is the mount table of a process, 0: of the namespace.
func (r *swapRig) tableOf(pid int) []Mount {
	r.t.Helper()
	mounts, err := r.n.Mounts(within(r.t, 10*time.Second))
	if pid != 0 {
		mounts, err = readMounts(within(r.t, 10*time.Second), proc.Path(pid, "mountinfo"))
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

// topAt returns the visible mount on a path, if there is one.
func (t mountTree) topAt(place string) Mount {
	for _, m := range t.byID {
		if m.Mountpoint == place {
			return t.top(m)
		}
	}
	return Mount{}
}

// onlyTop fails the test unless a process sees a healthy mount on a path, with a stale one below it.
func (r *swapRig) onlyTop(pid int, place string) {
	r.t.Helper()
	tree := newTree(r.tableOf(pid))
	top := tree.topAt(place)
	under, ok := tree.mountUnder(top)
	if !sameDevice(top, r.healthy) || !ok || sameDevice(under, r.healthy) {
		r.t.Errorf("pid %d sees on %s %+v, on %+v", pid, place, top, under)
	}
}
