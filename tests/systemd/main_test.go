package systemd_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// Programs on the host.
const (
	programs      = "/opt/s3-csi/test"
	helperProgram = programs + "/s3-csi-helper"
	standIn       = programs + "/standin"
	rclone        = built + "/s3-csi-rclone"
	// built is the directory of what make has built.
	built = "/opt/s3csi-built"
)

func TestMain(m *testing.M) {
	os.Exit(isolate.Main(func() int { return systemd.Main(m, install) }))
}

// install builds the helper and a stand-in for its client, and takes what else is there.
func install(dir string) (map[string]string, error) {
	const helper = "github.com/s3-csi/s3-csi-driver/cmd/s3-csi-helper"
	build := exec.CommandContext(context.Background(), "go", "build", "-trimpath", "-o", dir+"/", helper, "./standin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	files := map[string]string{}
	for _, program := range []string{helperProgram, standIn} {
		files[program] = filepath.Join(dir, filepath.Base(program))
	}
	bin := os.Getenv(rig.EnvBin)
	for _, name := range []string{"s3-csi-driver", "s3-csi-fuse-starter", "s3-csi-fusermount", "s3-csi-helper", "s3-csi-rclone", "test/s3server"} {
		if path := filepath.Join(bin, name); bin != "" && exists(path) {
			files[filepath.Join(built, name)] = path
		}
	}
	return files, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Every unit of these tests has a name and a uid that no other has.
const firstUID = 2_200_000_000

func testUIDs() launcher.UIDRange { return launcher.UIDRange{First: firstUID, Last: firstUID + 10000} }

var units atomic.Uint32

var keys = credentials.Keys{AccessKeyID: "AKIDCANARY", SecretAccessKey: "canary-secret-key", SessionToken: "canary-session-token"}

// unit is a helper to start, or one that was.
type unit struct {
	launcher.Unit
	t    *testing.T
	l    starter           // launches it
	s    *launcher.Systemd // the same, if it is one
	dir  string            // its state directory and socket are in there
	peer *helper.Peer
}

// starter is what both launchers have.
type starter interface {
	Start(ctx context.Context, u launcher.Unit) error
	Kill(ctx context.Context, uid uint32) error
	Alive(ctx context.Context, uid uint32) (bool, error)
}

// newProcesses is a launcher of plain processes on the host.
func newProcesses(t *testing.T) *launcher.Process {
	t.Helper()
	systemd.Host(t)
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	return launcher.NewProcess(ns, helperProgram, launcher.Options{UIDs: testUIDs()})
}

// newLauncher is a launcher on the host.
func newLauncher(t *testing.T, o launcher.Options) *launcher.Systemd {
	t.Helper()
	systemd.Host(t)
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	o.UIDs = testUIDs()
	s, err := launcher.NewSystemd(ns, helperProgram, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// prepare makes everything but the helper, and at the test's end sees that nothing is left of it.
func prepare(t *testing.T, l starter) *unit {
	t.Helper()
	n := units.Add(1)
	uid := firstUID + n
	s, _ := l.(*launcher.Systemd)
	u := &unit{t: t, l: l, s: s, dir: fmt.Sprintf("/run/s3csi-test-%d", n)}
	u.Unit = launcher.Unit{
		Name: fmt.Sprintf("test%d-1", n), Description: "S3 volume default:bucket/test/ (stand-in)", UID: uid, GID: uid,
		StateDir: filepath.Join(u.dir, "state"), CacheDir: fmt.Sprintf("/var/cache/s3csi-test-%d", n),
	}
	for _, err := range []error{
		os.Mkdir(u.dir, 0o711), os.Mkdir(u.StateDir, 0o700), os.MkdirAll(u.CacheDir, 0o700),
		os.Chown(u.StateDir, int(uid), int(uid)), os.Chown(u.CacheDir, int(uid), int(uid)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	u.peer = helper.NewPeer(helper.Dial(u.socket()))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the journal of %s:\n%s", u.name(), u.journal())
		}
		if err := l.Kill(bounded(t), uid); err != nil {
			t.Error(err)
		}
		u.mustBeGone()
		_, _ = os.RemoveAll(u.dir), os.RemoveAll(u.CacheDir)
	})
	return u
}

func (u *unit) socket() string { return filepath.Join(u.dir, "sock") }
func (u *unit) name() string   { return "s3csi-" + u.Name + ".service" }

// launch starts the unit on a new socket.
func (u *unit) launch(ctx context.Context) error {
	_ = os.Remove(u.socket())
	socket, err := helper.Listen(u.socket())
	if err != nil {
		return err
	}
	defer socket.Close()
	u.Socket = socket
	return u.l.Start(ctx, u.Unit)
}

// start starts a unit.
func start(t *testing.T, l starter) *unit {
	t.Helper()
	u := prepare(t, l)
	u.mustLaunch()
	return u
}

func (u *unit) mustLaunch() {
	u.t.Helper()
	if err := u.launch(bounded(u.t)); err != nil {
		u.t.Fatal(err)
	}
}

func (u *unit) hello() helper.Status {
	u.t.Helper()
	s, err := u.peer.Status(bounded(u.t))
	if err != nil {
		u.t.Fatal(err)
	}
	return s
}

// run has the helper run a stand-in.
func (u *unit) run(steps ...string) helper.Status {
	u.t.Helper()
	return u.runWith(client.Command{}, steps...)
}

// runWith is run for a stand-in that needs what the command has.
func (u *unit) runWith(c client.Command, steps ...string) helper.Status {
	u.t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		u.t.Skipf("needs /dev/fuse: %v", err)
	}
	defer fuse.Close()
	s, err := u.peer.Start(bounded(u.t), helper.StartRequest{
		Client: client.Default, Keys: keys,
		Command: client.Command{Argv: append([]string{standIn}, steps...), Ports: c.Ports, Files: c.Files},
	}, fuse)
	if err != nil {
		u.t.Fatal(err)
	}
	return s
}

// said waits for what the stand-in says of a step.
func (u *unit) said(step string) string {
	u.t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, line := range u.hello().Tail {
			if said, ok := strings.CutPrefix(line, step+":"); ok {
				return strings.TrimSpace(said)
			}
		}
	}
	u.t.Fatalf("the stand-in never said how step %q went", step)
	return ""
}

func (u *unit) journal() string {
	out, _ := exec.Command("journalctl", "--no-pager", "-o", "cat", "-u", u.name()).CombinedOutput()
	return string(out)
}

// show is a property as systemctl shows it.
func show(t *testing.T, unit, property string) string {
	t.Helper()
	return systemctl(t, "show", "--value", "-p", property, unit)
}

func systemctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := rig.Systemctl(args...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// mustBeGone fails the test if anything of the unit is left on the host.
func (u *unit) mustBeGone() {
	u.t.Helper()
	if loaded := show(u.t, u.name(), "LoadState"); loaded != "not-found" {
		u.t.Errorf("unit %s is %s", u.name(), loaded)
	}
	if alive, err := u.l.Alive(bounded(u.t), u.UID); alive || err != nil {
		u.t.Errorf("processes of uid %d: %v %v", u.UID, alive, err)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left, err := filepath.Glob("/sys/fs/cgroup/*/system.slice/system-s3csi.slice/" + u.name())
		v2, _ := filepath.Glob("/sys/fs/cgroup/system.slice/system-s3csi.slice/" + u.name())
		if left = append(left, v2...); len(left) == 0 && err == nil {
			return
		}
		if time.Now().After(end) {
			u.t.Errorf("cgroups are left: %v %v", left, err)
			return
		}
	}
}

func kill(t *testing.T, pid int, sig unix.Signal) {
	t.Helper()
	if err := unix.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	rigtest.Await(t, 20*time.Second, what, is)
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}
