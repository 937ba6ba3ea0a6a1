//go:build linux

package host

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// The ways in which getStuck waits for a client that does not answer.
const (
	stuckMapped = "mapped" // executes a program with a changed page of a shared mapping, which the kernel writes first
	stuckFile   = "file"   // executes a program with a close-on-exec file open, which the kernel flushes first
)

// getStuck gets stuck with a file of a FUSE file system. It returns only an error.
func getStuck(way, file string) error {
	fd, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if way == stuckMapped {
		page, err := unix.Mmap(fd, 0, fakeSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		page[0] = 1
	}
	fmt.Println(os.Getpid())
	if way == stuckFile {
		_, err := syscall.ForkExec("/bin/true", []string{"true"}, nil) // its child gets stuck, and this process waits for that
		return err
	}
	return unix.Exec("/bin/true", []string{"true"}, nil)
}

// stuck starts a process that gets stuck, in a mount namespace of its own, and returns its pid. The file system is at dir.
func (r *swapRig) stuck(way, dir string) int {
	t := r.t
	t.Helper()
	pid, err := strconv.Atoi(begin(t, r.n, levelProcess(levelStuck, way, dir+"/file")))
	if err != nil {
		t.Fatal(err)
	}
	if way == stuckFile { // it is the child
		for deadline := time.Now().Add(10 * time.Second); ; {
			files, _ := filepath.Glob(proc.Path(pid, "task/*/children"))
			for _, file := range files {
				text, _ := os.ReadFile(file)
				if child, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
					return child
				}
			}
			if time.Now().After(deadline) {
				t.Fatal("it has no child")
			}
		}
	}
	return pid
}

// stuckTenant is a process in a cgroup of its own that gets stuck with a file system of its own.
func (r *swapRig) stuckTenant(way, cgroup string) (pid int) {
	r.t.Helper()
	place := mkdir(r.t, r.dir, "stuck-"+way)
	client := startFake(r.t, r.n, place, &fakeFuse{source: "s3csi:stuck", nodes: fakeNodes(), unanswered: map[uint32]bool{opWrite: true, opFlush: true}})
	pid = r.stuck(way, place)
	r.t.Cleanup(client.exit)
	if cgroup != "" {
		join(r.t, r.n, testCgroup(r.t, r.n, cgroup), pid)
	}
	for deadline := time.Now().Add(10 * time.Second); !hangs(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatal("it is not stuck")
		}
	}
	return pid
}

// hangs reports whether a process waits in execve(2).
func hangs(pid int) bool {
	done := make(chan struct{})
	go func() {
		_, _ = os.Readlink(proc.Path(pid, "cwd"))
		close(done)
	}()
	select {
	case <-done:
		return false
	case <-time.After(100 * time.Millisecond):
		return true
	}
}

// A process that is stuck in execve(2) costs only itself its place in a search: also if the kernel opens no namespace of such a process.
func TestHungProcess_DelaysNoOther(t *testing.T) {
	for _, way := range []string{stuckMapped, stuckFile} {
		for name, noPidfds := range map[string]bool{"": false, " before Linux 6.11": true} {
			t.Run(way+name, func(t *testing.T) {
				r := newSwapRig(t)
				r.n.looks.noPidfds = noPidfds
				target := r.bind("target", "/", BindAttrs{})
				pid := r.stuckTenant(way, "")
				victim := r.container("s3csitest-pod", "umount "+r.source+" && ")
				agent := r.container("", "")
				r.restart()
				began := time.Now()
				if _, err := CPUTime(pid, uint32(os.Getuid())); err != nil {
					t.Error(err)
				}
				r.all(r.elsewhere(), 1)
				r.onlyHealthy(victim, target, 1)
				if took := time.Since(began); took > time.Second {
					t.Errorf("healing took %s", took)
				}
				for _, bound := range []time.Duration{3 * time.Second, time.Second} { // known processes that hang are not waited for
					began = time.Now()
					if _, err := r.n.DetachStale(within(t, 10*time.Second), r.swap().Stale, ofPod()); err != nil {
						t.Error(err)
					}
					if _, err := r.n.DetachCopies(within(t, 10*time.Second), r.healthy); err != nil {
						t.Error(err)
					}
					if _, err := r.n.ShownInOtherNamespaces(within(t, 10*time.Second), "looking", r.healthy.IsCopy); err != nil {
						t.Error(err)
					}
					if _, err := r.n.Users(within(t, 10*time.Second), r.healthy); err != nil {
						t.Error(err)
					}
					if took := time.Since(began); took > bound {
						t.Errorf("searches took %s", took)
					}
				}
				if left := mountsOf(t, agent, r.name); len(left) != 0 {
					t.Errorf("left: %+v", left)
				}
			})
		}
	}
}

// The container whose only process hangs is healed too, if the kernel opens its namespace; otherwise it is reported.
func TestHungProcess_OfThePodItself(t *testing.T) {
	for name, noPidfds := range map[string]bool{"opened": false, "before Linux 6.11": true} {
		t.Run(name, func(t *testing.T) {
			r := newSwapRig(t)
			r.n.looks.noPidfds = noPidfds
			target := r.bind("target", "/", BindAttrs{})
			r.stuckTenant(stuckMapped, "s3csitest-pod")
			victim := r.container("s3csitest-pod", "umount "+r.source+" && ")
			r.restart()
			failed := slices.DeleteFunc(r.elsewhere(), func(s Swapped) bool { return s.Err == nil })
			if want := map[bool]int{true: 1}[noPidfds]; len(failed) != want || want > 0 && !fault.Is(failed[0].Err, fault.Timeout) {
				t.Errorf("failed: %+v", failed)
			}
			r.onlyHealthy(victim, target, 1)
		})
	}
}
