//go:build linux

package host

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// deepDir makes a directory below as many others with names of the maximum length, below dir, and opens it.
func deepDir(dir string, levels int) (int, error) {
	name := strings.Repeat("d", unix.NAME_MAX)
	at, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for range levels {
		if err != nil {
			return -1, err
		}
		if err = unix.Mkdirat(at, name, 0o755); err == nil {
			var next int
			next, err = unix.Openat(at, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			unix.Close(at)
			at = next
		}
	}
	return at, err
}

const (
	hugeLevels = 400
	hugeMounts = 4000
)

// fillTable gives this process's mount namespace a mount table of 400 MB, and waits for its input to end.
func fillTable(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	deep, err := deepDir(dir, hugeLevels)
	if err != nil {
		return err
	}
	for i := range hugeMounts {
		place := fmt.Sprintf("%s/%d", dir, i)
		if err := os.Mkdir(place, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", deep), place, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return nil
}

// hugeTable starts a process whose mount table fillTable has filled, and returns its pid.
func (r *swapRig) hugeTable() int {
	r.t.Helper()
	cmd := levelProcess(levelTable, mkdir(r.t, r.dir, "huge"))
	begin(r.t, r.n, cmd)
	return cmd.Process.Pid
}

// peakMemory returns the most memory that this process has had resident since the last call, in bytes.
func peakMemory(t *testing.T) int {
	t.Helper()
	status, err := proc.ReadStatus(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var kib int
	if _, err := fmt.Sscan(status.Field("VmHWM"), &kib); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // VmHWM begins again
		t.Skip(err)
	}
	return kib << 10
}

// Tables of 400 MB, which tenants can make in mount namespaces of their own, cost no other pod anything: the one of a pod that is healed, and
// the one of another.
func TestHugeMountTable_CostsNoMemoryAndNoOther(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	tenant := r.hugeTable()
	join(t, r.n, testCgroup(t, r.n, "s3csitest-pod"), tenant)
	r.hugeTable()
	victim := r.container("s3csitest-pod", "umount "+r.source+" && ")
	agent := r.container("", "")
	r.restart()
	peakMemory(t)
	before := peakMemory(t)
	began := time.Now()
	failed := slices.DeleteFunc(r.elsewhere(), func(s Swapped) bool { return s.Err == nil })
	if len(failed) != 1 || failed[0].PID != tenant || !fault.Is(failed[0].Err, fault.Unsupported) {
		t.Errorf("failed: %+v", failed)
	}
	r.onlyHealthy(victim, target, 1)
	t.Logf("healing took %s", time.Since(began))
	if _, err := r.n.DetachStale(within(t, 20*time.Second), r.swap().Stale, ofPod()); err != nil {
		t.Error(err)
	}
	if left := mountsOf(t, agent, r.name); len(left) != 0 && slices.ContainsFunc(left, r.swap().Stale) {
		t.Errorf("left: %+v", left)
	}
	if _, err := r.n.ShownInOtherNamespaces(within(t, 20*time.Second), "looking", r.healthy.IsCopy); err != nil {
		t.Error(err)
	}
	if _, err := r.n.Users(within(t, 20*time.Second), r.healthy); err != nil {
		t.Error(err)
	}
	after := peakMemory(t)
	t.Logf("%d MiB before, at most %d MiB; %s", before>>20, after>>20, time.Since(began))
	if after-before > 32<<20 {
		t.Errorf("from %d to %d bytes", before, after)
	}
}

// An ordinary pod can make a line of the host's own table as long as it likes: it moves a directory that kubelet has mounted for a subPath.
func TestLongLineOfTheHost_IsNoObstacle(t *testing.T) {
	for _, levels := range []int{200, 4200} { // of 51 KiB, and of more than 1 MiB
		t.Run(fmt.Sprint(levels), func(t *testing.T) {
			r := newSwapRig(t)
			target := r.bind("target", "/", BindAttrs{})
			volume, subpath := mkdir(t, r.dir, "volume"), mkdir(t, r.dir, "subpath")
			r.run(
				func() error { return unix.Mount("tmpfs", volume, "tmpfs", 0, "") },
				func() error { return os.Mkdir(volume+"/sub", 0o755) },
				func() error { return unix.Mount(volume+"/sub", subpath, "", unix.MS_BIND, "") },
				func() error {
					deep, err := deepDir(volume, levels)
					if err != nil {
						return err
					}
					defer unix.Close(deep)
					return unix.Renameat(unix.AT_FDCWD, volume+"/sub", deep, "sub")
				})
			// The kernel cannot remove it in one step.
			t.Cleanup(func() { r.run(func() error { return unix.Unmount(subpath, unix.MNT_DETACH) }) })
			moved := mountAt(t, r.n, subpath)
			if len(moved.Root) != maxField+1 {
				t.Errorf("the root has %d bytes", len(moved.Root))
			}
			if _, err := os.Stat(volume + moved.Root); err == nil {
				t.Error("a root that was cut leads somewhere")
			}
			victim := r.container("s3csitest-pod", "umount "+r.source+" && ")
			r.restart()
			r.all(r.elsewhere(), 1)
			r.onlyHealthy(victim, target, 1)
			r.all(r.here(r.swap()), 1)
			if n, err := NewNamespace(); err != nil {
				t.Error(err)
			} else if _, err := n.KnownMounts(within(t, 10*time.Second)); err != nil {
				t.Error(err)
			} else {
				n.known.table.close()
			}
			if _, err := r.n.DetachCopies(within(t, 10*time.Second), r.healthy); err != nil {
				t.Error(err)
			}
		})
	}
}
