package upgrade

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const limit = time.Minute

// The keys of kubelet's information on pods, which is in the records of publications.
const (
	podNamespaceKey = "csi.storage.k8s.io/pod.namespace"
	podNameKey      = "csi.storage.k8s.io/pod.name"
)

// programs are the names of the clients' programs.
var programs = rig.Programs()

// env is a node that has two versions of the driver.
type env struct {
	*rigtest.Node
	*rig.Driver
	t            *testing.T
	client       string
	older, newer string // the drivers' programs
	volume       *csi.Volume
}

func TestMain(m *testing.M) { os.Exit(rigtest.Main(m)) }

// eachClient runs a test for each client.
func eachClient(t *testing.T, test func(t *testing.T, e *env)) {
	for client := range programs {
		t.Run(client, func(t *testing.T) {
			rigtest.NeedClient(t, client)
			bin := rigtest.Bin(t)
			e := &env{t: t, Node: rigtest.New(t), client: client, volume: rigtest.Static("kept", client, podNamespaceKey, "team-a", podNameKey, "web-0")}
			older, err := e.InstallDriver(filepath.Join(bin, "test", "old"))
			if errors.Is(err, fs.ErrNotExist) {
				t.Skip("needs an older driver: make test-parts builds it")
			}
			if err != nil {
				t.Fatal(err)
			}
			e.older, e.newer = older, e.Program
			test(t, e)
		})
	}
}

// drive starts the driver of that program.
func (e *env) drive(program string, flags ...string) {
	e.t.Helper()
	e.Program = program
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

func (e *env) await(what string, is func() bool) {
	e.t.Helper()
	rigtest.Await(e.t, 20*time.Second, what, is)
}

// killClient kills the only client as a crash does, and waits until it is gone.
func (e *env) killClient() {
	e.t.Helper()
	clients := e.Running(programs[e.client])
	if len(clients) != 1 {
		e.t.Fatalf("the clients are %v, want one", clients)
	}
	rigtest.Kill(e.t, clients...)
}

// helpers are those that were started from the running driver's programs.
func (e *env) helpers() (all []rig.Process) {
	e.t.Helper()
	for _, p := range e.Running("s3-csi-helper") {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", p.PID))
		if err != nil {
			e.t.Fatal(err)
		}
		own := filepath.Dir(exe) == filepath.Dir(e.Program)
		if e.Launcher == rig.LauncherSystemd { // each version is installed in a directory of its own
			own = strings.HasPrefix(filepath.Base(filepath.Dir(exe)), "older-") == (e.Program == e.older)
		}
		if own {
			all = append(all, p)
		}
	}
	return all
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
	e.shown(to)
	b := e.publish("b")
	e.reads(filepath.Join(b, "without"), "2")
	if after := e.Processes(); !slices.Equal(before, after) {
		t.Errorf("before %v ran, after it %v: the mount is not shared", before, after)
	}
	e.unpublish(a)
	e.write(filepath.Join(b, "after"), "3")
	e.unpublish(b)
	e.AwaitNothingLeft(e.t, limit)
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
	e.AwaitNothingLeft(e.t, limit)
}

// shown checks that the newer driver's status has the pod, whichever driver recorded it. A republish that meets a reconcile pass leaves that to the
// next one.
func (e *env) shown(driver string) {
	e.t.Helper()
	if driver != e.newer {
		return // an older one may have no status
	}
	e.await("the pod of the mount", func() bool {
		e.publish("a")
		out, err := exec.CommandContext(rigtest.Context(e.t, limit), e.newer, "status", "--state-dir="+e.State, "--output=json").Output()
		if err != nil {
			e.t.Fatal(err)
		}
		var d status.Document
		if err := json.Unmarshal(out, &d); err != nil || len(d.Mounts) != 1 || len(d.Mounts[0].Publications) != 1 {
			e.t.Fatalf("%v: %s", err, out)
		}
		m := d.Mounts[0]
		return m.State == status.Healthy && m.Publications[0].Pod.String() == "team-a/web-0"
	})
}

func TestMountsSurviveAnUpgrade(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) { e.takenOver(e.older, e.newer) })
}

func TestMountsSurviveARollback(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) { e.takenOver(e.newer, e.older) })
}

// A mount of the older driver whose client crashes under the newer one is healed without being published again.
func TestExitedClient_OfAnOlderDriverIsHealed(t *testing.T) {
	eachClient(t, func(_ *testing.T, e *env) {
		e.drive(e.older)
		a := e.publish("a")
		e.write(filepath.Join(a, "file"), "x")
		e.await("the upload", func() bool { return len(e.Keys(e.t, rigtest.Bucket, "kept/file")) > 0 })
		e.Kill()
		e.drive(e.newer)
		for range 2 {
			e.killClient()
			e.await("the mount's recovery", func() bool {
				content, err := os.ReadFile(filepath.Join(a, "file"))
				return err == nil && string(content) == "x"
			})
		}
		e.write(filepath.Join(a, "after"), "y")
		e.unpublish(a)
		e.AwaitNothingLeft(e.t, limit)
		e.stored("after", "y")
	})
}
