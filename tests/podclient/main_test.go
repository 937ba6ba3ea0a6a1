// Package podclient tests volumes whose FUSE client runs in the user's own pod: a real driver, kubelet's calls, real clients in a pod's
// cgroup, and consumers in real containers.
package podclient

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/hostile"
	"github.com/s3-csi/s3-csi-driver/tests/internal/output"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const (
	bucket   = rigtest.Bucket
	podUID   = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"
	otherUID = "6f4b1c9e-0d7a-4a8f-9c36-2b1de00f7a55"

	emptyDir = "fuse-fd-passing"
	socket   = "fuse-csi-ephemeral.sock"

	// clientUID is the user of all clients in pods.
	clientUID = 65534

	// eventually is the limit for what takes a moment.
	eventually = 30 * time.Second
	// bounded is the limit for what must not wait for a client.
	bounded = 5 * time.Second
)

func TestMain(m *testing.M) {
	if kind := os.Getenv(hostile.Env); kind != "" {
		os.Exit(beHostile(kind))
	}
	os.Exit(rigtest.Main(m))
}

// env is a node with one driver.
type env struct {
	*rigtest.Node
	*rig.Driver
	t     testing.TB
	flags []string
	// hostileProgram makes the program of hostile clients when the first one starts, and gives its path.
	hostileProgram func() (string, error)
}

func start(t testing.TB, flags ...string) *env {
	t.Helper()
	e := &env{Node: rigtest.New(t), t: t}
	e.hostileProgram = sync.OnceValues(func() (string, error) {
		program := filepath.Join(e.Dir, "hostile")
		self, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			return "", err
		}
		return program, rig.WriteProgram(program, self)
	})
	rigtest.ProcessOnly(t, "no helper is started")
	e.flags = append([]string{"--pod-clients", "--target-root=" + e.kubelet()}, flags...)
	if err := os.MkdirAll(e.kubelet(), 0o755); err != nil {
		t.Fatal(err)
	}
	e.drive()
	return e
}

func (e *env) drive() { e.Driver = e.Drive(e.t, "node", e.flags...) }

func (e *env) kubelet() string { return filepath.Join(e.Dir, "kubelet") }

// pod is a pod as kubelet lays it out before its containers start.
type pod struct {
	*env
	t      testing.TB
	uid    string
	dir    string
	target string
	socket string
}

func (e *env) pod(t testing.TB, uid string) *pod {
	t.Helper()
	dir := filepath.Join(e.kubelet(), "pods", uid)
	p := &pod{env: e, t: t, uid: uid, dir: dir, target: filepath.Join(dir, "volumes/kubernetes.io~csi/data/mount")}
	p.socket = filepath.Join(dir, "volumes/kubernetes.io~empty-dir", emptyDir, socket)
	for _, d := range []string{filepath.Dir(p.target), filepath.Join(dir, "plugins/kubernetes.io~empty-dir", emptyDir)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	p.makeEmptyDir()
	return p
}

func (p *pod) makeEmptyDir() {
	p.t.Helper()
	dir := filepath.Dir(p.socket)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(p.ready(), nil, 0o600); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pod) ready() string {
	return filepath.Join(p.dir, "plugins/kubernetes.io~empty-dir", emptyDir, "ready")
}

// handle is the volume id that kubelet makes for the pod's inline volume.
func (p *pod) handle() string {
	return "csi-" + strings.Repeat(strings.ReplaceAll(p.uid, "-", ""), 2)
}

func (p *pod) request() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: p.handle(), TargetPath: p.target, VolumeCapability: rig.Writer(),
		VolumeContext: map[string]string{
			podvolume.AttributeEmptyDir: emptyDir, podvolume.AttributeSocket: socket,
			"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.uid": p.uid, "csi.storage.k8s.io/pod.name": "p",
			"csi.storage.k8s.io/pod.namespace": "n", "csi.storage.k8s.io/serviceAccount.name": "default",
		},
	}
}

func (p *pod) tryPublish(change func(*csi.NodePublishVolumeRequest)) error {
	req := p.request()
	if change != nil {
		change(req)
	}
	_, err := p.NodePublishVolume(rigtest.Context(p.t, eventually), req)
	return err
}

func (p *pod) publish() {
	p.t.Helper()
	if err := p.tryPublish(nil); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pod) unpublish() {
	p.t.Helper()
	if _, err := ask(p.t, p.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: p.handle(), TargetPath: p.target}); err != nil {
		p.t.Fatal(err)
	}
	for _, path := range []string{p.target, p.socket} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			p.t.Errorf("after unpublish, %s: %v", path, err)
		}
	}
}

// within fails the test if fn takes longer than limit, for which time in which the machine cannot run does not count. Its goroutine may stay.
func within(t testing.TB, limit time.Duration, what string, fn func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- fn() }()
	for began := pressure.Now(); began.Since() <= limit; {
		select {
		case err := <-done:
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
	t.Fatalf("%s: no answer for %s", what, limit)
	return nil
}

// ask calls a method of the driver that must not wait for a client.
func ask[Request, Answer any](t testing.TB, method func(context.Context, Request, ...grpc.CallOption) (Answer, error), req Request) (answer Answer, err error) {
	t.Helper()
	err = within(t, bounded, fmt.Sprintf("%T", req), func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), eventually)
		defer cancel()
		answer, err = method(ctx, req)
		return err
	})
	return answer, err
}

// look does what kubelet and container runtimes do with a volume's target before a container starts.
func (p *pod) look() error {
	p.t.Helper()
	return within(p.t, bounded, "looking at the target", func() error {
		if _, err := os.Stat(p.target); err != nil {
			return err
		}
		if _, err := filepath.EvalSymlinks(p.target); err != nil {
			return err
		}
		_, err := os.ReadDir(p.target)
		return err
	})
}

// shows reports whether the target shows a file with that content.
func (p *pod) shows(content string) bool {
	b, err := os.ReadFile(filepath.Join(p.target, "file"))
	return err == nil && string(b) == content
}

// process is a process in a pod's cgroup.
type process struct {
	*exec.Cmd
	output output.Buffer
	done   chan struct{}
}

// run starts a program in the cgroup of a pod, as a user without rights; uid "" is no pod.
func (e *env) run(t testing.TB, uid string, env []string, args ...string) *process {
	t.Helper()
	return e.runIn(t, uid, "", env, args...)
}

// runIn is run in a mount namespace of its own, which a script of root prepares; "" is none.
func (e *env) runIn(t testing.TB, uid, image string, env []string, args ...string) *process {
	t.Helper()
	// As kubelet's cgroup driver cgroupfs names it, below a cgroup of the test's own.
	own := filepath.Join("/sys/fs/cgroup/pids", fmt.Sprintf("s3csi-%d-%d", os.Getpid(), time.Now().UnixNano()))
	cgroup := own
	if uid != "" {
		cgroup = filepath.Join(own, "kubepods/burstable/pod"+uid, "client")
	}
	if err := os.MkdirAll(cgroup, 0o755); err != nil {
		t.Skipf("needs cgroups: %v", err)
	}
	script := `exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"`
	name := filepath.Base(args[0])
	if image != "" {
		args = append([]string{"sh", "-c", "set -e\n" + image + "\n" + script, "sh"}, args...)
		script = `exec unshare --mount --propagation slave -- "$@"`
	}
	script = fmt.Sprintf("echo $$ >%s/cgroup.procs && %s", cgroup, script)
	t.Cleanup(func() { // after the process has ended
		for dir := cgroup; dir != "/sys/fs/cgroup/pids"; dir = filepath.Dir(dir) {
			_ = os.Remove(dir)
		}
	})
	return e.execute(t, name, env, append([]string{"sh", "-c", script, "sh"}, args...)...)
}

// asRoot starts a program outside of pods, with all rights.
func (e *env) asRoot(t testing.TB, env []string, args ...string) *process {
	t.Helper()
	return e.execute(t, filepath.Base(args[0]), env, args...)
}

func (e *env) execute(t testing.TB, name string, env []string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.CommandContext(context.WithoutCancel(t.Context()), args[0], args[1:]...), done: make(chan struct{})}
	p.Env = append([]string{"PATH=/usr/bin:/bin", "HOME=/nonexistent"}, env...)
	p.Stdout, p.Stderr = &p.output, &p.output
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("output of %s: %s", name, p.output.String())
		}
	})
	return p
}

func (p *process) kill() {
	_ = unix.Kill(-p.Process.Pid, unix.SIGKILL)
	<-p.done
}

// program is the path of one of the built programs, which every user may execute.
func (e *env) program(name string) string { return filepath.Join(e.Clients, name) }

// s3 is the environment of a client that reaches the bucket.
func (e *env) s3() []string {
	return []string{
		"AWS_ACCESS_KEY_ID=" + e.Rig.S3.Keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY=" + e.Rig.S3.Keys.SecretAccessKey, "AWS_REGION=" + e.Rig.S3.Region,
	}
}

// rclone are the arguments of Debian's rclone for the bucket.
func (e *env) rclone(t testing.TB, command, mountpoint string) []string {
	t.Helper()
	program, err := exec.LookPath("rclone")
	if err != nil {
		t.Skip("needs rclone of Debian: make setup installs it")
	}
	return []string{
		program, command, ":s3:" + bucket, mountpoint, "--allow-non-empty", "--allow-other", "--config=/dev/null", "--s3-provider=Other", "--s3-env-auth=true",
		"--s3-no-check-bucket=true", "--s3-endpoint=" + e.Rig.S3.Endpoint, "--s3-region=" + e.Rig.S3.Region, "--dir-cache-time=1s", "--umask=0",
	}
}

// client starts rclone in the pod, with the descriptor from the starter.
func (p *pod) client() *process {
	p.t.Helper()
	args := append([]string{p.program("s3-csi-fuse-starter"), "--fd-passing-socket-path", p.shortSocket(), "--"}, p.rclone(p.t, "mount2", "/dev/fd/3")...)
	return p.run(p.t, p.uid, p.s3(), args...)
}

// shortSocket is the socket's path as a container has it, which is shorter than kubelet's.
func (p *pod) shortSocket() string {
	dir := filepath.Join(p.Dir, "e-"+p.uid)
	_ = os.Symlink(filepath.Dir(p.socket), dir)
	return filepath.Join(dir, socket)
}

// connectFrom connects as a process of a pod; "" is no pod. What gets the descriptor keeps it.
func (p *pod) connectFrom(uid string) *process {
	p.t.Helper()
	return p.run(p.t, uid, nil, p.program("s3-csi-fuse-starter"), "--fd-passing-socket-path", p.shortSocket(), "--timeout", "20s", "--", "sleep", "600")
}

// hostile starts a client that behaves in one way.
func (p *pod) hostile(kind string) *process {
	p.t.Helper()
	program, err := p.hostileProgram()
	if err != nil {
		p.t.Fatal(err)
	}
	c := p.run(p.t, p.uid, []string{hostile.Env + "=" + kind, osfile.EnvFuseSocket + "=" + p.shortSocket()}, program)
	rigtest.Await(p.t, eventually, "the client that is "+kind, func() bool { return strings.Contains(c.output.String(), hostile.Ready) })
	return c
}
