package upgrade

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

const limit = time.Minute

// programs are the names of the clients' programs. mount-s3 is the strict stand-in.
var programs = map[string]string{"rclone": "s3-csi-rclone", "mountpoint-s3": "mount-s3"}

// env is a node that has two versions of the driver.
type env struct {
	*rigtest.Node
	*rig.Driver
	t            *testing.T
	client       string
	older, newer string // the drivers' programs
	launcher     string // the newer driver's
	hostDir      string
	volume       *csi.Volume
}

func TestMain(m *testing.M) { os.Exit(rigtest.Main(m)) }

// eachClient runs a test for each client.
func eachClient(t *testing.T, test func(t *testing.T, e *env)) {
	for client, program := range programs {
		t.Run(client, func(t *testing.T) {
			bin := rigtest.Bin(t)
			e := &env{t: t, Node: rigtest.New(t), client: client, volume: &csi.Volume{
				VolumeId: "kept", VolumeContext: map[string]string{"bucketName": rigtest.Bucket, "prefix": "kept/", "client": client},
			}}
			if _, err := os.Stat(filepath.Join(e.Clients, program)); err != nil {
				t.Skipf("needs the program of %s: make test-parts builds it", client)
			}
			older, err := e.InstallDriver(filepath.Join(bin, "test", "old"))
			if errors.Is(err, fs.ErrNotExist) {
				t.Skip("needs an older driver: make test-parts builds it")
			}
			if err != nil {
				t.Fatal(err)
			}
			e.older, e.newer, e.launcher = older, e.Program, e.Launcher
			e.hostDir = e.HostDir
			test(t, e)
		})
	}
}

// drive starts the driver of that program. The older one knows no other launcher than processes.
func (e *env) drive(program string, flags ...string) {
	e.t.Helper()
	e.Program, e.Launcher, e.HostDir, e.Isolation = program, e.launcher, e.hostDir, rig.IsolationFlags()
	if program == e.older {
		e.Launcher, e.HostDir, e.Isolation = rig.LauncherProcess, "", nil
	}
	e.Driver = e.Drive(e.t, "node", flags...)
}

// publish publishes the volume at the target of that name.
func (e *env) publish(name string) (target string) {
	e.t.Helper()
	target = e.Target(name)
	rigtest.Publish(e.t, e.Driver, e.volume, target)
	return target
}

func (e *env) unpublish(target string) {
	e.t.Helper()
	rigtest.Unpublish(e.t, e.Driver, e.volume, target)
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		e.t.Errorf("the target %s is still there: %v", target, err)
	}
}

// await waits until something is so.
func (e *env) await(what string, is func() bool) {
	e.t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			e.t.Fatalf("waited in vain for %s", what)
		}
	}
}

// pids are those of the mounts' processes of a name.
func (e *env) pids(name string) (pids []int) {
	for _, line := range e.Processes() {
		if comm, rest, _ := strings.Cut(line, ", pid "); comm == name {
			var pid int
			if _, err := fmt.Sscanf(rest, "%d,", &pid); err != nil {
				e.t.Fatalf("process %q: %v", line, err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}

// killClient kills the only client as a crash does, and waits until it is gone.
func (e *env) killClient() {
	e.t.Helper()
	pids := e.pids(programs[e.client])
	if len(pids) != 1 {
		e.t.Fatalf("the clients are %v, want one", pids)
	}
	if err := unix.Kill(pids[0], unix.SIGKILL); err != nil {
		e.t.Fatal(err)
	}
	e.await("the client's end", func() bool { return rig.Ended(pids[0]) })
}

// helpers are those that were started from the running driver's programs.
func (e *env) helpers() (pids []int) {
	e.t.Helper()
	dir := filepath.Dir(e.Program)
	if e.Launcher == rig.LauncherSystemd {
		dir = filepath.Dir(e.ClientProgram(e.t, "s3-csi-helper"))
	}
	for _, pid := range e.pids("s3-csi-helper") {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil {
			e.t.Fatal(err)
		}
		if filepath.Dir(exe) == dir {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (e *env) write(path, content string) {
	e.t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) reads(path, want string) {
	e.t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		e.t.Errorf("%s reads %q, %v; want %q", path, got, err, want)
	}
}

func (e *env) stored(name, want string) {
	e.t.Helper()
	if got := e.Object(e.t, rigtest.Bucket, "kept/"+name); got != want {
		e.t.Errorf("the object %s is %q, want %q", name, got, want)
	}
}

// awaitNothingLeft waits until the driver has cleared away what it finds. What the older driver knows nothing of is for the
// newer one, once it is back: see returns.
func (e *env) awaitNothingLeft() {
	e.t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		left := e.Leftovers()
		if e.Program == e.older {
			left = slices.DeleteFunc(left, func(what string) bool {
				return strings.HasPrefix(what, "unit ") || strings.Contains(what, filepath.Join(e.State, "scratch")+"/") || strings.HasPrefix(what, "file "+e.Cache+"/") && strings.HasSuffix(what, ".json")
			})
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			e.t.Errorf("left behind: %s", strings.Join(left, "; "))
			return
		}
	}
}

// returns brings the newer driver back after a rollback: it clears away what the older one could not.
func (e *env) returns() {
	e.t.Helper()
	e.Kill()
	e.drive(e.newer)
	e.awaitNothingLeft()
	a := e.publish("returned")
	e.write(filepath.Join(a, "returned"), "z")
	e.unpublish(a)
	e.awaitNothingLeft()
	e.stored("returned", "z")
}

// takenOver has one version make a mount, and everything that follows done by the other one.
func (e *env) takenOver(from, to string) {
	t := e.t
	e.drive(from)
	a := e.publish("a")
	e.write(filepath.Join(a, "before"), "1")
	held, err := os.Open(filepath.Join(a, "before"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	before := e.Processes()
	if len(e.helpers()) != 1 {
		t.Fatalf("the mount has no helper of its driver's version: %v", before)
	}

	e.Kill()
	e.write(filepath.Join(a, "without"), "2")
	e.drive(to)
	if b := make([]byte, 1); func() error { _, err := held.ReadAt(b, 0); return err }() != nil || b[0] != '1' {
		t.Error("the file that was open meanwhile cannot be read")
	}
	held.Close()
	stats, err := e.NodeGetVolumeStats(rigtest.Context(t, limit), &csi.NodeGetVolumeStatsRequest{VolumeId: e.volume.GetVolumeId(), VolumePath: a})
	if err != nil || len(stats.GetUsage()) == 0 {
		t.Errorf("statistics: %v, %v", stats, err)
	}
	e.publish("a") // as a CO's retry does
	b := e.publish("b")
	e.reads(filepath.Join(b, "without"), "2")
	if after := e.Processes(); !slices.Equal(before, after) {
		t.Errorf("before %v ran, after it %v: the mount is not shared", before, after)
	}
	e.unpublish(a)
	e.write(filepath.Join(b, "after"), "3")
	e.unpublish(b)
	e.awaitNothingLeft()
	for name, content := range map[string]string{"before": "1", "without": "2", "after": "3"} {
		e.stored(name, content)
	}

	// A mount of its own is made of its own programs.
	c := e.publish("c")
	e.reads(filepath.Join(c, "after"), "3")
	if len(e.helpers()) != 1 {
		t.Errorf("the new mount's helper is none of the new driver's: %v", e.Processes())
	}
	e.unpublish(c)
	e.awaitNothingLeft()
}

func TestMountsSurviveAnUpgrade(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) { e.takenOver(e.older, e.newer) })
}

func TestMountsSurviveARollback(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) {
		e.takenOver(e.newer, e.older)
		e.returns()
	})
}

// deadClient has one version make a mount whose client dies under the other one.
func (e *env) deadClient(from, to string) {
	e.drive(from)
	a := e.publish("a")
	e.write(filepath.Join(a, "file"), "x")
	e.await("the upload", func() bool { return len(e.Keys(e.t, rigtest.Bucket, "kept/file")) > 0 })
	e.Kill()
	e.drive(to)
	e.killClient()
	e.publish("a")
	e.reads(filepath.Join(a, "file"), "x")
	e.killClient()
	e.unpublish(a)
	e.awaitNothingLeft()
}

func TestADeadClientAfterAnUpgrade(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) { e.deadClient(e.older, e.newer) })
}

func TestADeadClientAfterARollback(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) {
		e.deadClient(e.newer, e.older)
		e.returns()
	})
}
