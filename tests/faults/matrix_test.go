package faults

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// testCase is a step of the driver's, and how it gets there.
type testCase struct {
	step, operation string
	clients         []string // nil: each
	// more are the faults beside killDriver: where a helper or a client is there whose end makes a difference.
	more     []fault
	readOnly bool // the whole volume is
	pod      bool // a container runs on it
	asks     bool // the driver waits for systemd there, or is about to ask it: systemd and its bus are restarted there, too
}

var (
	one = []string{rclone}
	two = []string{mountpoint}
)

func matrix() []testCase {
	all := []fault{killHelper, killClient, killAll}
	return []testCase{
		// publish; the clients differ from launch.started on
		{step: "publish.target", operation: "publish", asks: true, clients: one, more: []fault{podGone}},
		{step: "make.directory", operation: "publish", clients: one, more: []fault{podGone}},
		{step: "make.recorded", operation: "publish", clients: one, more: []fault{podGone}},
		{step: "make.scratch", operation: "publish", clients: one, more: []fault{podGone}},
		{step: "make.directories", operation: "publish", clients: one, more: []fault{podGone}},
		{step: "start.allocated", operation: "publish", clients: one, more: []fault{podGone}},
		{step: "launch.listening", operation: "publish", asks: true, clients: one, more: []fault{podGone}},
		{step: "launch.started", operation: "publish", asks: true, more: []fault{podGone, killHelper, killAll}},
		// publish with a helper that was started before, for which the clients make no difference
		{step: "spare.missing", operation: "prepare", clients: one},
		{step: "spare.made", operation: "prepare", asks: true, clients: one},
		{step: "spare.started", operation: "prepare", asks: true, clients: one},
		{step: "spare.taken", operation: "publish prepared", asks: true, clients: one, more: []fault{podGone}},
		{step: "spare.scratch", operation: "publish prepared", clients: one, more: []fault{podGone}},
		{step: "spare.cache", operation: "publish prepared", clients: one, more: []fault{podGone, killHelper}},
		{step: "spare.assigned", operation: "publish prepared", clients: one, more: []fault{podGone, killHelper, killAll}},
		{step: "mount.mounted", operation: "publish", more: []fault{podGone}},
		{step: "start.mounted", operation: "publish", more: []fault{podGone, killHelper}},
		{step: "serve.started", operation: "publish", asks: true, more: append([]fault{podGone}, all...)},
		{step: "serve.proven", operation: "publish", more: append([]fault{podGone}, all...)},
		{step: "serve.delivered", operation: "publish", more: append([]fault{podGone}, all...)},
		{step: "start.serving", operation: "publish", more: append([]fault{podGone}, all...)},
		{step: "write.durable", operation: "publish", clients: one, more: []fault{podGone}},
		{step: "bind.recorded", operation: "publish", more: append([]fault{podGone}, all...)},
		{step: "bind.bound", operation: "publish", asks: true, more: append([]fault{podGone}, all...)},
		{step: "write.temporary", operation: "publish", more: []fault{podGone}},
		{step: "write.temporary", operation: "share", more: []fault{podGone}},
		{step: "bind.recorded", operation: "share", more: []fault{podGone, killClient}},
		{step: "replace.recorded", operation: "replace", more: all},
		// unpublish
		{step: "unpublish.unmounted", operation: "unpublish", asks: true, more: all},
		{step: "unpublish.recorded", operation: "unrecorded", more: []fault{killAll}},
		{step: "write.temporary", operation: "unrecorded"},
		{step: "end.recorded", operation: "unpublish", more: all},
		{step: "drain.told", operation: "unpublish", asks: true, more: []fault{killHelper, killClient}},
		{step: "drain.unmounted", operation: "unpublish"},
		{step: "end.drained", operation: "unpublish", asks: true},
		{step: "end.helper", operation: "unpublish", asks: true},
		{step: "remove.source", operation: "unpublish"},
		{step: "remove.cache", operation: "unpublish"},
		{step: "remove.scratch", operation: "unpublish"},
		{step: "remove.files", operation: "unpublish"},
		{step: "release.ended", operation: "unpublish"},
		{step: "unpublish.released", operation: "unpublish"},
		// linger: the clients differ in what they flush
		{step: "unpublish.unmounted", operation: "linger", clients: one},
		{step: "linger.flushed", operation: "linger", more: all},
		{step: "linger.forgot", operation: "linger secret", clients: one, more: []fault{killClient, killAll}},
		{step: "linger.recorded", operation: "linger", clients: one, more: all},
		{step: "linger.recorded", operation: "linger secret", clients: one},
		{step: "release.ended", operation: "linger", clients: one},
		{step: "linger.joined", operation: "warm", clients: one, more: append([]fault{podGone}, all...)},
		{step: "bind.recorded", operation: "warm", clients: one, more: []fault{podGone}},
		{step: "linger.ending", operation: "linger end", clients: one, asks: true, more: append([]fault{podGone}, all...)},
		{step: "end.drained", operation: "linger end", clients: one, more: []fault{podGone}},
		// heal
		{step: "uphold.dead", operation: "heal", asks: true, more: []fault{killHelper, killAll}},
		{step: "restart.ended", operation: "heal of two"},
		{step: "restart.idle", operation: "heal", asks: true, more: []fault{killHelper, killAll}},
		{step: "restart.idle", operation: "heal of two", more: []fault{killAll}},
		{step: "former.pinned", operation: "heal", pod: true, more: []fault{killHelper, killAll}},
		{step: "restart.cleared", operation: "heal", more: []fault{killHelper}},
		{step: "restart.mounted", operation: "heal", more: []fault{killHelper, killAll}},
		{step: "restart.serving", operation: "heal", more: all},
		{step: "swap.attached", operation: "heal", pod: true, more: []fault{killClient, killAll}},
		{step: "swap.moved", operation: "heal", pod: true},
		{step: "swap.detached", operation: "heal", pod: true, more: []fault{killClient}},
		{step: "heal.host", operation: "heal", pod: true, more: all},
		{step: "heal.containers", operation: "heal", pod: true, more: []fault{killClient}},
		{step: "heal.detached", operation: "heal", pod: true, more: []fault{killClient}},
		// hang
		{step: "hang.found", operation: "hang", asks: true, more: all},
		{step: "hang.aborted", operation: "hang", more: all},
		{step: "restart.idle", operation: "hang"},
		// renew: another mount where the client keeps nothing back, else another client
		{step: "succeed.superseded", operation: "renew", clients: two, more: []fault{killHelper}},
		{step: "succeed.superseded", operation: "renew", clients: one, readOnly: true},
		{step: "succeed.moved", operation: "renew", clients: two, more: []fault{killClient}},
		{step: "succeed.moved", operation: "renew", clients: one, readOnly: true},
		{step: "renew.started", operation: "renew", asks: true, clients: two, more: all},
		{step: "renew.started", operation: "renew", clients: one, readOnly: true},
		{step: "renew.started", operation: "renew unused", clients: two, more: []fault{killNothing}},
		{step: "renew.succeeded", operation: "renew", clients: two, pod: true, more: all},
		{step: "renew.succeeded", operation: "renew", clients: one, readOnly: true},
		{step: "end.drained", operation: "renew", clients: two, more: []fault{killAll}},
		{step: "restart.killed", operation: "renew", asks: true, clients: one, more: []fault{killHelper}},
		{step: "restart.cleared", operation: "renew", clients: one, more: []fault{killAll}},
		{step: "restart.serving", operation: "renew", clients: one, pod: true, more: all},
		// rotate: in place, or to another mount where the client keeps nothing back and others have the mount too
		{step: "rotate.recorded", operation: "rotate", more: []fault{killHelper, killClient}},
		{step: "rotate.handed", operation: "rotate", more: []fault{killHelper, killClient}},
		{step: "rotate.started", operation: "rotate shared", asks: true, clients: two, more: all},
		{step: "rotate.moved", operation: "rotate shared", clients: two, pod: true, more: []fault{killClient}},
		{step: "rotate.left", operation: "rotate shared", clients: two, more: []fault{killHelper}},
		{step: "uphold.dead", operation: "rotate dead", clients: two, more: []fault{killNothing}},
		{step: "rotate.handed", operation: "rotate shared", clients: one, more: []fault{killAll}},
		// reconcile
		{step: "discard.killed", operation: "discard", asks: true, more: []fault{podGone}},
		{step: "discard.unmounted", operation: "discard", more: []fault{podGone}},
		{step: "remove.cache", operation: "discard", more: []fault{podGone}},
		{step: "restore.directories", operation: "restore", clients: one, more: []fault{podGone}},
	}
}

// scenarios are the matrix's, for this launcher.
func scenarios() []*scenario {
	onSystemd := os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd
	var all []*scenario
	for _, r := range matrix() {
		of := r.clients
		if of == nil {
			of = clients
		}
		if onSystemd { // what differs by client differs here as there
			of = of[:1]
		}
		faults := append([]fault{killDriver}, r.more...)
		switch {
		case onSystemd && r.asks:
			faults = append(faults, reexec, bus)
		case onSystemd: // the end of a unit differs, not that of a client or of a pod
			faults = slices.DeleteFunc(faults, func(f fault) bool { return f == killClient || f == podGone })
		}
		for _, f := range faults {
			for _, client := range of {
				all = append(all, &scenario{testCase: r, fault: f, client: client})
			}
		}
	}
	return all
}

// testNodes is how many nodes the scenarios share: they wait for most of the time.
const testNodes = 4

// Whatever is killed or restarted, at whatever step of its work the driver is: what was to be done is done in the end,
// nothing that was closed is lost, a volume that has nothing to do with it works all the time, and nothing is left of
// anything.
func TestFaultMatrix(t *testing.T) {
	whole := t
	rigtest.Bin(t)
	if os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd {
		systemd.Host(t)
	}
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	server := rigtest.StartServer(t, s3server.Options{})
	work := make(chan *scenario)
	go func() {
		defer close(work)
		for _, c := range scenarios() {
			work <- c
		}
	}()
	var (
		used []*testNode
		mu   sync.Mutex
		wg   sync.WaitGroup
	)
	for range testNodes {
		wg.Go(func() {
			var l *testNode
			for c := range work {
				t.Run(c.testName(), func(t *testing.T) {
					rigtest.NeedClient(t, c.client)
					if l == nil {
						l = newTestNode(t, whole, server)
					}
					c.testNode, c.t = l, t
					from := len(l.Logs())
					defer func() {
						if !t.Failed() {
							return
						}
						time.Sleep(2 * time.Second) // a driver that heals reports why the client exited
						log := l.Logs()[from:]
						t.Logf("the drivers' log:\n%s", log[max(0, len(log)-30000):])
						l.driver.Load().Kill()
						l = nil // the next scenario has another node
					}()
					c.run()
				})
			}
			if l != nil {
				mu.Lock()
				defer mu.Unlock()
				used = append(used, l)
			}
		})
	}
	wg.Wait()
	for _, l := range used {
		c := &scenario{testNode: l, t: t}
		c.must("unpublishing the control volume", c.begin(l.controlVolume.unpublishing(), false))
	}
	if t.Failed() {
		return // test nodes that failed are left as they are
	}
	for _, l := range used {
		for _, what := range l.Leftovers() {
			t.Errorf("left behind in the end: %s", what)
		}
	}
}

// Every step of the source is in the matrix, and every step of the matrix in the source.
func TestEveryStepIsInTheMatrix(t *testing.T) {
	rigtest.ProcessOnly(t, "it reads the source")
	pattern := regexp.MustCompile(`failpoint\.Here\("([^"]*)"\)`)
	var source, steps []string
	for _, dir := range []string{"../../pkg", "../../cmd"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if path == "../../pkg/podclient" {
				return filepath.SkipDir // tests/podclient kills the driver at these
			}
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			b, err := os.ReadFile(path)
			for _, match := range pattern.FindAllStringSubmatch(string(b), -1) {
				source = append(source, match[1])
			}
			if calls := strings.Count(string(b), "failpoint.Here("); calls != len(pattern.FindAllString(string(b), -1)) {
				t.Errorf("%s: a step whose name is not a plain string cannot be found", path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range matrix() {
		steps = append(steps, r.step)
		if !slices.Contains(source, r.step) {
			t.Errorf("step %s of the matrix is not in the source", r.step)
		}
		if operations[r.operation] == nil {
			t.Errorf("step %s: there is no operation %q", r.step, r.operation)
		}
	}
	if len(source) == 0 {
		t.Error("no step was found")
	}
	for _, step := range source {
		if !slices.Contains(steps, step) {
			t.Errorf("step %s is not in the matrix", step)
		}
	}
}

// Programs for users cannot be held anywhere.
func TestTheBuiltDriverHasNoFailpoints(t *testing.T) {
	bin := rigtest.Bin(t)
	for program, has := range map[string]bool{"s3-csi-driver": false, "s3-csi-helper": false, "test/failpoints/s3-csi-driver": true} {
		b, err := os.ReadFile(filepath.Join(bin, program))
		if err != nil {
			t.Fatal(err)
		}
		for _, trace := range []string{"S3CSI_FAILPOINTS", "unpublish.unmounted"} {
			if strings.Contains(string(b), trace) != has {
				t.Errorf("%s contains %s: %t", program, trace, !has)
			}
		}
	}
}
