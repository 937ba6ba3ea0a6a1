package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// The backends: that of the volumes that something is done to can be moved without the others'.
const (
	stays = "default"
	moves = "victim"
)

// hangTimeout is --hang-timeout: short, but not so short that a busy machine looks like a hang.
const hangTimeout = 5 * time.Second

// testNode is a node on which one scenario of the matrix after the other runs. Its driver stops where it is told to; a volume that
// nothing is done to is in use all the time.
type testNode struct {
	*rig.Rig
	server        *rigtest.Server
	points        string // directory of the failpoints
	config        string // file
	flags         []string
	moves         int
	driver        atomic.Pointer[rig.Driver]
	starting      chan started // a driver that is held before it is ready
	controlVolume *controlVolume
	base          snapshot // with nothing but the control volume
}

// newTestNode makes a test node, for scenarios of a test whose end is the test node's.
func newTestNode(t, whole *testing.T, server *rigtest.Server) *testNode {
	t.Helper()
	r, err := rig.New(rig.S3{Endpoint: server.Endpoint(), Region: server.Region(), Keys: server.Process.Keys()})
	if err != nil {
		t.Fatal(err)
	}
	whole.Cleanup(func() {
		if err := r.Close(); err != nil {
			whole.Errorf("cleaning up: %v", err)
		}
	})
	l := &testNode{Rig: r, server: server, points: filepath.Join(r.Dir, "points"), config: filepath.Join(r.Dir, "config.yaml")}
	if r.Program, err = r.InstallDriver(filepath.Join(rigtest.Bin(t), "test", "failpoints")); err != nil {
		t.Fatalf("the driver that can be held (make test-parts builds it): %v", err)
	}
	r.Wrapper = []string{"env", "S3CSI_FAILPOINTS=" + l.points}
	if err := os.Mkdir(l.points, 0o755); err != nil {
		t.Fatal(err)
	}
	l.moveBackend(t)
	l.drive(t)
	l.controlVolume = publishControl(t, l)
	l.restart(t) // so that nothing is known of its start, as after every scenario
	l.base = l.look()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		now := l.look()
		l.base = l.base.smaller(now) // what belongs to the start goes
		l.base.descriptors = now.descriptors
	}
	for range 20 { // connections to helpers are made anew now and then
		if now := descriptors(l.driver.Load().PID()); len(now) > len(l.base.descriptors) {
			l.base.descriptors = now
		}
		time.Sleep(10 * time.Millisecond)
	}
	return l
}

// moveBackend writes the config file, in which the moving backend is at the server's other name.
func (l *testNode) moveBackend(t *testing.T) {
	t.Helper()
	l.moves++
	moved := []string{"127.0.0.1", "localhost"}[l.moves%2]
	u, err := url.Parse(l.server.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	text.WriteString("backends:\n")
	for name, host := range map[string]string{stays: u.Hostname(), moves: moved} {
		fmt.Fprintf(&text, "  %s:\n    endpoint: http://%s:%s\n    region: %s\n    addressing: path\n", name, host, u.Port(), l.server.Region())
	}
	if err := errors.Join(os.WriteFile(l.config+".new", []byte(text.String()), 0o644), os.Rename(l.config+".new", l.config)); err != nil {
		t.Fatal(err)
	}
}

// started is how a driver's start ended.
type started struct {
	driver *rig.Driver
	err    error
}

// drive starts a driver; the previous one must be gone.
func (l *testNode) drive(t *testing.T) {
	t.Helper()
	l.driveLater(t)
	l.driveNow(t)
}

// driveLater is drive without waiting, for a driver that is held before it is ready.
func (l *testNode) driveLater(t *testing.T) {
	t.Helper()
	flags := append([]string{"--default-client=" + rclone, "--config=" + l.config, fmt.Sprintf("--hang-timeout=%s", hangTimeout)}, l.flags...)
	ctx := context.WithoutCancel(t.Context())
	l.starting = make(chan started, 1)
	go func(done chan<- started) {
		d, err := l.Start(ctx, "node", flags...)
		done <- started{d, err}
	}(l.starting)
}

// driveNow waits for the driver that is being started, if one is.
func (l *testNode) driveNow(t *testing.T) {
	t.Helper()
	if l.starting == nil {
		return
	}
	s := <-l.starting
	l.starting = nil
	if s.err != nil {
		text := s.err.Error()
		t.Fatalf("%s", text[max(0, len(text)-10000):])
	}
	l.driver.Store(s.driver)
}

// crash kills the driver.
func (l *testNode) crash(t *testing.T) {
	t.Helper()
	if l.starting == nil {
		l.driver.Load().Kill()
		return
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if b, _ := os.ReadFile(file); strings.HasPrefix(string(b), l.Program+"\x00") && strings.Contains(string(b), "\x00--state-dir="+l.State+"\x00") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	if s := <-l.starting; s.err == nil {
		t.Fatal("the driver that was to be killed is ready")
	}
	l.starting = nil
}

// restart kills the driver as a crash does and starts another, which is held nowhere.
func (l *testNode) restart(t *testing.T) {
	t.Helper()
	l.crash(t)
	l.release()
	l.drive(t)
}

// hold holds the driver at a step.
func (l *testNode) hold(t *testing.T, step string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(l.points, "hold-"+step), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// held tells whether the driver is held at a step.
func (l *testNode) held(step string) bool {
	_, err := os.Lstat(filepath.Join(l.points, "at-"+step))
	return err == nil
}

// release lets the driver go on.
func (l *testNode) release() {
	entries, _ := os.ReadDir(l.points)
	for _, prefix := range []string{"hold-", "at-"} {
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), prefix) {
				_ = os.Remove(filepath.Join(l.points, e.Name()))
			}
		}
	}
}

// processes are those of all mounts but the control volume; "" is any name.
func (l *testNode) processes(name string) []rig.Process {
	return slices.DeleteFunc(l.Running(name), func(p rig.Process) bool { return l.controlVolume != nil && p.UID == l.controlVolume.uid })
}

func isZombie(pid int) bool {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z")
}

// snapshot is what there is on a node.
type snapshot struct {
	files, mounts, processes, units []string
	descriptors                     []string // of the driver, without connections to S3, which come and go
}

// look takes a snapshot.
func (l *testNode) look() snapshot {
	s := snapshot{descriptors: descriptors(l.driver.Load().PID())}
	for _, dir := range []string{l.State, l.Cache, filepath.Join(l.Dir, "targets")} {
		_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it goes while we look
			}
			if path == filepath.Join(l.State, "fusectl") {
				return fs.SkipDir // made when it is first needed
			}
			s.files = append(s.files, path)
			own := l.controlVolume != nil && (filepath.Base(path) == l.controlVolume.mount || path == l.controlVolume.target)
			if d.IsDir() && (own || filepath.Dir(path) == filepath.Join(l.State, "sources") || d.Name() == "mount") {
				return fs.SkipDir
			}
			return nil
		})
	}
	all, _ := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Source, "s3csi:") || !strings.HasPrefix(m.Mountpoint, l.Dir+"/") && !strings.HasPrefix(m.Mountpoint, l.State+"/"), false
	})
	for _, m := range all {
		s.mounts = append(s.mounts, m.Mountpoint+" of "+m.Source)
	}
	s.processes = l.Processes()
	s.units = l.units()
	return s
}

// smaller is what is in both.
func (s snapshot) smaller(o snapshot) snapshot {
	both := func(a, b []string) []string {
		rest := slices.Clone(b)
		return slices.DeleteFunc(slices.Clone(a), func(x string) bool {
			i := slices.Index(rest, x)
			if i >= 0 {
				rest = slices.Delete(rest, i, i+1)
			}
			return i < 0
		})
	}
	return snapshot{both(s.files, o.files), both(s.mounts, o.mounts), both(s.processes, o.processes), both(s.units, o.units), both(s.descriptors, o.descriptors)}
}

// beyond lists what is in s and not in base.
func (s snapshot) beyond(base snapshot) []string {
	var more []string
	for _, part := range []struct {
		what      string
		now, then []string
	}{{"file", s.files, base.files}, {"mount", s.mounts, base.mounts}, {"process", s.processes, base.processes}, {"unit", s.units, base.units}, {"descriptor", s.descriptors, base.descriptors}} {
		rest := slices.Clone(part.then)
		for _, x := range part.now {
			if i := slices.Index(rest, x); i >= 0 {
				rest = slices.Delete(rest, i, i+1)
			} else {
				more = append(more, part.what+" "+x)
			}
		}
	}
	return more
}

// descriptors are those that a process has open, by what they are.
func descriptors(pid int) []string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	internet := map[string]bool{}
	for _, table := range []string{"tcp", "tcp6"} {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 9 {
				internet["socket:["+f[9]+"]"] = true
			}
		}
	}
	entries, _ := os.ReadDir(dir)
	var all []string
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || internet[to] {
			continue
		}
		kind, _, _ := strings.Cut(to, ":[")
		if strings.HasPrefix(to, "anon_inode:") {
			kind = to
		}
		kind = regexp.MustCompile(`csi-[0-9]+`).ReplaceAllString(kind, "csi") // each driver's socket has a number
		all = append(all, kind)
	}
	slices.Sort(all)
	return all
}
