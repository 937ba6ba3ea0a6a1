//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
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

// A result that comes after the caller has given up is dropped.
func TestLateResultsAreDropped(t *testing.T) {
	dropped, goOn := make(chan int, 1), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	late := func() (int, error) { cancel(); <-goOn; return 7, nil }
	if v, err := Call(ctx, Own(), "coming late", func(v int) { dropped <- v }, late); v != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d, %v", v, err)
	}
	close(goOn)
	if v := <-dropped; v != 7 {
		t.Errorf("dropped %d", v)
	}
	if v, err := Call(t.Context(), Own(), "coming", func(v int) { dropped <- v }, late); v != 7 || err != nil || len(dropped) > 0 {
		t.Errorf("%d, %v, %d dropped", v, err, len(dropped))
	}
}

// TestOverdueCallsAreBoundedPerAccount asks a file system that never answers, on one account.
func TestOverdueCallsAreBoundedPerAccount(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := mkdir(t, hostDir(t, n), "hung")
	f := mountFake(t, n, dir, "s3csi:hung")
	f.hang()
	ask := func(account string, i int) error {
		ctx, cancel := context.WithTimeout(For(t.Context(), account), 20*time.Millisecond)
		defer cancel()
		return n.Do(ctx, fmt.Sprintf("asking %d", i), func() error {
			var st unix.Statfs_t
			return unix.Statfs(dir, &st)
		})
	}
	for i := 0; n.Overdue() < maxOverdueEach; i++ { // on a busy machine the time may be over before a call is started
		if err := ask("pod a", i); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	refused := false
	for i := range maxOverdueEach {
		err := ask("pod a", i)
		refused = refused || fault.Is(err, fault.Exhausted)
		if !fault.Is(err, fault.Exhausted) && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("call %d beyond the bound: %v", i, err)
		}
	}
	if n.Overdue() != maxOverdueEach || !refused {
		t.Errorf("%d calls are overdue, refused: %t", n.Overdue(), refused)
	}
	if err := ask("pod b", 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another account: %v", err)
	}
	if err := n.Do(within(t, 10*time.Second), "working", func() error { return nil }); err != nil {
		t.Errorf("without an account: %v", err)
	}
	f.exit()
	for n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
	if err := n.Do(For(within(t, 10*time.Second), "pod a"), "working", func() error { return nil }); err != nil {
		t.Errorf("after its end: %v", err)
	}
}

// TestUnresponsivePodDelaysNoOtherPod has a pod whose mounts are behind a file system of its own that never answers.
func TestUnresponsivePodDelaysNoOtherPod(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	outer := mkdir(t, r.dir, "outer")
	own := mountFake(t, r.n, outer, "s3csi:outer")
	var hide string
	for _, place := range []string{"sub", "real"} {
		hide += fmt.Sprintf("mount --bind %s %s/%s && ", target, outer, place)
	}
	r.container("s3csitest-pod-hung", "umount "+r.source+" && "+hide)
	pod := r.container("s3csitest-pod-well", "umount "+r.source+" && umount "+outer+" && ")
	own.pause()
	t.Cleanup(own.exit)
	refused := false
	for range maxOverdueEach + 2 { // each waits for one of them
		r.restart()
		s := r.swap()
		s.Bound = 250 * time.Millisecond
		swapped, err := r.n.SwapInOtherNamespaces(within(t, 20*time.Second), s, ofPod())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range swapped {
			refused = refused || fault.Is(s.Err, fault.Exhausted)
		}
		r.alive(pod, target)
	}
	if got := r.n.Overdue(); got > maxOverdueEach || !refused {
		t.Errorf("%d calls are overdue, refused: %t", got, refused)
	}
	own.exit()
	for r.n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
}
