//go:build linux

package host

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestDoReturnsTheErrorOfTheCall(t *testing.T) {
	n := testNamespace(t)
	want := errors.New("mine")
	if err := n.Do(t.Context(), "failing", func() error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
	if err := n.Do(t.Context(), "working", func() error { return nil }); err != nil {
		t.Errorf("got %v", err)
	}
}

func TestDoDoesNotStartAfterTheContextEnded(t *testing.T) {
	n := testNamespace(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	started := false
	err := n.Do(ctx, "late work", func() error { started = true; return nil })
	if started || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "late work") {
		t.Errorf("started %v, error %v", started, err)
	}
}

func TestDoCountsOverdueCalls(t *testing.T) {
	n := testNamespace(t)
	release := make(chan struct{})
	err := n.Do(within(t, time.Second), "unmounting /a", func() error { <-release; return nil })
	if !errors.Is(err, context.DeadlineExceeded) || !fault.Is(err, fault.Timeout) ||
		!strings.Contains(err.Error(), "unmounting /a") || !strings.Contains(err.Error(), "still running") {
		t.Errorf("got %v", err)
	}
	if n.Overdue() != 1 || !strings.Contains(strings.Join(n.OverdueCalls(), ";"), "unmounting /a") {
		t.Errorf("overdue: %d %q", n.Overdue(), n.OverdueCalls())
	}
	close(release) // testNamespace checks that it is taken off
}

func TestDoRefusesFurtherCallsAtTheBound(t *testing.T) {
	n := Own()
	for range maxOverdue {
		n.overdue[&call{}] = struct{}{}
	}
	if err := n.Do(t.Context(), "more", func() error { return nil }); !fault.Is(err, fault.Exhausted) {
		t.Errorf("got %v", err)
	}
}

func TestDoSurvivesACallThatEndsItsGoroutine(t *testing.T) {
	n := testNamespace(t)
	stale := make(chan struct{})
	go func() { // a stand-in for the test's own FailNow
		defer close(stale)
		err := n.Do(context.Background(), "leaving", func() error { runtime.Goexit(); return nil })
		if !errors.Is(err, errUnfinished) {
			t.Errorf("got %v", err)
		}
	}()
	<-stale
}

func TestDoWorksInTheNamespaceOfPID1(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	want, err := os.Readlink(hostNamespace)
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Readlink(ownNamespace)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 { // also on the process's first thread, if the scheduler likes
		do(t, n, "looking", func() error {
			if got, _ := os.Readlink("/proc/thread-self/ns/mnt"); got != want {
				t.Errorf("works in %s, want %s", got, want)
			}
			if cwd, _ := os.Getwd(); n.Foreign() && cwd != "/" {
				t.Errorf("working directory %s", cwd)
			}
			out, err := exec.Command("readlink", ownNamespace).Output()
			if got := strings.TrimSpace(string(out)); got != want {
				t.Errorf("a child works in %q, want %s", got, want)
			}
			return err
		})
	}
	if got, _ := os.Readlink(ownNamespace); got != own {
		t.Errorf("the process itself went from %s to %s", own, got)
	}
}

func TestHostNamespaceIsFoundWithoutItsLink(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	for _, tc := range []struct {
		name       string
		namespaces uintptr
		want       string
	}{
		{"the same namespace", 0, "false, error <nil>"},
		{"another, with no right to leave it", unix.CLONE_NEWNS, "hostPID: true, privileged: true"},
	} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), levelEnv+"="+levelProbe)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: tc.namespaces, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		var out []byte
		do(t, n, "asking a process without rights", func() (err error) { out, err = cmd.CombinedOutput(); return err })
		if !strings.Contains(string(out), tc.want) {
			t.Errorf("%s: %s", tc.name, out)
		}
	}
}

func TestThreadsAndDescriptorsAreReleased(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	work := func() {
		f := mountFake(t, n, mkdir(t, dir, "m"), "s3csi:leak")
		mountID := mountAt(t, n, dir+"/m")
		if err := n.ReadRoot(within(t, 10*time.Second), dir+"/m"); err != nil {
			t.Error(err)
		}
		if _, err := n.Users(t.Context(), mountID); err != nil {
			t.Error(err)
		}
		if _, err := n.DetachCopies(t.Context(), mountID); err != nil {
			t.Error(err)
		}
		do(t, n, "unmounting", func() error { return UnmountTarget(dir, dir+"/m") })
		do(t, n, "removing", func() error { return RemoveTarget(dir, dir+"/m") })
		f.exit()
	}
	work()
	fds, threads := count(t, "/proc/self/fd"), count(t, "/proc/self/task")
	for range 20 {
		work()
	}
	threads += 5 // the runtime makes some of its own
	// A thread that is thrown away ends a moment after its call.
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if count(t, "/proc/self/fd") <= fds && count(t, "/proc/self/task") <= threads {
			return
		}
	}
	t.Errorf("%d descriptors, had %d; %d threads, had no more than %d", count(t, "/proc/self/fd"), fds, count(t, "/proc/self/task"), threads)
}

func TestShareMounts(t *testing.T) {
	a := []Mount{{ID: 1}, {ID: 2}, {ID: 3}}
	for _, tc := range []struct {
		name string
		b    []Mount
		want bool
	}{
		{"the same", a, true},
		{"one mount more", append([]Mount{{ID: 9}}, a...), true},
		{"another namespace", []Mount{{ID: 4}, {ID: 5}}, false},
		{"another with an id that was freed meanwhile", []Mount{{ID: 4}, {ID: 3}, {ID: 6}}, false},
		{"nothing to see", nil, false},
	} {
		if got := shareMounts(a, tc.b); got != tc.want {
			t.Errorf("%s: %v", tc.name, got)
		}
	}
}

func TestHostPID(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   pidNamespace
		ok   bool
	}{
		{"the machine's", pidNamespace{77, "77", initPIDNamespace, "systemd"}, true},
		{"PID 1 of the machine", pidNamespace{1, "1", initPIDNamespace, "s3-csi-driver"}, true},
		{"a node in a container", pidNamespace{77, "77", "pid:[4026532000]", "systemd"}, true},
		{"a container's own", pidNamespace{1, "1", "pid:[4026532000]", "s3-csi-driver"}, false},
		{"a pod's own", pidNamespace{7, "7", "pid:[4026532000]", "pause"}, false},
		{"a foreign /proc", pidNamespace{7, "4711", initPIDNamespace, "systemd"}, false},
	} {
		err := tc.in.shared()
		if (err == nil) != tc.ok || err != nil && (!fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "hostPID")) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if level := os.Getenv(levelEnv); level != "" {
		if err := HostPID(); (err == nil) != (level == levelGuest) {
			t.Errorf("as %s: %v", level, err)
		}
	}
}

// count counts a directory's entries.
func count(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// hasErrno fails the test unless err has the errno in its chain.
func hasErrno(t *testing.T, err error, want unix.Errno) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
}
