package faults

import (
	"context"
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

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const (
	// callBound is the deadline of one call, retryBound is for how long the CO tries again.
	callBound  = 10 * time.Second
	retryBound = time.Minute
	// reachBound is for the driver to come to a step.
	reachBound = 20 * time.Second
	// healBound is for what comes back by itself. It is less than the minute after which the driver looks at everything.
	healBound = 20 * time.Second
	// clearBound is for what is cleared away without a request, callsBound for calls to systemd that another scenario's restart of the
	// bus has cut off: each has two sockets until its time is over.
	clearBound = 10 * time.Second
	callsBound = 150 * time.Second
)

// fault is what is done at a step.
type fault string

const (
	killDriver fault = "driver"
	killHelper fault = "helper"
	killClient fault = "client"
	killAll    fault = "everything"
	// killNothing is for two things that the driver does at the same time.
	killNothing fault = "nothing"
	// podGone kills the driver, and the CO does not ask for the same again: the pod was deleted meanwhile.
	podGone fault = "driver and pod"
	// reexec and bus restart what the driver talks to, for which nothing is killed.
	reexec fault = "systemd"
	bus    fault = "bus"
)

// scenario is one fault at one step, for one client.
type scenario struct {
	*testNode
	t        *testing.T
	testCase testCase
	fault    fault
	client   string

	volume  *csi.Volume
	secrets map[string]string // of each publication; nil: none
	user    string            // whose they are
	target  string            // the volume's first
	targets []string
	pod     *containers.Container
	stored  map[string]string // what must be in the bucket in the end, by the name below the prefix
}

// run runs a scenario on a test node.
func (c *scenario) run() {
	name := strings.NewReplacer(".", "-", " ", "-").Replace(strings.Join([]string{c.testCase.operation, c.testCase.step, string(c.fault), c.client}, "-"))
	attributes := []string{"backend", moves}
	if c.testCase.readOnly {
		attributes = append(attributes, "readOnly", "true")
	}
	c.volume, c.stored = volume(name, c.client, attributes...), map[string]string{"seed": "there before"}
	c.server.Put(c.t, bucket, name+"/seed", c.stored["seed"])
	c.target = c.newTarget("a")
	stop := c.controlVolume.use()
	defer func() {
		if err := stop(); err != nil {
			c.t.Errorf("the control volume: %v", err)
		}
	}()
	operations[c.testCase.operation](c)
	c.finish()
}

// newTarget is a target as kubelet makes it for a pod of its own.
func (c *scenario) newTarget(name string) string {
	c.t.Helper()
	target := filepath.Join(c.Dir, "targets", "pods", c.podUID(), "volumes", "kubernetes.io~csi", name, "mount")
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		c.t.Fatal(err)
	}
	c.targets = append(c.targets, target)
	return target
}

// podUID is that of the test node's only pod.
func (c *scenario) podUID() string { return fmt.Sprintf("0b9c7f1e-53a4-4f0b-8d1c-%012d", c.FirstUID) }

// call is one call of the CO's.
type call func(ctx context.Context, d *rig.Driver) error

func (c *scenario) publishing(target string) call {
	return func(ctx context.Context, d *rig.Driver) error {
		req := rigtest.PublishRequest(c.volume, target)
		req.Secrets = c.secrets
		_, err := d.NodePublishVolume(ctx, req)
		return err
	}
}

// rotation makes a user with two secrets, which may do everything.
func (c *scenario) rotation() (former, now map[string]string) {
	c.t.Helper()
	c.user = strings.NewReplacer(" ", "-", ".", "-").Replace(c.volume.GetVolumeId())
	keys := func(k credentials.Keys, err error) map[string]string {
		if err != nil {
			c.t.Fatal(err)
		}
		return map[string]string{"accessKeyID": k.AccessKeyID, "secretAccessKey": k.SecretAccessKey}
	}
	former = keys(c.server.AddUser(c.t.Context(), c.user, `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}`))
	return former, keys(c.server.AddKey(c.t.Context(), c.user))
}

// revoke makes a secret of that user worthless.
func (c *scenario) revoke(secret map[string]string) {
	c.t.Helper()
	if err := c.server.RemoveKey(c.t.Context(), c.user, secret["accessKeyID"]); err != nil {
		c.t.Fatal(err)
	}
}

func (c *scenario) unpublishing(target string) call {
	return func(ctx context.Context, d *rig.Driver) error {
		_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: c.volume.GetVolumeId(), TargetPath: target})
		return err
	}
}

// begin begins what the CO does until it succeeds, or once.
func (c *scenario) begin(do call, once bool) <-chan error {
	done := make(chan error, 1)
	go func() {
		began := pressure.Now()
		for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
			ctx, cancel := context.WithTimeout(context.Background(), callBound)
			err := do(ctx, c.driver.Load())
			cancel()
			if err == nil || once || began.Since() > retryBound {
				done <- err
				return
			}
			time.Sleep(pause)
		}
	}()
	return done
}

// must has the CO do something until it succeeds.
func (c *scenario) must(what string, asked <-chan error) {
	c.t.Helper()
	if err := <-asked; err != nil {
		c.t.Fatalf("%s: %v", what, err)
	}
}

func (c *scenario) publish(target string) {
	c.t.Helper()
	c.must("publishing", c.begin(c.publishing(target), false))
}

func (c *scenario) unpublish(target string) {
	c.t.Helper()
	c.must("unpublishing", c.begin(c.unpublishing(target), false))
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		c.t.Errorf("the target %s is still there: %v", target, err)
	}
}

// arm has the driver held at the scenario's step.
func (c *scenario) arm() { c.hold(c.t, c.testCase.step) }

// reached waits until the driver is held at a step.
func (c *scenario) reached(step string) {
	c.t.Helper()
	rigtest.Await(c.t, reachBound, "the driver to come to "+step, func() bool { return c.held(step) })
}

// strike does what the scenario is about once the driver has come to the step, and lets it go on. The driver is restarted where
// it was killed.
func (c *scenario) strike() {
	c.t.Helper()
	c.reached(c.testCase.step)
	switch c.fault {
	case killDriver, podGone:
		c.crash(c.t)
	case killHelper:
		c.killProcesses(helperProgram)
	case killClient:
		c.killProcesses(programs[c.client])
	case killAll:
		c.crash(c.t)
		c.killProcesses("")
	case reexec:
		rigtest.Await(c.t, 10*time.Second, "systemd to re-execute itself", func() bool {
			_, err := rig.Systemctl("daemon-reexec")
			return err == nil
		})
	case bus:
		// It may lose its own connection over it.
		before := mainPID()
		rigtest.Await(c.t, 10*time.Second, "another bus", func() bool {
			_, _ = rig.Systemctl("reset-failed", "dbus.service") // more restarts than its unit allows
			if mainPID() == before {
				_, _ = rig.Systemctl("restart", "dbus.service")
			}
			now := mainPID()
			return now != before && now != "" && now != "0"
		})
	}
	c.release()
	c.driveNow(c.t)
	select {
	case <-c.driver.Load().Exited():
		c.drive(c.t)
	default:
	}
}

func (c *scenario) killProcesses(name string) {
	c.t.Helper()
	var all []rig.Process
	rigtest.Await(c.t, 10*time.Second, "something ("+name+") that can be killed", func() bool { // it may not have its name and user id yet
		all = c.processes(name)
		return len(all) > 0
	})
	rigtest.Kill(c.t, all...)
}

// write writes a file through the volume, and returns when it is closed for the client too.
func (c *scenario) write(name, content string) {
	c.t.Helper()
	if c.testCase.readOnly {
		return
	}
	if err := os.WriteFile(filepath.Join(c.target, name), []byte(content), 0o644); err != nil {
		c.t.Fatal(err)
	}
	c.stored[name] = content
	c.taken(name)
}

// taken waits until the client has a file that was closed.
func (c *scenario) taken(name string) {
	c.t.Helper()
	// The kernel tells the client of the close when it has already told us that it is done.
	key := c.volume.GetVolumeId() + "/" + name
	rigtest.Await(c.t, 10*time.Second, "the client to have taken "+name, func() bool {
		waiting, err := filepath.Glob(filepath.Join(c.Cache, "*", "*", "vfsMeta", "*", bucket, key))
		more, _ := filepath.Glob(filepath.Join(c.Cache, "*", "vfsMeta", "*", bucket, key))
		return err == nil && len(waiting)+len(more) > 0 || len(c.server.Keys(c.t, bucket, key)) > 0
	})
}

// reads waits until the volume can be read again, also in the pod.
func (c *scenario) reads(target, name string) {
	c.t.Helper()
	var last string
	for began := pressure.Now(); ; time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile(filepath.Join(target, name))
		if err == nil && string(b) == c.stored[name] {
			break
		}
		if last = fmt.Sprintf("%q, %v", b, err); began.Since() > healBound {
			c.t.Fatalf("%s cannot be read after %s: %s; %s", name, healBound, last, c.cached())
		}
	}
	if c.pod == nil {
		return
	}
	for began := pressure.Now(); ; time.Sleep(10 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
		got, err := c.pod.Read(ctx, "/data/"+name)
		cancel()
		if err == nil && got == c.stored[name] {
			return
		}
		if began.Since() > healBound {
			c.t.Fatalf("%s cannot be read in the container after %s: %q, %v", name, healBound, got, err)
		}
	}
}

// cached describes what the client has on disk.
func (c *scenario) cached() string {
	var all []string
	_ = filepath.WalkDir(c.Cache, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !strings.Contains(path, c.controlVolume.mount) {
			b, _ := os.ReadFile(path)
			all = append(all, fmt.Sprintf("%s: %.300q", strings.TrimPrefix(path, c.Cache), b))
		}
		return nil
	})
	return strings.Join(all, "; ")
}

// works sees that the volume can be used.
func (c *scenario) works() {
	c.t.Helper()
	for name := range c.stored {
		c.reads(c.target, name)
	}
	if c.testCase.readOnly {
		return
	}
	// Processes that the fault killed may not have exited yet.
	var err error
	for began := pressure.Now(); began.Since() < healBound; time.Sleep(20 * time.Millisecond) {
		if err = os.WriteFile(filepath.Join(c.target, "after"), []byte("written after it"), 0o644); err == nil {
			break
		}
	}
	if err != nil {
		c.t.Fatalf("nothing can be written after %s: %v", healBound, err)
	}
	c.stored["after"] = "written after it"
	c.taken("after")
	c.reads(c.target, "after")
}

// startPod runs a container on the volume.
func (c *scenario) startPod() {
	c.t.Helper()
	c.pod = containers.Start(c.t, containers.Options{
		PodUID: c.podUID(), Mounts: []containers.Mount{{Source: c.target, Target: "/data"}}, Own: map[string]string{"data/seed": "its own"},
	})
}

// finish takes everything away, as the CO does, and sees that nothing is left and everything is stored.
func (c *scenario) finish() {
	c.t.Helper()
	if c.pod != nil {
		if err := c.pod.Stop(); err != nil {
			c.t.Error(err)
		}
	}
	for _, target := range c.targets {
		c.unpublish(target)
	}
	for name, content := range c.stored {
		key := c.volume.GetVolumeId() + "/" + name
		if keys := c.server.Keys(c.t, bucket, key); len(keys) == 0 {
			c.t.Errorf("%s is lost", name)
		} else if got := c.server.Object(c.t, bucket, key); got != content {
			c.t.Errorf("%s is %q in the bucket", name, got)
		}
	}
	if err := os.RemoveAll(filepath.Join(c.Dir, "targets", "pods")); err != nil {
		c.t.Error(err)
	}
	var left []string
	isSocket := func(what string) bool { return what == "descriptor socket" }
	for began, pause := pressure.Now(), 10*time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		if left = c.left(); len(left) == 0 {
			return
		}
		bound := clearBound
		if os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd && !slices.ContainsFunc(left, func(what string) bool { return !isSocket(what) }) {
			bound = callsBound
		}
		if began.Since() > bound {
			break
		}
		time.Sleep(pause)
	}
	for _, what := range left {
		c.t.Errorf("left behind: %s", what)
	}
}

// mainPID is the bus's; "" where systemd does not answer.
func mainPID() string {
	out, _ := rig.Systemctl("show", "--value", "--property=MainPID", "dbus.service")
	return strings.TrimSpace(out)
}
