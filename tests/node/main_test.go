package node

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/hostile"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// The clients, by the names that volumes give them.
const (
	rclone     = "rclone"
	mountpoint = "mountpoint-s3"
)

var clients = []string{rclone, mountpoint}

// programs are the process names of the clients.
var programs = rig.Programs()

const bucket = rigtest.Bucket

// The suite holds for every launcher; see rigtest.Main.
func TestMain(m *testing.M) {
	if os.Getenv(stuckEnv) != "" {
		os.Exit(stuckMain())
	}
	if hostile.IsClient() {
		os.Exit(hostile.Main())
	}
	os.Exit(rigtest.Main(m))
}

// env is a node with one driver, and a proxy between it and its S3 server.
type env struct {
	*rigtest.Node
	*rig.Driver
	t       *testing.T
	proxy   *faultproxy.Proxy
	secrets []string // that must not be seen anywhere
}

// newEnv starts everything but the driver.
func newEnv(t *testing.T) *env {
	t.Helper()
	e := &env{t: t, Node: rigtest.New(t)}
	rigtest.NeedClient(t, mountpoint)
	e.proxy = rigtest.Proxy(t, e.Endpoint())
	e.Rig.S3.Endpoint = e.proxy.Endpoint()
	e.secrets = []string{e.Rig.S3.Keys.SecretAccessKey}
	t.Cleanup(func() { e.noSecretIn("the drivers' log", []byte(e.Logs())) })
	return e
}

// Endpoint is the S3 server's, without the proxy.
func (e *env) Endpoint() string { return e.Process.Endpoint() }

// start is newEnv with a driver in mode node.
func start(t *testing.T, flags ...string) *env {
	t.Helper()
	e := newEnv(t)
	e.drive(flags...)
	return e
}

// drive starts a driver; the previous one must be gone.
func (e *env) drive(flags ...string) {
	e.t.Helper()
	e.Driver = e.Drive(e.t, "node", flags...)
}

// restart kills the driver as a crash does and starts another.
func (e *env) restart(flags ...string) {
	e.t.Helper()
	e.Kill()
	e.drive(flags...)
}

// PID is the driver's.
func (e *env) PID() int { return e.Driver.PID() }

func (e *env) noSecretIn(what string, text []byte) {
	e.t.Helper()
	for _, s := range e.secrets {
		if strings.Contains(string(text), s) {
			e.t.Errorf("%s holds a secret key", what)
		}
	}
}

// user makes a user of the S3 server who may do everything with the bucket, and gives the CSI secret of one of its keys.
func (e *env) user(name string) map[string]string {
	e.t.Helper()
	keys, err := e.AddUser(e.t.Context(), name, `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}`)
	if err != nil {
		e.t.Fatal(err)
	}
	e.secrets = append(e.secrets, keys.SecretAccessKey)
	return map[string]string{"accessKeyID": keys.AccessKeyID, "secretAccessKey": keys.SecretAccessKey}
}

// static is a volume that no controller made.
var static = rigtest.Static

// change is one way in which a publication differs from an ordinary one.
type change func(*csi.NodePublishVolumeRequest)

func readOnly(r *csi.NodePublishVolumeRequest) { r.Readonly = true }

func mode(m csi.VolumeCapability_AccessMode_Mode) change {
	return func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode.Mode = m }
}

func flags(f ...string) change {
	return func(r *csi.NodePublishVolumeRequest) { r.GetVolumeCapability().GetMount().MountFlags = f }
}

func secrets(s map[string]string) change {
	return func(r *csi.NodePublishVolumeRequest) { r.Secrets = s }
}

func group(gid string) change {
	return func(r *csi.NodePublishVolumeRequest) { r.GetVolumeCapability().GetMount().VolumeMountGroup = gid }
}

// tryPublish publishes and gives the error.
func (e *env) tryPublish(limit time.Duration, v *csi.Volume, target string, changes ...change) error {
	req := rigtest.PublishRequest(v, target)
	for _, c := range changes {
		c(req)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), limit)
	defer cancel()
	_, err := e.NodePublishVolume(ctx, req)
	return err
}

// publish publishes a volume at the target of that name and gives its path.
func (e *env) publish(v *csi.Volume, name string, changes ...change) string {
	e.t.Helper()
	target := e.Target(name)
	if err := e.tryPublish(time.Minute, v, target, changes...); err != nil {
		e.t.Fatalf("publishing %s at %s: %v", v.GetVolumeId(), target, err)
	}
	return target
}

func (e *env) tryUnpublish(limit time.Duration, v *csi.Volume, target string) error {
	ctx, cancel := context.WithTimeout(e.t.Context(), limit)
	defer cancel()
	_, err := e.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
	return err
}

// unpublish unpublishes a volume, whose target must be gone then.
func (e *env) unpublish(v *csi.Volume, target string) {
	e.t.Helper()
	if err := e.tryUnpublish(time.Minute, v, target); err != nil {
		e.t.Fatalf("unpublishing %s: %v", v.GetVolumeId(), err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		e.t.Errorf("the target %s is still there: %v", target, err)
	}
}

// want fails the test unless err has that code and its text all the words.
func want(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("code %s: %v; want %s", status.Code(err), err, code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// undone fails the test if a failed publication left anything, the target included.
func (e *env) undone(target string) {
	e.t.Helper()
	e.NothingLeft(e.t)
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		e.t.Errorf("the target is still there: %v", err)
	}
}

// client is the only process of that client.
func (e *env) client(client string) rig.Process {
	e.t.Helper()
	all := e.Running(programs[client])
	if len(all) != 1 {
		e.t.Fatalf("%d processes of client %s, want one: %v", len(all), client, e.Processes())
	}
	return all[0]
}

func (e *env) await(limit time.Duration, what string, is func() bool) {
	e.t.Helper()
	rigtest.Await(e.t, limit, what, is)
}

func (e *env) awaitNothingLeft(limit time.Duration) {
	e.t.Helper()
	e.AwaitNothingLeft(e.t, limit)
}

// mountsAt are the mounts on exactly that path, the lowest first.
func mountsAt(t *testing.T, path string) []*mountinfo.Info {
	t.Helper()
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// lives tells how many mounts the driver has made so far, by the helpers that it started.
func (e *env) lives() (n int) {
	for line := range strings.Lines(e.Logs()) {
		if strings.Contains(line, `"Spare helper assigned"`) || strings.Contains(line, `"Helper started"`) && !strings.Contains(line, " spare=true") {
			n++
		}
	}
	return n
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// eachClient runs a test for each client on a node of its own, whose driver has these flags.
func eachClient(t *testing.T, test func(t *testing.T, e *env, client string), flags ...string) {
	for _, c := range clients {
		t.Run(c, func(t *testing.T) { test(t, start(t, flags...), c) })
	}
}
