//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

func TestBusyStaleMountIsReplaced(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	holder := sleeperWith(t, r.n, target, 0, "exec 3<. && echo ready; read -r _")
	r.restart()
	r.all(r.here(r.swap()), 1)
	r.onlyHealthy(0, target, 1)
	r.alive(0, target)
	if _, err := os.Stat(proc.Path(holder.Process.Pid, "cwd")); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("the working directory of a process: %v, it was said to stay stale", err)
	}
}

func TestMountOfARemovedDirectoryStaysStale(t *testing.T) {
	for _, tc := range []struct{ name, root, lost, remade string }{
		{"a directory", "/sub", "sub", ""},
		{"one above it", "/sub/deep", "sub", ""},
		{"a file", "/file", "file", ""},
		{"now a link", "/sub", "sub", "link"},
		{"one above it is a link now", "/sub/deep", "sub", "link"}, // to a directory that has a "deep"
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
				t.Errorf("the stale one was replaced by %+v", after)
			}
			i := slices.IndexFunc(swapped, func(s Swapped) bool { return s.Mountpoint == target })
			if i < 0 || fault.KindOf(swapped[i].Err) != fault.NotFound || swapped[i].Root != tc.root || !strings.Contains(swapped[i].Err.Error(), target) {
				t.Errorf("%+v", swapped)
			}
		})
	}
}

func TestHiddenStaleMountIsReported(t *testing.T) {
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

func TestUnresponsiveClientDelaysNothingElse(t *testing.T) {
	r := newSwapRig(t)
	whole, target := r.bind("whole", "/", BindAttrs{}), r.bind("a target", "/sub", BindAttrs{})
	more := r.bind("another", "/sub/deep", BindAttrs{})
	r.restart()
	r.client.hang()
	s := r.swap()
	s.Bound = time.Second
	start := time.Now()
	swapped := r.here(s)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	for _, s := range swapped {
		if want := s.Mountpoint != whole; (fault.KindOf(s.Err) == fault.Timeout) != want {
			t.Errorf("%+v", s)
		}
	}
	if len(swapped) != 3 || !sameDevice(mountAt(t, r.n, whole), r.healthy) {
		t.Errorf("%+v", swapped)
	}
	if count := r.n.Overdue(); count > 1 {
		t.Errorf("%d calls are overdue: %q", count, r.n.OverdueCalls())
	}
	r.client.exit()
	for r.n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
	for _, place := range []string{target, more} { // nothing was attached when the call came back
		if m := mountAt(t, r.n, place); sameDevice(m, r.healthy) {
			t.Errorf("%+v", m)
		}
	}
}

func TestNothingIsReplacedAfterTheContextEnded(t *testing.T) {
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
	if m := mountAt(t, r.n, target); sameDevice(m, r.healthy) {
		t.Errorf("%+v", m)
	}
}

// TestAnOverdueReplacementAttachesNothing has the way to a target lead through a client that answers only after the
// bound.
func TestAnOverdueReplacementAttachesNothing(t *testing.T) {
	r := newSwapRig(t)
	outer := mkdir(t, r.targets, "outer")
	on := mountFake(t, r.n, outer, "s3csi:outer")
	target := r.bind("outer/sub", "/", BindAttrs{})
	r.restart()
	on.pause()
	s := r.swap()
	s.Bound = 100 * time.Millisecond
	swapped := r.here(s)
	if len(swapped) != 1 || fault.KindOf(swapped[0].Err) != fault.Timeout {
		t.Errorf("%+v", swapped)
	}
	on.resume()
	for r.n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
	if m := mountAt(t, r.n, target); sameDevice(m, r.healthy) {
		t.Errorf("%+v", m)
	}
	r.all(r.here(r.swap()), 1)
	r.alive(0, target)
}

// TestNextRunCompletesARunKilledAtAnyStep kills processes that replace mounts.
func TestNextRunCompletesARunKilledAtAnyStep(t *testing.T) {
	r := newSwapRig(t)
	sharedTmpfs(t, r.n, r.targets)
	peer := sleeperWith(t, r.n, "/", unix.CLONE_NEWNS, "echo ready; read -r _").Process.Pid
	var targets []string
	for i := range 10 {
		targets = append(targets, r.bind(fmt.Sprint(i), "/sub", BindAttrs{}))
	}
	between := 0
	for i := range 30 {
		r.restart()
		cmd := exec.Command("/proc/self/exe", r.source, r.targets, r.name)
		cmd.Env = append(os.Environ(), levelEnv+"="+levelSwap)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		r.run(cmd.Start)
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i) * 200 * time.Microsecond)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for _, target := range targets {
			if len(mountsAt(t, r.n, target)) != 1 {
				between++
			}
		}
		for _, s := range r.here(r.swap()) {
			if s.Err != nil {
				t.Errorf("%+v", s)
			}
		}
		for _, target := range targets {
			r.onlyHealthy(0, target, 1)
			r.onlyHealthy(peer, target, 1)
			r.alive(peer, target)
		}
	}
	t.Logf("%d times between two steps", between)
}

// swapUntilKilled is the process of that test.
func swapUntilKilled(source, targets, name string) error {
	n := Own()
	mounts, err := n.Mounts(context.Background())
	if err != nil {
		return err
	}
	i := slices.IndexFunc(mounts, func(m Mount) bool { return m.Mountpoint == source && m.Source == name })
	if i < 0 {
		return errors.New("no source")
	}
	fmt.Println("ready")
	_, err = n.SwapHere(context.Background(), Swap{Source: mounts[i], Bound: time.Minute, Stale: func(m Mount) bool { return m.Source == name }},
		func(m Mount) bool { return isBelow(m.Mountpoint, targets) })
	return err
}
