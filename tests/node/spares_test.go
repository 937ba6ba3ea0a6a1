//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// spare waits until the driver has one helper that is ready for a mount, and returns its name and its process.
func (e *env) spare() (name string, process rig.Process) {
	e.t.Helper()
	e.await(eventually, "a spare helper", func() bool {
		spares := e.Spares()
		if len(spares) != 1 {
			return false
		}
		for name = range spares {
			if !strings.Contains(e.Logs(), `"Spare helper ready" unit="`+name+`"`) {
				return false
			}
			for _, p := range e.AllProcesses() {
				if p.UID == spares[name] && p.Name == "s3-csi-helper" {
					process = p
					return true
				}
			}
		}
		return false
	})
	return name, process
}

// A new mount takes the helper that was started before it: its process and its user. Another one is started for the next mount.
func TestAMountTakesASpareHelper(t *testing.T) {
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("spared", client)
		e.Put(t, bucket, "spared/file", "content")
		name, spare := e.spare()
		target := e.publish(v, "t")
		if got := read(t, filepath.Join(target, "file")); got != "content" {
			t.Errorf("the file reads %q", got)
		}
		if helpers := e.Running("s3-csi-helper"); len(helpers) != 1 || helpers[0] != spare {
			t.Errorf("the helpers are %v, want %v", helpers, spare)
		}
		if c := e.client(client); c.UID != spare.UID {
			t.Errorf("the client is %v, the helper %v", c, spare)
		}
		next, other := e.spare()
		if next == name || other.UID == spare.UID {
			t.Errorf("the next spare is %s, %v, as %s, %v", next, other, name, spare)
		}
		e.restart()
		rigtest.Kill(e.t, e.Running("s3-csi-helper")...)
		e.publish(v, "t")
		if got := read(t, filepath.Join(target, "file")); got != "content" {
			t.Errorf("after the end of the helper, the file reads %q", got)
		}
		e.unpublish(v, target)
		e.NothingLeft(t)
	})
}

// The unit of a spare becomes that of the mount that takes it, and gets its description.
func TestAMountTakesTheUnitOfASpareHelper(t *testing.T) {
	units(t)
	e := start(t)
	v := static("spared", rclone)
	name, _ := e.spare()
	target := e.publish(v, "t")
	unit := e.unitOf("spared")
	if unit != "s3csi-"+name+".service" {
		t.Errorf("the mount's unit is %s, want that of %s", unit, name)
	}
	e.await(eventually, "the unit's description", func() bool {
		return strings.Contains(property(t, unit, "Description"), "S3 volume spared (rclone)")
	})
	// The mount's record leads another driver to the unit.
	e.restart()
	if got := e.unitOf("spared"); got != unit {
		t.Errorf("the unit is %s after a restart, it was %s", got, unit)
	}
	rigtest.Kill(e.t, e.Running("s3-csi-helper")...)
	e.publish(v, "t")
	if got := e.unitOf("spared"); got != unit || property(t, got, "ActiveState") != "active" {
		t.Errorf("another helper has unit %s, %s", got, property(t, got, "ActiveState"))
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
	for _, dir := range []string{"transient", "system.control"} { // where systemd keeps changed properties
		e.await(eventually, "the end of "+unit+" in "+dir, func() bool {
			left, err := filepath.Glob(filepath.Join("/run/systemd", dir, unit+"*"))
			return err == nil && len(left) == 0
		})
	}
}

// A spare that has exited, or does not answer, costs a publication time, and nothing else.
func TestASpareHelperThatCannotBeUsed(t *testing.T) {
	for what, stop := range map[string]func(t testing.TB, spare rig.Process){
		"exited":          func(t testing.TB, spare rig.Process) { t.Helper(); rigtest.Kill(t, spare) },
		"does not answer": func(t testing.TB, spare rig.Process) { t.Helper(); rigtest.Freeze(t, spare.PID) },
	} {
		t.Run(what, func(t *testing.T) {
			e := start(t)
			v := static("unspared", rclone)
			_, spare := e.spare()
			stop(t, spare)
			target := e.publish(v, "t")
			write(t, filepath.Join(target, "file"), "x")
			if !rig.Ended(spare.PID) {
				t.Errorf("the spare %v still runs", spare)
			}
			e.unpublish(v, target)
			e.NothingLeft(t)
		})
	}
}

// A driver that exits ends its spares. One that is killed cannot: the next one ends them, also with other users.
func TestSpareHelpersDoNotOutliveTheirDriver(t *testing.T) {
	e := start(t)
	_, killed := e.spare()
	e.Kill()
	if rig.Ended(killed.PID) {
		t.Error("the spare has exited with its driver, so nothing is tested")
	}
	e.drive(fmt.Sprintf("--uid-range=%d-%d", e.FirstUID+(e.LastUID-e.FirstUID)/2, e.LastUID))
	e.await(eventually, "the end of the former driver's spare", func() bool { return rig.Ended(killed.PID) })
	_, left := e.spare()
	if code, err := e.Stop(rigtest.Context(t, time.Minute)); err != nil || code != 0 {
		t.Fatal(code, err)
	}
	e.await(5*time.Second, "the end of the spare", func() bool { return rig.Ended(left.PID) })
	for _, dir := range []string{filepath.Join(e.State, "spares"), filepath.Join(e.State, "scratch")} {
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("%s contains %v, %v", dir, entries, err)
		}
	}
}
