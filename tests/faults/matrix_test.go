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

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/systemd"
)

// row is a step of the driver's, and how it gets there.
type row struct {
	step, scenario string
	clients        []string // nil: each
	// more are the faults beside killDriver: where a helper or a client is there whose end makes a difference.
	more     []fault
	readOnly bool // the whole volume is
	pod      bool // a container runs on it
}

var (
	one = []string{rclone}
	two = []string{mountpoint}
)

func matrix() []row {
	all := []fault{killHelper, killClient, killAll}
	return []row{
		// publish
		{step: "publish.target", scenario: "publish", more: []fault{podGone}},
		{step: "make.directory", scenario: "publish", more: []fault{podGone}},
		{step: "make.recorded", scenario: "publish", more: []fault{podGone}},
		{step: "make.scratch", scenario: "publish", more: []fault{podGone}},
		{step: "make.directories", scenario: "publish", more: []fault{podGone}},
		{step: "start.allocated", scenario: "publish", more: []fault{podGone}},
		{step: "launch.listening", scenario: "publish", more: []fault{podGone}},
		{step: "launch.started", scenario: "publish", more: []fault{podGone, killHelper, killAll}},
		{step: "mount.mounted", scenario: "publish", more: []fault{podGone}},
		{step: "start.mounted", scenario: "publish", more: []fault{podGone, killHelper}},
		{step: "serve.started", scenario: "publish", more: append([]fault{podGone}, all...)},
		{step: "start.serving", scenario: "publish", more: append([]fault{podGone}, all...)},
		{step: "write.durable", scenario: "publish", clients: one, more: []fault{podGone}},
		{step: "bind.recorded", scenario: "publish", more: append([]fault{podGone}, all...)},
		{step: "bind.bound", scenario: "publish", more: append([]fault{podGone}, all...)},
		{step: "write.temporary", scenario: "publish", more: []fault{podGone}},
		{step: "write.temporary", scenario: "share", more: []fault{podGone}},
		{step: "bind.recorded", scenario: "share", more: []fault{podGone, killClient}},
		{step: "replace.recorded", scenario: "replace", more: all},
		// unpublish
		{step: "unpublish.unmounted", scenario: "unpublish", more: all},
		{step: "unpublish.recorded", scenario: "unrecorded", more: []fault{killAll}},
		{step: "write.temporary", scenario: "unrecorded"},
		{step: "end.recorded", scenario: "unpublish", more: all},
		{step: "drain.told", scenario: "unpublish", more: []fault{killHelper, killClient}},
		{step: "drain.unmounted", scenario: "unpublish"},
		{step: "end.drained", scenario: "unpublish"},
		{step: "end.helper", scenario: "unpublish"},
		{step: "remove.source", scenario: "unpublish"},
		{step: "remove.cache", scenario: "unpublish"},
		{step: "remove.scratch", scenario: "unpublish"},
		{step: "remove.files", scenario: "unpublish"},
		{step: "release.ended", scenario: "unpublish"},
		{step: "unpublish.released", scenario: "unpublish"},
		// heal
		{step: "uphold.dead", scenario: "heal", more: []fault{killHelper, killAll}},
		{step: "restart.ended", scenario: "heal of two"},
		{step: "restart.idle", scenario: "heal", more: []fault{killHelper, killAll}},
		{step: "restart.idle", scenario: "heal of two", more: []fault{killAll}},
		{step: "former.pinned", scenario: "heal", pod: true, more: []fault{killHelper, killAll}},
		{step: "restart.cleared", scenario: "heal", more: []fault{killHelper}},
		{step: "restart.mounted", scenario: "heal", more: []fault{killHelper, killAll}},
		{step: "restart.serving", scenario: "heal", more: all},
		{step: "swap.attached", scenario: "heal", pod: true, more: []fault{killClient, killAll}},
		{step: "swap.moved", scenario: "heal", pod: true},
		{step: "swap.detached", scenario: "heal", pod: true, more: []fault{killClient}},
		{step: "heal.host", scenario: "heal", pod: true, more: all},
		{step: "heal.containers", scenario: "heal", pod: true, more: []fault{killClient}},
		{step: "heal.detached", scenario: "heal", pod: true, more: []fault{killClient}},
		// hang
		{step: "hang.found", scenario: "hang", more: all},
		{step: "hang.aborted", scenario: "hang", more: all},
		{step: "restart.idle", scenario: "hang"},
		// renew: another mount where the client keeps nothing back, else another client
		{step: "succeed.superseded", scenario: "renew", clients: two, more: []fault{killHelper}},
		{step: "succeed.superseded", scenario: "renew", clients: one, readOnly: true},
		{step: "succeed.moved", scenario: "renew", clients: two, more: []fault{killClient}},
		{step: "succeed.moved", scenario: "renew", clients: one, readOnly: true},
		{step: "renew.started", scenario: "renew", clients: two, more: all},
		{step: "renew.started", scenario: "renew", clients: one, readOnly: true},
		{step: "renew.started", scenario: "renew unused", clients: two, more: []fault{killNothing}},
		{step: "renew.succeeded", scenario: "renew", clients: two, pod: true, more: all},
		{step: "renew.succeeded", scenario: "renew", clients: one, readOnly: true},
		{step: "end.drained", scenario: "renew", clients: two, more: []fault{killAll}},
		{step: "restart.killed", scenario: "renew", clients: one, more: []fault{killHelper}},
		{step: "restart.cleared", scenario: "renew", clients: one, more: []fault{killAll}},
		{step: "restart.serving", scenario: "renew", clients: one, pod: true, more: all},
		// rotate: in place, or to another mount where the client keeps nothing back and others have the mount too
		{step: "rotate.recorded", scenario: "rotate", more: []fault{killHelper, killClient}},
		{step: "rotate.handed", scenario: "rotate", more: []fault{killHelper, killClient}},
		{step: "rotate.started", scenario: "rotate shared", clients: two, more: all},
		{step: "rotate.moved", scenario: "rotate shared", clients: two, pod: true, more: []fault{killClient}},
		{step: "rotate.left", scenario: "rotate shared", clients: two, more: []fault{killHelper}},
		{step: "rotate.handed", scenario: "rotate shared", clients: one, more: []fault{killAll}},
		// reconcile
		{step: "discard.killed", scenario: "discard", more: []fault{podGone}},
		{step: "discard.unmounted", scenario: "discard", more: []fault{podGone}},
		{step: "remove.cache", scenario: "discard", more: []fault{podGone}},
		{step: "restore.directories", scenario: "restore", clients: one, more: []fault{podGone}},
	}
}

// cells are the matrix's, for this launcher.
func cells() []*cell {
	onSystemd := os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd
	var all []*cell
	struck := map[string]bool{} // steps at which systemd and the bus are restarted
	for _, r := range matrix() {
		of := r.clients
		if of == nil {
			of = clients
		}
		if onSystemd { // what differs by client differs here as there
			of = of[:1]
		}
		faults := append([]fault{killDriver}, r.more...)
		if onSystemd && !struck[r.step] {
			struck[r.step] = true
			faults = append(faults, reexec, bus)
		}
		for _, f := range faults {
			for _, client := range of {
				all = append(all, &cell{row: r, fault: f, client: client})
			}
		}
	}
	return all
}

// lanes is how many nodes the cells share: they wait for most of the time.
const lanes = 4

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
	work := make(chan *cell)
	go func() {
		defer close(work)
		for _, c := range cells() {
			work <- c
		}
	}()
	var (
		used []*lane
		mu   sync.Mutex
		wg   sync.WaitGroup
	)
	for range lanes {
		wg.Go(func() {
			var l *lane
			for c := range work {
				t.Run(c.testName(), func(t *testing.T) {
					if l == nil {
						l = newLane(t, whole, server)
					}
					c.lane, c.t = l, t
					from := len(l.Logs())
					defer func() {
						if !t.Failed() {
							return
						}
						time.Sleep(2 * time.Second) // a driver that heals says what the client died of
						log := l.Logs()[from:]
						t.Logf("the drivers' log:\n%s", log[max(0, len(log)-30000):])
						l.driver.Load().Kill()
						l = nil // the next cell has another node
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
		c := &cell{lane: l, t: t}
		c.must("unpublishing the innocent volume", c.begin(l.innocent.unpublishing(), false))
	}
	if t.Failed() {
		return // lanes that failed are left as they are
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
	var source, rows []string
	for _, dir := range []string{"../../pkg", "../../cmd"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
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
		rows = append(rows, r.step)
		if !slices.Contains(source, r.step) {
			t.Errorf("step %s of the matrix is not in the source", r.step)
		}
		if scenarios[r.scenario] == nil {
			t.Errorf("step %s: there is no scenario %q", r.step, r.scenario)
		}
	}
	if len(source) == 0 {
		t.Error("no step was found")
	}
	for _, step := range source {
		if !slices.Contains(rows, step) {
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
