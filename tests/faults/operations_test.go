package faults

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// operations bring the driver to a step, have the fault happen there, and see that what was to be done is done.
var operations = map[string]func(*scenario){
	"publish":       publishOperation,
	"share":         shareOperation,
	"prepare":       prepareOperation,
	"replace":       replaceOperation,
	"unpublish":     unpublishOperation,
	"unrecorded":    unrecordedOperation,
	"heal":          func(c *scenario) { c.healAfter(func() []rig.Process { return c.processes(programs[c.client]) }) },
	"heal of two":   func(c *scenario) { c.healAfter(c.bothAtOnce) },
	"hang":          hangOperation,
	"renew":         renewOperation,
	"renew unused":  renewUnusedOperation,
	"rotate":        rotateOperation,
	"rotate shared": rotateSharedOperation,
	"rotate dead":   rotateDeadOperation,
	"discard":       discardOperation,
	"restore":       restoreOperation,
	"linger":        lingerOperation,
	"linger secret": lingerSecretOperation,
	"linger end":    lingerEndOperation,
	"warm":          warmOperation,

	"publish prepared": publishPreparedOperation,
}

// A helper is started before there is a mount for it. It must not be in the way of what follows.
func prepareOperation(c *scenario) {
	c.arm()
	if c.testCase.step != noSpares { // where it is held otherwise
		c.keepSpares(c.t, true)
	}
	c.strike()
	c.keepSpares(c.t, false)
	c.publish(c.target)
	c.works()
	c.restart(c.t) // without spares
}

// A first publication, for which there is a helper.
func publishPreparedOperation(c *scenario) {
	const ready = `"Spare helper ready"`
	before := strings.Count(c.Logs(), ready)
	c.keepSpares(c.t, true)
	rigtest.Await(c.t, reachBound, "a spare helper", func() bool { return strings.Count(c.Logs(), ready) > before })
	c.keepSpares(c.t, false)
	publishOperation(c)
}

// A first publication.
func publishOperation(c *scenario) {
	c.arm()
	asked := c.begin(c.publishing(c.target), c.fault == podGone)
	c.strike()
	if c.fault == podGone {
		c.t.Log("what the CO gave up: ", <-asked)
		return
	}
	c.must("publishing", asked)
	c.works()
}

// A second publication of a mount.
func shareOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	second := c.newTarget("b")
	c.arm()
	asked := c.begin(c.publishing(second), c.fault == podGone)
	c.strike()
	if c.fault == podGone {
		c.t.Log("what the CO gave up: ", <-asked)
		c.unpublish(second)
	} else {
		c.must("publishing", asked)
		c.reads(second, "seed")
	}
	c.works()
}

// A publication that finds its target stale, where nothing else heals it.
func replaceOperation(c *scenario) {
	c.flags = []string{"--heal=false"}
	c.restart(c.t)
	defer func() {
		c.flags = nil
		c.restart(c.t)
	}()
	c.publish(c.target)
	c.write("before", "written before it")
	rigtest.Kill(c.t, c.processes(programs[c.client])...)
	c.arm()
	asked := c.begin(c.publishing(c.target), false)
	c.strike()
	c.must("publishing", asked)
	if c.fault != killDriver { // what was killed after the answer is for the next one
		c.publish(c.target)
	}
	c.works()
}

// The last publication goes.
func unpublishOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	c.arm()
	asked := c.begin(c.unpublishing(c.target), false)
	c.strike()
	c.must("unpublishing", asked)
}

// A publication goes whose record was lost.
func unrecordedOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	records, err := filepath.Glob(filepath.Join(c.State, "publications", "*.json"))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, record := range records {
		if b, err := os.ReadFile(record); err == nil && strings.Contains(string(b), c.target) {
			if err := os.Remove(record); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	c.arm()
	asked := c.begin(c.unpublishing(c.target), false)
	c.strike()
	c.must("unpublishing", asked)
}

// healAfter has processes die, of which the driver and the containers recover by themselves.
func (c *scenario) healAfter(victims func() []rig.Process) {
	c.publish(c.target)
	c.write("before", "written before it")
	if c.testCase.pod {
		containers.Need(c.t)
		c.startPod()
	}
	c.arm()
	rigtest.Kill(c.t, victims()...)
	c.strike()
	c.works()
	if c.fault == killDriver && !c.testCase.pod { // also when it is not the client's cache alone that has it
		rigtest.Await(c.t, healBound, "what was closed to be stored", func() bool {
			return len(c.server.Keys(c.t, bucket, c.volume.GetVolumeId()+"/before")) > 0
		})
		c.reads(c.target, "before")
	}
}

// bothAtOnce are the client and its helper. The client has exited, and no process knows yet: a driver that finds the
// helper exited and the client running would do something else.
func (c *scenario) bothAtOnce() []rig.Process {
	all := c.processes("")
	for _, p := range c.processes("s3-csi-helper") {
		rigtest.Freeze(c.t, p.PID)
	}
	rigtest.Kill(c.t, c.processes(programs[c.client])...)
	return all
}

// letDie sees that a driver that was killed can end: one of its calls may wait for the very client that does not answer, and the
// kernel keeps the process until it has been. The client goes on for a moment then.
func (c *scenario) letDie(client []rig.Process) (stop func()) {
	all := func(sig unix.Signal) {
		for _, p := range client {
			_ = unix.Kill(p.PID, sig) // one that has exited delays nothing
		}
	}
	done := make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		since := time.Now()
		for {
			select {
			case <-done:
				return
			case <-time.After(100 * time.Millisecond):
			}
			pid := c.driver.Load().PID()
			if !isZombie(pid) {
				since = time.Now()
				continue
			}
			if time.Since(since) < 5*time.Second {
				continue
			}
			c.t.Log("the driver was killed and cannot end: the client goes on for a moment")
			all(unix.SIGCONT)
			for end := time.Now().Add(2 * time.Second); isZombie(pid) && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			all(unix.SIGSTOP)
		}
	})
	return func() { close(done); watcher.Wait() }
}

// A client does not answer.
func hangOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	clients := c.processes(programs[c.client])
	defer c.letDie(clients)()
	for _, p := range clients {
		rigtest.Freeze(c.t, p.PID)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := os.Stat(filepath.Join(c.target, "nobody-has-asked-for-this"))
		answered <- err
	}()
	c.arm()
	c.strike()
	rigtest.Await(c.t, healBound, "an answer for who asked the client that hangs", func() bool { return len(answered) > 0 })
	c.t.Log("who asked the client that hangs: ", <-answered)
	c.works()
}

// The backend has moved while no driver was there.
func renewOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	if c.testCase.pod {
		containers.Need(c.t)
		c.startPod()
	}
	c.renew()
	c.strike()
	c.works()
	rigtest.Await(c.t, healBound, "the former client to be gone", func() bool { return len(c.processes(programs[c.client])) == 1 })
}

// renew has a driver find the backend moved.
func (c *scenario) renew() {
	c.driver.Load().Kill()
	c.moveBackend(c.t)
	c.release()
	c.arm()
	c.drive(c.t)
}

// The last publication of a mount goes while the mount is being replaced.
func renewUnusedOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	c.renew()
	c.reached(c.testCase.step)
	asked := c.begin(c.unpublishing(c.target), false)
	rigtest.Await(c.t, callBound, "the volume to be gone from its target", func() bool {
		at, err := host.Inspect(c.target)
		return err == nil && !at.Mountpoint
	})
	c.strike()
	c.must("unpublishing", asked)
}

// A publication comes with another secret.
func rotateOperation(c *scenario) {
	former, now := c.rotation()
	c.secrets = former
	c.publish(c.target)
	c.write("before", "written before it")
	c.secrets = now
	c.arm()
	asked := c.begin(c.publishing(c.target), false)
	c.strike()
	c.must("publishing with the other secret", asked)
	c.publish(c.target)
	c.works()
	c.outlive(former)
}

// outlive makes the former secret worthless. Within the next publications, as kubelet repeats them, the volume works: its client
// may have listed the volume a moment ago and not ask for a while.
func (c *scenario) outlive(former map[string]string) {
	c.t.Helper()
	c.revoke(former)
	for end := time.Now().Add(healBound); ; time.Sleep(500 * time.Millisecond) {
		c.publish(c.target)
		b, err := os.ReadFile(filepath.Join(c.target, "seed"))
		if err == nil && string(b) == c.stored["seed"] {
			break
		}
		if time.Now().After(end) {
			c.t.Fatalf("the volume does not work without the former secret: %q, %v", b, err)
		}
	}
	c.works()
}

// sharedWithSecret makes two publications of one mount with the first of two secrets.
func sharedWithSecret(c *scenario) (former, now map[string]string, second string) {
	former, now = c.rotation()
	c.secrets = former
	c.publish(c.target)
	c.write("before", "written before it")
	second = c.newTarget("b")
	c.publish(second)
	return former, now, second
}

// Two publications of one mount come with another secret, one after the other.
func rotateSharedOperation(c *scenario) {
	former, now, second := sharedWithSecret(c)
	if c.testCase.pod {
		containers.Need(c.t)
		c.startPod()
	}
	c.secrets = now
	c.arm()
	// Each asks again and again, as kubelet does; a client that is not moved away from has the other secret when both have asked.
	asked := []<-chan error{c.begin(c.publishing(c.target), false), c.begin(c.publishing(second), false)}
	c.strike()
	for _, a := range asked {
		c.must("publishing with the other secret", a)
	}
	c.publish(c.target)
	c.publish(second)
	c.works()
	c.reads(second, "seed")
	c.outlive(former)
}

// Two publications come with another secret while the driver is about to restart their mount's client.
func rotateDeadOperation(c *scenario) {
	_, now, second := sharedWithSecret(c)
	c.secrets = now
	c.arm()
	c.killProcesses(programs[c.client])
	c.reached(c.testCase.step)
	for _, target := range c.targets {
		c.t.Log("asked meanwhile: ", <-c.begin(c.publishing(target), true))
	}
	c.strike()
	c.publish(c.target)
	c.publish(second)
	c.works()
	c.reads(second, "seed")
}

// The driver that clears away what one before it left of a start.
func discardOperation(c *scenario) {
	const left = "start.mounted"
	c.hold(c.t, left)
	asked := c.begin(c.publishing(c.target), true)
	c.reached(left)
	c.driver.Load().Kill()
	c.t.Log("what the CO gave up: ", <-asked)
	c.release()
	c.arm()
	c.drive(c.t)
	c.strike()
	if c.fault == podGone {
		return
	}
	c.publish(c.target)
	c.works()
}

// The driver that finds the cache of a mount, and nothing else of it, as after a reboot.
func restoreOperation(c *scenario) {
	c.publish(c.target)
	c.write("before", "written before it")
	c.driver.Load().Kill()
	rigtest.Kill(c.t, c.processes("")...)
	c.forget()
	c.release()
	c.arm()
	c.driveLater(c.t)
	c.strike()
	if c.fault == podGone { // no caller asks
		rigtest.Await(c.t, healBound, "what was left to be stored and cleared away", func() bool {
			left, err := filepath.Glob(filepath.Join(c.State, "mounts", "*"))
			return err == nil && len(left) == 1
		})
		return
	}
	c.publish(c.target)
	c.works()
}

// forget removes what a reboot removes of the volume, whose client has exited.
func (c *scenario) forget() {
	c.t.Helper()
	if err := unix.Unmount(c.target, unix.UMOUNT_NOFOLLOW); err != nil {
		c.t.Fatal(err)
	}
	var gone []string
	for _, pattern := range []string{"mounts/*", "sources/*", "publications/*"} {
		all, err := filepath.Glob(filepath.Join(c.State, pattern))
		if err != nil {
			c.t.Fatal(err)
		}
		gone = append(gone, all...)
	}
	for _, path := range gone {
		if b, _ := os.ReadFile(path); filepath.Base(path) == c.controlVolume.mount || strings.Contains(string(b), c.controlVolume.target) {
			continue
		}
		_ = unix.Unmount(path, unix.UMOUNT_NOFOLLOW) // a source
		if err := os.RemoveAll(path); err != nil {
			c.t.Fatal(err)
		}
	}
}

// testName is a scenario's.
func (c *scenario) testName() string { return c.testCase.step + "/" + string(c.fault) + "/" + c.client }
