package node

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// intruder is a process without capabilities that may reach nothing of the driver's.
type intruder struct {
	what string
	uid  int
	in   int // a process whose mount namespace it is in; 0: the host's
	own  []string
}

func (i intruder) owns(path string) bool {
	return slices.ContainsFunc(i.own, func(dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") })
}

func (i intruder) open(paths map[string]fs.FileMode) (opened []string) {
	for path, kind := range paths {
		program := kind.IsRegular() && executable(path)
		for _, what := range open(path, kind) {
			if (what != "read" || !program) && !i.owns(path) {
				opened = append(opened, what+" "+path)
			}
		}
		if strings.HasPrefix(filepath.Base(path), "s3-csi-") && kind.IsRegular() && !program {
			opened = append(opened, "could not execute "+path)
		}
	}
	return opened
}

func executable(path string) bool { return unix.Access(path, unix.X_OK) == nil }

// open gives what could be done with a path.
func open(path string, kind fs.FileMode) (could []string) {
	try := func(what string, flags int) {
		if fd, err := unix.Open(path, flags|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
			could = append(could, what)
			_ = unix.Close(fd)
		}
	}
	switch kind {
	case fs.ModeDir:
		try("list", unix.O_RDONLY|unix.O_DIRECTORY)
		if unix.Access(path, unix.W_OK) == nil {
			could = append(could, "write into")
		}
	case fs.ModeSocket:
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil && unix.Connect(fd, &unix.SockaddrUnix{Name: path}) == nil {
			could = append(could, "connect to")
		}
		_ = unix.Close(fd)
	case 0:
		try("read", unix.O_RDONLY)
		try("write", unix.O_WRONLY)
	}
	return could
}

// checkClient is the driver's command for a check of a client on the rig, whose node does not run. The check has the uids after --uid-range.
func (e *env) checkClient(client string, flags ...string) *exec.Cmd {
	e.t.Helper()
	args := append([]string{
		"check", "--client=" + client, "--bucket=" + bucket, "--prefix=checked", "--output=json", "--state-dir=" + e.State, "--cache-dir=" + e.Cache,
		"--client-dir=" + e.Clients, fmt.Sprintf("--uid-range=%d-%d", e.FirstUID, e.LastUID-100),
	}, append(rig.IsolationFlags(), flags...)...)
	ctx, cancel := context.WithTimeout(e.t.Context(), 2*time.Minute)
	e.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, e.Program, args...)
	cmd.Env = e.Environment()
	return cmd
}

// report runs a check of a service that can do everything, and returns the client's section.
func (e *env) report(cmd *exec.Cmd) (check.Section, int) {
	e.t.Helper()
	r, code := e.reports(cmd)
	for _, row := range r.Sections[0].Rows {
		if row.Needed && row.Result != check.Yes {
			e.t.Errorf("operations of the service: %+v", row)
		}
	}
	return r.Sections[1], code
}

// reports runs a check to its end. Nothing must be left of it on the node, nor in the bucket.
func (e *env) reports(cmd *exec.Cmd) (check.Report, int) {
	e.t.Helper()
	out, err := cmd.Output()
	exit := (*exec.ExitError)(nil)
	if err != nil && !errors.As(err, &exit) {
		e.t.Fatal(err)
	}
	e.noSecretIn("the report", out)
	var r check.Report
	if err := json.Unmarshal(out, &r); err != nil || len(r.Sections) != 2 {
		e.t.Fatalf("%v: %s\n%s", err, out, exit.Stderr)
	}
	if strings.Contains(string(out), "%!") {
		e.t.Errorf("a wrong format verb is in the report: %s", out)
	}
	e.nothingOfACheck()
	return r, cmd.ProcessState.ExitCode()
}

func (e *env) nothingOfACheck() {
	e.t.Helper()
	e.NothingLeft(e.t)
	for _, dir := range []string{e.State, e.Cache} {
		if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
			e.t.Errorf("left: %q, %v", left, err)
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), " "+e.State+"/") {
		e.t.Errorf("a mount is left, %v", err)
	}
	if keys := e.Keys(e.t, bucket, ""); len(keys) > 0 {
		e.t.Errorf("objects are left: %q", keys)
	}
}

// debian is the name under which the program rclone of Debian is declared. Its command mount2 takes a FUSE descriptor, and mount executes
// fusermount.
const debian = "debian-rclone"

// declaration is a config file that declares the program, with further settings of the declaration.
func (e *env) declaration(fuse, command, settings string) string {
	return fuseclients.DeclareRclone(e.Rig.S3, debian, fuse, command) + settings
}

// withSessions gives the driver keys of a user, and adds a token service to a config file's only backend: volumes with the driver's
// credentials get sessions.
func (e *env) withSessions(config string) string {
	e.t.Helper()
	keys, err := e.AddUser(e.t.Context(), "driver", `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`)
	if err != nil {
		e.t.Fatal(err)
	}
	e.Rig.S3.Keys = keys
	e.secrets = append(e.secrets, keys.SecretAccessKey)
	const backend = "addressing: path"
	if strings.Count(config, backend) != 1 {
		e.t.Fatalf("not one backend: %s", config)
	}
	return strings.Replace(config, backend, fmt.Sprintf("%s, sts: {endpoint: %q, kinds: [federationToken]}", backend, e.STS()), 1)
}

// declared installs a program of Debian under another name and writes a config file. It returns the driver's flag for it.
func (e *env) declared(program, name, config string) string {
	e.t.Helper()
	return fuseclients.Declare(e.t, e.Rig, program, name, config)
}

// slow lets an upload of a few MiB take as many seconds, crawling longer than anybody looks at it.
var (
	slow     = faultproxy.Faults{Bandwidth: 1 << 20}
	crawling = faultproxy.Faults{Bandwidth: 128 << 10}
)

// brief is a deadline that passes while such an upload goes on. The driver answers a second before it, so that the answer
// arrives on a machine with much else to do, too.
const brief = 2 * time.Second

// awaitBusy repeats an unpublish that fails until the answer says why a retry has to wait: not everything is known at once, and a busy
// machine's answer may come too late.
func (e *env) awaitBusy(v *csi.Volume, target string, words ...string) {
	e.t.Helper()
	e.await(20*time.Second, fmt.Sprintf("an unpublication to be told of %q", words), func() bool {
		err := e.tryUnpublish(brief, v, target)
		if err == nil {
			e.t.Fatalf("unpublished, where it was to be told of %q", words)
		}
		if grpcstatus.Code(err) == codes.DeadlineExceeded {
			return false
		}
		want(e.t, err, codes.Aborted)
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(err.Error(), w) })
	})
}

func random(size int) string {
	b := make([]byte, size)
	_, _ = rand.Read(b)
	return string(b)
}

// names are file names that S3 keys, command lines and listings have to get right.
var names = []string{
	"plain", "with space", " leading", "trailing ", "ünïcödé", "日本語", "emoji-🦀", "plus+sign", "per%cent%20", "a&b=c?d#e", "quote'\"", "semi;colon",
	"star*", "[brackets]", "dollar$HOME", "back\\slash", "-dash", "--double", ".hidden", "tilde~", "col:on", "at@2", strings.Repeat("long", 50),
}

// soon is how long the failure of a client may be seen: new opens work within that time. Tests that assert it, or another time, are
// named TestTimed…: make test runs them when nothing else runs.
const soon = time.Second

// eventually bounds waits for what an event causes. It is less than the minute between two reconcile passes.
const eventually = 20 * time.Second

const (
	podUID      = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"
	otherPodUID = "f2d7a6c0-1111-4a5b-9c3d-0123456789ab"
)

// podTarget is a target as kubelet makes it for a pod.
func (e *env) podTarget(uid, volume string) string {
	e.t.Helper()
	target := filepath.Join(e.Dir, "targets", "pods", uid, "volumes", "kubernetes.io~csi", volume, "mount")
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		e.t.Fatal(err)
	}
	return target
}

// publishAt publishes a volume at a target.
func (e *env) publishAt(v *csi.Volume, target string, changes ...change) {
	e.t.Helper()
	if err := e.tryPublish(time.Minute, v, target, changes...); err != nil {
		e.t.Fatalf("publishing %s at %s: %v", v.GetVolumeId(), target, err)
	}
}

// awaitRead waits until a file reads so, for at most limit.
func (e *env) awaitRead(limit time.Duration, path, content string) {
	e.t.Helper()
	e.await(limit, path+" to be read again", func() bool {
		b, err := os.ReadFile(path)
		return err == nil && string(b) == content
	})
}

// count is the sum of a metric's values over the labels that have all these words in them.
func (e *env) count(name string, words ...string) float64 {
	e.t.Helper()
	var sum float64
	for line := range strings.Lines(rigtest.Get(e.t, e.Driver, "/metrics")) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || !strings.HasPrefix(rest, "{") && !strings.HasPrefix(rest, " ") {
			continue
		}
		labels, value, _ := strings.Cut(rest, "} ")
		if strings.HasPrefix(rest, " ") {
			labels, value = "", rest[1:]
		}
		has := true
		for _, w := range words {
			has = has && strings.Contains(labels, w)
		}
		var f float64
		if _, err := fmt.Sscan(value, &f); has && err == nil {
			sum += f
		}
	}
	return sum
}

// stuckEnv is set in a process of this test's program that gets stuck: see stuckMain.
const stuckEnv = "S3CSI_TEST_STUCK"

// stuckMain opens a file close-on-exec and, when its input ends, starts a program. The child's execve(2) flushes the file first, and waits for
// its client. Until it is answered most of the child's files in /proc block, for root as well.
func stuckMain() int {
	fd, err := unix.Open(os.Getenv(stuckEnv), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		fmt.Println("open")
		_, _ = os.Stdin.Read(make([]byte, 1))
		_, err = syscall.ForkExec("/bin/true", []string{"true"}, nil)
	}
	fmt.Println(fd, err)
	return 1
}

// pod starts processes of a uid that respawn, in a PID namespace that root made for them, as a pod's are that chooses its
// uid freely. It returns when the first of them run.
func pod(t *testing.T, uid int) {
	t.Helper()
	script := fmt.Sprintf(`for i in 1 2 3 4; do (while :; do setpriv --reuid %[1]d --regid %[1]d --clear-groups sleep 0.2; done) & done; wait`, uid)
	spawn(t, exec.CommandContext(t.Context(), "sh", "-c", script), syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID})
	awaitProcess(t, uid, "sleep")
}

// spawn starts a command, which ends with the test at the latest together with all that it started.
func spawn(t *testing.T, cmd *exec.Cmd, attributes syscall.SysProcAttr) {
	t.Helper()
	attributes.Setpgid = true
	cmd.SysProcAttr = &attributes
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL); _ = cmd.Wait() })
}

// awaitProcess waits for a process of a uid and a name.
func awaitProcess(t *testing.T, uid int, name string) int {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		files, err := filepath.Glob("/proc/[0-9]*/status")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			var pid int
			if err == nil && strings.HasPrefix(string(text), "Name:\t"+name+"\n") && strings.Contains(string(text), fmt.Sprintf("\nUid:\t%d\t%[1]d\t", uid)) {
				if _, err := fmt.Sscanf(file, "/proc/%d/status", &pid); err == nil {
					return pid
				}
			}
		}
	}
	t.Fatalf("no process %s of uid %d", name, uid)
	return 0
}

// reports skips the test for another program of Mountpoint: it does not report its uploads, so the driver stops its mounts.
func reports(t *testing.T, client string) {
	t.Helper()
	if client == mountpoint {
		own(t)
	}
}

// in runs a program in the mount and PID namespaces of a process.
func in(t *testing.T, pid int, argv ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nsenter", append([]string{"-t", fmt.Sprint(pid), "--mount", "--pid"}, argv...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return string(out)
}

// look is a path's owner, group and permissions as stat shows them: "1:2 0750".
func look(t *testing.T, path string) string {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := fi.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d %04o", st.Uid, st.Gid, fi.Mode().Perm())
}

// refusal is a test that only wants to know whether something in it fails.
type refusal struct {
	testing.TB
	why string
}

type refused struct{}

func (r *refusal) Fatalf(format string, args ...any) {
	r.why = fmt.Sprintf(format, args...)
	panic(refused{})
}

// Errorf is for what cannot be taken away of something that never was.
func (r *refusal) Errorf(format string, args ...any) {
	if r.why == "" {
		r.TB.Errorf(format, args...)
	}
}

// stop ends containers, as a kubelet does before it unpublishes their volumes.
func stop(t *testing.T, cs ...*containers.Container) {
	t.Helper()
	for _, c := range cs {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// ours are the mounts of a volume in the namespace of a process.
func ours(t *testing.T, pid int, volume string) []*mountinfo.Info {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	found, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Source, "s3csi:"+volume+":"), false
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// own skips a test of what only the client does that is built here.
func own(t *testing.T) {
	t.Helper()
	if programs[mountpoint] != rig.OwnMountpoint {
		t.Skipf("%s names another program than %s, which alone does this", rig.EnvMountpoint, rig.OwnMountpoint)
	}
}

// anotherKey is a second secret of a user.
func (e *env) anotherKey(name string) map[string]string {
	e.t.Helper()
	keys, err := e.AddKey(e.t.Context(), name)
	if err != nil {
		e.t.Fatal(err)
	}
	e.secrets = append(e.secrets, keys.SecretAccessKey)
	return map[string]string{"accessKeyID": keys.AccessKeyID, "secretAccessKey": keys.SecretAccessKey}
}

// revoke makes a secret of a user worthless.
func (e *env) revoke(name string, secret map[string]string) {
	e.t.Helper()
	if err := e.RemoveKey(e.t.Context(), name, secret["accessKeyID"]); err != nil {
		e.t.Fatal(err)
	}
}

// s3fs is the name under which the program s3fs of Debian is declared. It reads keys once, and executes fusermount.
const s3fs = "debian-s3fs"

// declaredS3fs installs s3fs, and returns the driver's flag for its declaration.
func (e *env) declaredS3fs() (flag string) {
	e.t.Helper()
	if _, err := os.Stat("/bin/fusermount"); err == nil {
		if _, err := sandbox.ABI(); err != nil {
			e.t.Skip("libfuse 2 executes /bin/fusermount instead of the driver's program, and nothing prevents that: ", err)
		}
	}
	return e.declared("s3fs", s3fs, fuseclients.DeclareS3fs(e.Rig.S3, s3fs))
}

func (e *env) stats(limit time.Duration, v *csi.Volume, path string) (*csi.NodeGetVolumeStatsResponse, error) {
	return e.NodeGetVolumeStats(rigtest.Context(e.t, limit), &csi.NodeGetVolumeStatsRequest{VolumeId: v.GetVolumeId(), VolumePath: path})
}

// status runs the command.
func (e *env) status(args ...string) (stdout string, took time.Duration, err error) {
	e.t.Helper()
	cmd := exec.CommandContext(rigtest.Context(e.t, 30*time.Second), e.Program, append([]string{"status", "--state-dir=" + e.State}, args...)...)
	cmd.Env = e.Environment()
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	began := time.Now()
	if err = cmd.Run(); err != nil {
		err = errors.New(err.Error() + ": " + problem.String())
	}
	return out.String(), time.Since(began), err
}

// mountStatus is the status of the only mount of a volume.
func (e *env) mountStatus(v *csi.Volume) status.Mount {
	e.t.Helper()
	out, _, err := e.status("-o", "json")
	if err != nil { // such as a status that waits for a client that does not answer: the command is bounded
		e.t.Fatal(err)
	}
	e.noSecretIn("the status", []byte(out))
	var d status.Document
	if err := json.Unmarshal([]byte(out), &d); err != nil || d.Version != status.Version {
		e.t.Fatalf("%v: %s", err, out)
	}
	var found []status.Mount
	for _, m := range d.Mounts {
		if m.VolumeID == v.GetVolumeId() {
			found = append(found, m)
		}
	}
	if len(found) != 1 {
		e.t.Fatalf("volume %s has %d mounts: %s", v.GetVolumeId(), len(found), out)
	}
	return found[0]
}

func (e *env) awaitStatus(v *csi.Volume, what string, is func(m status.Mount) bool) (m status.Mount) {
	e.t.Helper()
	e.await(30*time.Second, what, func() bool { m = e.mountStatus(v); return is(m) })
	return m
}

// askInVain has a process ask a client that does not answer, until it does.
func (e *env) askInVain(target string) {
	e.t.Helper()
	cmd := exec.CommandContext(e.t.Context(), "stat", "-f", target)
	if err := cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = cmd.Wait() })
}

// container holds a copy of all mounts in a namespace of its own, as a running container does, and gives its pid.
func container(t *testing.T) (pid int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "unshare", "-m", "--propagation", "private", "sh", "-c", "echo; exec sleep 1000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

// logged waits for a line of the drivers' log that has all these words in it.
func (e *env) logged(words ...string) {
	e.t.Helper()
	e.await(10*time.Second, fmt.Sprintf("a line of the log with %q", words), func() bool {
		for line := range strings.Lines(e.Logs()) {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
				return true
			}
		}
		return false
	})
}
