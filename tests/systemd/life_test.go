package systemd_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

func TestHelperThatIsKilledIsListedAndReplaced(t *testing.T) {
	u := start(t, newLauncher(t, launcher.Options{}))
	s := u.run("wait:/nowhere")
	list, err := u.s.List(bounded(t))
	if err != nil || len(list) != 1 || list[0] != (launcher.UnitInfo{Name: u.Name, UID: u.UID}) {
		t.Errorf("the list: %+v %v", list, err)
	}
	if err := u.launch(bounded(t)); !fault.Is(err, fault.Exists) {
		t.Errorf("starting a unit that lives: %v", err)
	}
	kill(t, s.PID, unix.SIGKILL)
	await(t, "the unit's end", func() bool { return show(t, u.name(), "ActiveState") == "failed" })
	if result := show(t, u.name(), "Result"); result != "signal" {
		t.Errorf("systemd's result is %s", result)
	}
	if alive, err := u.s.Alive(bounded(t), u.UID); alive || err != nil {
		t.Errorf("the client outlived its helper and unit: %v", err)
	}
	if list, err := u.s.List(bounded(t)); err != nil || len(list) != 1 {
		t.Errorf("the list: %+v %v", list, err)
	}
	u.mustLaunch()
	if again := u.hello(); again.PID == s.PID || again.State != helper.StateIdle {
		t.Errorf("the new helper: %+v", again)
	}
}

func TestKillEndsWhateverTheUnitDoes(t *testing.T) {
	l := newLauncher(t, launcher.Options{})
	for what, prepare := range map[string]func(*unit){
		"idle":           func(*unit) {},
		"with a client":  func(u *unit) { u.run("wait:/nowhere") },
		"stopped helper": func(u *unit) { kill(t, u.hello().PID, unix.SIGSTOP) },
		"failed":         func(u *unit) { kill(t, u.hello().PID, unix.SIGKILL) },
		"about to stop":  func(u *unit) { u.run("wait:/nowhere"); systemctl(t, "stop", "--no-block", u.name()) },
		"gone":           func(u *unit) { _, _ = u.peer.Quit(bounded(t)) },
		"killed before":  func(u *unit) { _ = u.s.Kill(bounded(t), u.UID) },
		"stopped client": func(u *unit) { kill(t, u.run("wait:/nowhere").ClientPID, unix.SIGSTOP) },
	} {
		t.Run(what, func(t *testing.T) {
			neighbour, u := start(t, l), start(t, l)
			prepare(u)
			began := pressure.Now()
			if err := l.Kill(bounded(t), u.UID); err != nil {
				t.Fatal(err)
			}
			if took := began.Since(); took > 5*time.Second {
				t.Errorf("it took %s", took)
			}
			u.mustBeGone()
			neighbour.hello()
		})
	}
}

func TestStopWaitsForTheClientAndOnlyAsksTheHelper(t *testing.T) {
	u := start(t, newLauncher(t, launcher.Options{}))
	u.run("wait:"+u.CacheDir+"/go", "exit:0")
	systemctl(t, "stop", "--no-block", u.name())
	await(t, "the unit to be stopped", func() bool { return show(t, u.name(), "ActiveState") == "deactivating" })
	time.Sleep(300 * time.Millisecond) // whatever ends the client now has come to that by then
	if s := u.hello(); s.State != helper.StateRunning {
		t.Fatalf("the client was not left to finish: %+v", s)
	}
	if state := show(t, u.name(), "ActiveState"); state != "deactivating" {
		t.Errorf("the unit is %s", state)
	}
	if err := os.WriteFile(u.CacheDir+"/go", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	await(t, "the unit's end", func() bool { return show(t, u.name(), "LoadState") == "not-found" })
	u.mustBeGone()
	if list, err := u.s.List(bounded(t)); err != nil || len(list) != 0 {
		t.Errorf("the list: %+v %v", list, err)
	}
	if end, ok, err := helper.ReadEnd(u.StateDir); err != nil || !ok || end.Code != 0 || end.Signal != "" {
		t.Errorf("the client's end: %+v %v %v", end, ok, err)
	}
}

func TestStopIsBounded(t *testing.T) {
	u := start(t, newLauncher(t, launcher.Options{StopTimeout: time.Second}))
	u.run("wait:/nowhere")
	began := pressure.Now()
	systemctl(t, "stop", u.name())
	if took := time.Since(began.Time); took < 900*time.Millisecond || began.Since() > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	if result := show(t, u.name(), "Result"); result != "timeout" {
		t.Errorf("systemd's result is %s", result)
	}
}

func TestFailedStartSaysWhyAndLeavesNothing(t *testing.T) {
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	l := newLauncher(t, launcher.Options{})
	with := func(program string) *launcher.Systemd {
		s, err := launcher.NewSystemd(ns, program, launcher.Options{UIDs: testUIDs()})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	missing := "226 (NAMESPACE" // of a directory
	if l.Sandbox().Landlock > 0 {
		missing = "exit status 1"
	}
	for what, c := range map[string]struct {
		s      *launcher.Systemd
		change func(*unit)
		kind   fault.Kind
		words  string
	}{
		"no program":           {with("/opt/nothing"), func(*unit) {}, fault.Precondition, "203 (EXEC"},
		"program fails":        {with("/bin/false"), func(*unit) {}, fault.Precondition, "exit status 1"},
		"program that ends":    {with("/bin/true"), func(*unit) {}, fault.Precondition, "could not start /bin/true"},
		"no state directory":   {l, func(u *unit) { u.StateDir = "/nowhere" }, fault.Precondition, missing},
		"no cache directory":   {l, func(u *unit) { u.CacheDir = "/nowhere" }, fault.Precondition, missing},
		"uid of nobody":        {l, func(u *unit) { u.Unit.UID = 65534 }, fault.Invalid, "65534"},
		"root's group":         {l, func(u *unit) { u.GID = 0 }, fault.Invalid, "gid 0"},
		"name with a slash":    {l, func(u *unit) { u.Name = "a/b" }, fault.Invalid, "a/b"},
		"relative cache":       {l, func(u *unit) { u.CacheDir = "cache" }, fault.Unknown, "cache"},
		"memory for no client": {l, func(u *unit) { u.Limits.MemoryMax = 4096 }, fault.Invalid, "memory limit"},
	} {
		t.Run(what, func(t *testing.T) {
			u := prepare(t, c.s)
			uid, name, state, cache := u.Unit.UID, u.Name, u.StateDir, u.CacheDir
			c.change(u)
			err := u.launch(bounded(t))
			if fault.KindOf(err) != c.kind || err == nil || !strings.Contains(err.Error(), c.words) {
				t.Errorf("%v (kind %d), want kind %d and %q", err, fault.KindOf(err), c.kind, c.words)
			}
			u.Unit.UID, u.Name, u.StateDir, u.CacheDir = uid, name, state, cache
			u.mustBeGone()
		})
	}
}

func TestForeignUnit_IsLeftAlone(t *testing.T) {
	l := newLauncher(t, launcher.Options{})
	u := prepare(t, l)
	out, err := exec.Command("systemd-run", "--unit="+u.name(), "--slice=system.slice", "/bin/sleep", "1000").CombinedOutput()
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	defer systemctl(t, "stop", u.name())
	if err := u.launch(bounded(t)); !fault.Is(err, fault.Exists) {
		t.Errorf("start: %v", err)
	}
	if err := l.Kill(bounded(t), u.UID); err != nil {
		t.Errorf("kill: %v", err)
	}
	if list, err := l.List(bounded(t)); err != nil || len(list) != 0 {
		t.Errorf("list: %+v %v", list, err)
	}
	if state := show(t, u.name(), "ActiveState"); state != "active" {
		t.Errorf("it is %s", state)
	}
}

func TestStartIsBoundedByItsContext(t *testing.T) {
	u := prepare(t, newLauncher(t, launcher.Options{}))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := u.launch(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	// prepare's cleaning up kills what came to life all the same, and finds nothing left.
}

func TestManyAtOnce(t *testing.T) {
	l := newLauncher(t, launcher.Options{})
	const many = 50
	var all []*unit
	for range many {
		all = append(all, prepare(t, l))
	}
	began := time.Now()
	var wg sync.WaitGroup
	for _, u := range all {
		wg.Go(func() {
			if err := u.launch(bounded(t)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d units in %s", many, time.Since(began))
	for _, u := range all {
		if s := u.hello(); fmt.Sprint(s.PID) != show(t, u.name(), "MainPID") {
			t.Errorf("%s is not what it should be", u.Name)
		}
	}
}

// connections counts those that a launcher makes.
type connections struct {
	launcher.Doer
	made atomic.Int32
}

func (c *connections) Do(ctx context.Context, what string, fn func() error) error {
	if strings.HasPrefix(what, "connecting to ") {
		c.made.Add(1)
	}
	return c.Doer.Do(ctx, what, fn)
}

// Calls that follow each other use the same connection, one that systemd has closed meanwhile is replaced.
func TestCallsShareAConnection(t *testing.T) {
	systemd.Host(t)
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	c := &connections{Doer: ns}
	l, err := launcher.NewSystemd(c, helperProgram, launcher.Options{Sockets: []string{private}})
	if err != nil {
		t.Fatal(err)
	}
	const calls = 20
	list := func() {
		t.Helper()
		if _, err := l.List(bounded(t)); err != nil {
			t.Fatal(err)
		}
	}
	for range calls {
		list()
	}
	if made := c.made.Load(); made >= calls { // usually two, but the machine may pause between two calls
		t.Errorf("%d connections for %d calls", made, calls)
	}
	systemctl(t, "daemon-reexec") // which closes those of its own socket
	list()
}

func TestCallsLeaveNothingOpen(t *testing.T) {
	l := newLauncher(t, launcher.Options{})
	u := start(t, l)
	before := goleak.IgnoreCurrent()
	fds := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	open := fds()
	for range 20 {
		if _, err := l.List(bounded(t)); err != nil {
			t.Fatal(err)
		}
		if err := u.launch(bounded(t)); !fault.Is(err, fault.Exists) {
			t.Fatal(err)
		}
	}
	// The last connection is kept for a moment.
	await(t, "the connections to end", func() bool { return goleak.Find(before) == nil })
	await(t, fmt.Sprintf("there to be %d descriptors", open), func() bool { return fds() <= open })
}
