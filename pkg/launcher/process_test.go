package launcher_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

func field(t *testing.T, pid int, name string) string {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(status), "\n") {
		if key, value, _ := strings.Cut(line, ":"); key == name {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	return ""
}

func links(t *testing.T, pid int) map[string]string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, e := range entries {
		link, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err == nil { // else it was closed meanwhile
			found[e.Name()] = link
		}
	}
	return found
}

func TestHelperAndClientHaveNoPrivilegesAndTheirOwnUID(t *testing.T) {
	before := field(t, os.Getpid(), "CapBnd")
	u := start(t, firstUID)
	s := u.run("self", "fds", "open:/dev/fuse", "wait:/nowhere")
	own := fmt.Sprint(firstUID)
	four := strings.Join([]string{own, own, own, own}, " ")
	for who, pid := range map[string]int{"helper": s.PID, "client": s.ClientPID} {
		for name, want := range map[string]string{
			"Uid": four, "Gid": four, "Groups": "", "NoNewPrivs": "1", "Umask": "0077",
			"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
		} {
			if got := field(t, pid, name); got != want {
				t.Errorf("%s: %s is %q, want %q", who, name, got, want)
			}
		}
		if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err != nil || cwd != "/" {
			t.Errorf("%s: working directory %q, %v", who, cwd, err)
		}
		limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
		if err != nil || !strings.Contains(strings.Join(strings.Fields(string(limits)), " "), "core file size 0 0") {
			t.Errorf("%s: core dumps are possible (%v)", who, err)
		}
	}
	if sid, err := unix.Getsid(s.PID); err != nil || sid != s.PID {
		t.Errorf("helper's session: %d, %v", sid, err)
	}
	if line := u.says("open "); line != "open open /dev/fuse: permission denied" {
		t.Errorf("the client's own try at /dev/fuse: %s", line)
	}
	if line := u.says("fds "); strings.Count(line, "=") != 4 || !strings.HasSuffix(line, " 3=/dev/fuse") || !strings.HasPrefix(line, "fds 0=/dev/null 1=pipe:") {
		t.Errorf("the client's descriptors: %s", line)
	}
	for fd, link := range links(t, s.PID) {
		switch {
		case link == os.DevNull, link == filepath.Join(u.state(), launcher.LogFile):
		case strings.HasPrefix(link, "socket:") && fd != "0", strings.HasPrefix(link, "pipe:"), strings.HasPrefix(link, "anon_inode:"):
		case strings.HasPrefix(link, "/sys/fs/cgroup/"): // Go's runtime watches its CPU limit
		default:
			t.Errorf("the helper holds descriptor %s: %s", fd, link)
		}
	}
	if after := field(t, os.Getpid(), "CapBnd"); after != before || field(t, os.Getpid(), "NoNewPrivs") != "0" {
		t.Errorf("the driver itself lost privileges: CapBnd %s, was %s", after, before)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		status, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
		if err == nil && strings.Contains(string(status), "NoNewPrivs:\t1") {
			t.Errorf("thread %s of the driver stays without privileges", task.Name())
		}
	}
}

func TestClientIsOOMKilledBeforeTheHelper(t *testing.T) {
	u := start(t, firstUID+1)
	s := u.run("wait:/nowhere")
	score := func(pid int) (n int) {
		body, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = fmt.Sscan(string(body), &n)
		return n
	}
	if h, c := score(s.PID), score(s.ClientPID); c <= h {
		t.Errorf("helper %d, client %d", h, c)
	}
}

func TestKeysAreNotInCommandLinesEnvironmentsOrFiles(t *testing.T) {
	u := start(t, firstUID+2)
	s := u.run("credentials", "leak", "wait:/nowhere")
	if line := u.says("credentials "); !strings.HasPrefix(line, "credentials 200 AKIDCANARY ") {
		t.Fatal(line)
	}
	u.says("leak ")
	var files []string
	for _, pid := range []int{s.PID, s.ClientPID} {
		files = append(files, fmt.Sprintf("/proc/%d/cmdline", pid), fmt.Sprintf("/proc/%d/environ", pid))
	}
	entries, err := os.ReadDir(u.state())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		files = append(files, filepath.Join(u.state(), e.Name()))
	}
	if len(files) < 5 {
		t.Errorf("no log among %q", files)
	}
	for _, file := range files {
		body, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, secret := range []string{keys.SecretAccessKey, keys.SessionToken, keys.AccessKeyID} {
			// The access key id is printed by the client here; it is not a secret.
			if strings.Contains(string(body), secret) && (secret != keys.AccessKeyID || !strings.HasSuffix(file, launcher.LogFile)) {
				t.Errorf("%s holds %s", file, secret)
			}
		}
	}
}

func TestOnlyTheDriversUserIsAnswered(t *testing.T) {
	u := start(t, firstUID+3)
	u.hello()
	// What the file's mode forbids is allowed here, so that the check behind it shows.
	if err := os.Chmod(filepath.Join(u.dir, "sock"), 0o666); err != nil {
		t.Fatal(err)
	}
	for who, uid := range map[string]int{"the client's own uid": firstUID + 3, "a stranger": 65534} {
		var out strings.Builder
		cmd := exec.Command(u.program, "-test.run=TestDialAsAnotherUser$", "-test.v")
		cmd.Dir, cmd.Stdout, cmd.Stderr = "/", &out, &out
		cmd.Env = []string{"DIAL=" + filepath.Join(u.dir, "sock")}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: 65534}}
		if err := cmd.Run(); err != nil || !strings.Contains(out.String(), fmt.Sprintf("refused: ask the helper (hello): uid %d is not allowed", uid)) {
			t.Errorf("%s: %v\n%s", who, err, out.String())
		}
	}
	if s := u.hello(); s.State != helper.StateIdle {
		t.Errorf("status: %+v", s)
	}
}

// TestDialAsAnotherUser is run by another test, as another user.
func TestDialAsAnotherUser(t *testing.T) {
	path := os.Getenv("DIAL")
	if path == "" {
		t.Skip("is a part of TestOnlyTheDriversUserIsAnswered")
	}
	// The socket was made by root, as a driver's is, so this side has no objection.
	_, err := helper.NewPeer(helper.Dial(path)).Status(bounded(t))
	if !fault.Is(err, fault.Denied) {
		t.Fatalf("answered: %v", err)
	}
	fmt.Println("refused:", err)
}

func TestSocketOfAnotherUserGetsNoKeys(t *testing.T) {
	u := prepare(t, firstUID+4)
	path := filepath.Join(u.state(), "sock")
	cmd := exec.Command(u.program, "-test.run=TestListenAsAnotherUser$", "-test.v")
	cmd.Dir = "/"
	cmd.Env = []string{"LISTEN=" + path}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: firstUID + 4, Gid: firstUID + 4}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		err = helper.NewPeer(helper.Dial(path)).Renew(bounded(t), keys, credentials.Order{})
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) { // it does not listen yet
			break
		}
	}
	if !fault.Is(err, fault.Denied) {
		t.Errorf("keys for a stranger's socket: %v", err)
	}
}

// TestListenAsAnotherUser is run by another test, as another user.
func TestListenAsAnotherUser(t *testing.T) {
	path := os.Getenv("LISTEN")
	if path == "" {
		t.Skip("is a part of TestSocketOfAnotherUserGetsNoKeys")
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	time.Sleep(time.Minute)
}

func TestHelperSurvivesItsDriverAndStartsAnotherClient(t *testing.T) {
	u := prepare(t, firstUID+5)
	cmd := exec.Command("/proc/self/exe", "driver", "test-1", u.dir, fmt.Sprint(u.uid))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errOut strings.Builder
	cmd.Stderr = &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("driver: %q %v %s", line, err, errOut.String())
	}
	s := u.run("wait:" + u.state() + "/go")
	if err := cmd.Process.Kill(); err != nil { // SIGKILL
		t.Fatal(err)
	}
	_ = cmd.Wait()
	time.Sleep(50 * time.Millisecond)

	if got := u.hello(); got.PID != s.PID || got.State != helper.StateRunning || got.ClientPID != s.ClientPID {
		t.Fatalf("after the driver's death: %+v", got)
	}
	// SIGTERM, as an orderly shutdown sends it, to the helper alone.
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP} {
		if err := unix.Kill(s.PID, sig); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond)
	if got := u.hello(); got.State != helper.StateRunning {
		t.Errorf("after signals: %+v", got)
	}
	if err := u.peer.End(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(u.state()+"/go", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	u.mustGo()
	if end, ok, err := helper.ReadEnd(u.state()); err != nil || !ok || !end.Expected || end.Code != 0 {
		t.Errorf("record: %+v %v %v", end, ok, err)
	}
}

func TestExitedClientIsReportedAndReplaced(t *testing.T) {
	u := start(t, firstUID+6)
	s := u.run("print:last words", "wait:/nowhere")
	u.says("last words")
	if err := unix.Kill(s.ClientPID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	got := u.until("the death", exited)
	if got.ExitCode != -1 || got.Signal != "SIGKILL" {
		t.Errorf("status: %+v", got)
	}
	if end, ok, err := helper.ReadEnd(u.state()); err != nil || !ok || end.Expected || end.Tail[0] != "last words" {
		t.Errorf("record: %+v %v %v", end, ok, err)
	}
	if again := u.run("credentials", "wait:/nowhere"); again.PID != s.PID || again.Starts != 2 {
		t.Errorf("second client: %+v", again)
	}
	u.says("credentials 200 ")
}

func TestWrongTokensDoNotKeepTheClientFromItsKeys(t *testing.T) {
	u := start(t, firstUID+7)
	u.run("wrong:1", "wrong:100", "credentials", "wait:/nowhere")
	u.says("wrong [403]")
	u.says("wrong [403 429]") // on a slow machine one of the last may be answered again
	u.says("credentials 200 ")
}

func TestKillEndsHelperAndClient(t *testing.T) {
	u := start(t, firstUID+8)
	u.run("ignore", "child", "wait:/nowhere")
	u.says("child <nil>")
	if !u.alive() {
		t.Fatal("not alive")
	}
	if err := u.p.Kill(bounded(t), u.uid); err != nil {
		t.Fatal(err)
	}
	if u.alive() {
		t.Error("still alive")
	}
	if _, err := u.peer.Status(bounded(t)); !errors.Is(err, helper.ErrGone) {
		t.Errorf("socket: %v", err)
	}
	if err := u.p.Kill(bounded(t), u.uid); err != nil {
		t.Errorf("again: %v", err)
	}
}

func TestKillRefusesUIDsOfUsers(t *testing.T) {
	p := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{UIDs: launcher.UIDRange{First: 5000, Last: 6000}})
	for _, uid := range []uint32{0, 1, 999, 65534, 65535, 1<<32 - 1, 1<<32 - 2} {
		if err := p.Kill(bounded(t), uid); !fault.Is(err, fault.Invalid) {
			t.Errorf("kill uid %d: %v", uid, err)
		}
		if _, err := p.Alive(bounded(t), uid); !fault.Is(err, fault.Invalid) {
			t.Errorf("look for uid %d: %v", uid, err)
		}
	}
}

// A mount from before a change of the range must still be found and ended.
func TestUIDRangeLimitsOnlyStart(t *testing.T) {
	u := start(t, firstUID+90)
	u.hello()
	other := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{UIDs: launcher.UIDRange{First: u.uid + 1, Last: u.uid + 1}})
	if alive, err := other.Alive(bounded(t), u.uid); err != nil || !alive {
		t.Errorf("alive %t, %v", alive, err)
	}
	if err := other.Kill(bounded(t), u.uid); err != nil {
		t.Error(err)
	}
	if u.alive() {
		t.Error("still alive")
	}
}

func TestBadUnitsAreRefused(t *testing.T) {
	socket, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	good := launcher.Unit{Name: "a", UID: firstUID, GID: firstUID, StateDir: "/nowhere/state", Socket: socket}
	for what, change := range map[string]func(*launcher.Unit){
		"no name": func(u *launcher.Unit) { u.Name = "" }, "root": func(u *launcher.Unit) { u.UID = 0 }, "root's group": func(u *launcher.Unit) { u.GID = 0 },
		"relative": func(u *launcher.Unit) { u.StateDir = "state" }, "no socket": func(u *launcher.Unit) { u.Socket = nil }, "no directory": func(*launcher.Unit) {},
	} {
		u := good
		change(&u)
		if err := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{}).Start(bounded(t), u); err == nil {
			t.Errorf("%s: started", what)
		}
	}
}

func TestExitedHelpersAreReaped(t *testing.T) {
	u := start(t, firstUID+9)
	pid := u.hello().PID
	if _, err := u.peer.Quit(bounded(t)); err != nil {
		t.Fatal(err)
	}
	u.mustGo()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		u.alive()
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("process %d is a zombie", pid)
		}
	}
}

func TestLogIsNotOpenedThroughLinks(t *testing.T) {
	for name, plant := range map[string]func(victim, path string) error{
		"symlink": os.Symlink, "hard link": os.Link,
		"fifo": func(_, path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			u := prepare(t, firstUID+10)
			victim := filepath.Join(u.dir, "victim")
			if err := os.WriteFile(victim, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := plant(victim, filepath.Join(u.state(), launcher.LogFile)); err != nil {
				t.Fatal(err)
			}
			if err := startUnit("x", u.dir, u.uid); err == nil {
				t.Error("started")
			}
			if fi, err := os.Stat(victim); err != nil || fi.Sys().(*syscall.Stat_t).Uid != 0 {
				t.Errorf("the victim changed hands: %v", err)
			}
		})
	}
}

func TestIdleHelperUsesLittleMemory(t *testing.T) {
	u := start(t, firstUID+11)
	s := u.run("credentials", "wait:/nowhere")
	u.says("credentials 200 ")
	time.Sleep(100 * time.Millisecond)
	rollup, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", s.PID))
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for line := range strings.SplitSeq(string(rollup), "\n") {
		var kb int
		if key, value, _ := strings.Cut(line, ":"); strings.HasPrefix(key, "Private_") {
			_, _ = fmt.Sscan(value, &kb)
			total += kb
		}
	}
	t.Logf("private memory of a helper whose client runs: %d KiB", total)
	if limit := memoryLimit; total > limit {
		t.Errorf("more than %d KiB", limit)
	}
}

func TestStartStopsWithItsContext(t *testing.T) {
	u := prepare(t, firstUID+12)
	socket, err := helper.Listen(filepath.Join(u.dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err = u.p.Start(ctx, launcher.Unit{Name: "a", UID: u.uid, GID: u.uid, StateDir: u.state(), Socket: socket})
	if !errors.Is(err, context.Canceled) || u.alive() {
		t.Errorf("started: %v", err)
	}
}

func TestListReturnsTheUIDsThatHaveProcesses(t *testing.T) {
	u, other := start(t, firstUID+60), start(t, firstUID+61)
	narrow := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{UIDs: launcher.UIDRange{First: firstUID + 60, Last: firstUID + 60}})
	want := []launcher.UnitInfo{{UID: u.uid}}
	if list, err := narrow.List(bounded(t)); err != nil || !slices.Equal(list, want) {
		t.Errorf("%+v %v, want %+v", list, err, want)
	}
	list, err := u.p.List(bounded(t))
	if err != nil || !slices.Contains(list, want[0]) || !slices.Contains(list, launcher.UnitInfo{UID: other.uid}) {
		t.Errorf("%+v %v", list, err)
	}
	if err := u.p.Kill(bounded(t), u.uid); err != nil {
		t.Fatal(err)
	}
	if list, err := narrow.List(bounded(t)); err != nil || len(list) != 0 {
		t.Errorf("after its end: %+v %v", list, err)
	}
	if n, err := u.p.OOMKills(bounded(t), "test-1", u.uid); n != 0 || err != nil {
		t.Errorf("OOM kills: %d %v", n, err)
	}
}
