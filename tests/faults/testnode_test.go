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

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// The backends: that of the volumes that something is done to can be moved without the others'.
const (
	stays = "default"
	moves = "victim"
)

// hangTimeout is --hang-timeout: short, but not so short that a machine whose disk is busy with a build looks like a hang: there, clients
// whose caches are on it did not answer for more than six seconds.
const hangTimeout = 10 * time.Second

// testNode is a node on which one scenario of the matrix after the other runs. Its driver stops at failpoints; a volume that
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
	base          []string // what there is with nothing but the control volume
	open          []string // what the driver has open then, without connections to S3, which come and go
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
	l.keepSpares(t, false)
	l.moveBackend(t)
	l.drive(t)
	l.controlVolume = publishControl(t, l)
	l.restart(t) // so that nothing is known of its start, as after every scenario
	l.base = l.look()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		l.base = beyond(l.base, beyond(l.base, l.look())) // what belongs to the start goes
		l.open = descriptors(l.driver.Load().PID())
	}
	for range 20 { // connections to helpers are dialed again now and then
		if now := descriptors(l.driver.Load().PID()); len(now) > len(l.open) {
			l.open = now
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

// noSpares is the step at which a driver without spares is held: what starts a helper for a mount is a step, too.
const noSpares = "spare.missing"

// keepSpares has the driver keep spares, or not: then it takes those that it has, and has no other one afterwards.
func (l *testNode) keepSpares(t *testing.T, keep bool) {
	t.Helper()
	if !keep {
		l.hold(t, noSpares)
		return
	}
	if err := os.Remove(filepath.Join(l.points, "hold-"+noSpares)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

// held reports whether the driver is held at a step.
func (l *testNode) held(step string) bool {
	_, err := os.Lstat(filepath.Join(l.points, "at-"+step))
	return err == nil
}

// release lets the driver go on.
func (l *testNode) release() {
	entries, _ := os.ReadDir(l.points)
	for _, prefix := range []string{"hold-", "at-"} {
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), prefix) && !strings.HasSuffix(e.Name(), "-"+noSpares) {
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

// look lists what there is on the node.
func (l *testNode) look() []string {
	return append(l.lookCheaply(), l.UnitTraces()...)
}

// lookCheaply is look without the units, for which it would ask systemd.
func (l *testNode) lookCheaply() []string {
	all := l.Traces()
	for _, dir := range []string{l.State, filepath.Join(l.Dir, "targets")} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if e.Name() != "fusectl" { // made when it is first needed
				all = append(all, "file "+filepath.Join(dir, e.Name()))
			}
		}
	}
	return all
}

// left lists what there is beyond the control volume. While there is something, it does not look for what takes longer to find.
func (l *testNode) left() []string {
	if left := beyond(l.lookCheaply(), l.base); len(left) > 0 {
		return left
	}
	return append(beyond(l.UnitTraces(), l.base), beyond(descriptors(l.driver.Load().PID()), l.open)...)
}

// beyond is what is in now and not in then, as often as it is.
func beyond(now, then []string) (more []string) {
	rest := slices.Clone(then)
	for _, x := range now {
		if i := slices.Index(rest, x); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			more = append(more, x)
		}
	}
	return more
}

// descriptors are those that a process has open, by what they are, without connections over IP.
func descriptors(pid int) []string {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(process)
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir)
	var all []string
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		number, _ := strconv.Atoi(e.Name())
		if err != nil || strings.HasPrefix(to, "socket:") && overIP(process, number) {
			continue
		}
		kind, _, _ := strings.Cut(to, ":[")
		if strings.HasPrefix(to, "anon_inode:") {
			kind = to
		}
		kind = regexp.MustCompile(`csi-[0-9]+`).ReplaceAllString(kind, "csi") // each driver's socket has a number
		all = append(all, "descriptor "+kind)
	}
	slices.Sort(all)
	return all
}

// overIP reports whether a descriptor of a process is a socket of the internet families. The kernel's tables of these sockets take
// longer to read than all the rest.
func overIP(process, number int) bool {
	fd, err := unix.PidfdGetfd(process, number, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	return err == nil && (family == unix.AF_INET || family == unix.AF_INET6)
}
