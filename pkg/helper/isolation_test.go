package helper

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
)

// These tests are of real processes with real users: a helper of a mount's uid, its client, and attackers of the same uid and
// of another one.
const (
	mountUID = 2300001
	otherUID = 2300002
)

// exchangeVariable names the exchange program for realHelper.
const exchangeVariable = "S3CSI_TEST_EXCHANGE"

// realHelper is this test binary as a helper.
func realHelper() int {
	if err := Run(context.Background(), Program{Version: "test", Exchange: os.Getenv(exchangeVariable)}, os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// isolated is a helper as a process of its own, with its client.
type isolated struct {
	t      *testing.T
	dir    string // everybody can pass through
	socket string
	peer   *Peer
	helper int
	log    string
}

func newIsolated(t *testing.T, exchangeMode os.FileMode, how string) *isolated {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to start processes of other users")
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs /dev/fuse: %v", err)
	}
	defer fuse.Close()
	dir, err := os.MkdirTemp("", "isolation") //nolint:usetesting // of which others cannot pass the parent
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	i := &isolated{t: t, dir: dir, socket: dir + "/sock", log: dir + "/log"}
	i.must(os.Chmod(dir, 0o755))
	helpertest.Copy(t, dir+"/program", 0o755)
	exchange := dir + "/exchange" + how
	helpertest.Copy(t, exchange, exchangeMode)
	state := dir + "/state"
	i.must(os.Mkdir(state, 0o700))
	i.must(os.Chown(state, mountUID, mountUID))
	socket, err := Listen(i.socket)
	i.must(err)
	defer socket.Close()
	log, err := os.OpenFile(i.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	i.must(err)
	defer log.Close()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), dir+"/program", "helper", "--name", "test", "--state-dir", state)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = socket, log, log
	cmd.Env, cmd.SysProcAttr = []string{exchangeVariable + "=" + exchange}, as(mountUID)
	i.must(cmd.Start())
	i.helper, i.peer = cmd.Process.Pid, NewPeer(Dial(i.socket))
	t.Cleanup(func() {
		_, _ = i.peer.Quit(context.Background())
		if err := cmd.Wait(); err != nil {
			t.Errorf("the helper: %v", err)
		}
	})
	_, err = i.peer.Status(bounded(t))
	i.must(err)
	return i
}

func as(uid uint32) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uid, Gid: uid}}
}

func (i *isolated) must(err error) {
	i.t.Helper()
	if err != nil {
		i.t.Fatal(err)
	}
}

// start runs a client that only waits.
func (i *isolated) start(keys credentials.Keys, order credentials.Order) Status {
	i.t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	i.must(err)
	defer fuse.Close()
	s, err := i.peer.Start(bounded(i.t), StartRequest{
		Client: "stand-in", Command: client.Command{Argv: helpertest.Argv(i.dir+"/program", "wait:/nowhere"), Env: []string{}}, Keys: keys, Order: order,
	}, fuse)
	i.must(err)
	return s
}

// attacker is a process that tries something.
type attacker struct {
	i     *isolated
	uid   uint32
	lines chan string // that it says, until it ends
	end   func()
	fails bool // it is to get nothing
}

func (i *isolated) attacker(uid uint32, args ...string) *attacker {
	i.t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(i.t.Context()), i.dir+"/program", append([]string{attackMode}, args...)...)
	cmd.SysProcAttr = as(uid)
	in, err := cmd.StdinPipe()
	i.must(err)
	out, err := cmd.StdoutPipe()
	i.must(err)
	i.must(cmd.Start())
	a := &attacker{i: i, uid: uid, lines: make(chan string, 1), fails: true, end: sync.OnceFunc(func() { _ = in.Close() })}
	go func() {
		defer close(a.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			a.lines <- s.Text()
		}
		_ = cmd.Wait()
	}()
	i.t.Cleanup(a.stop)
	return a
}

// stop ends it.
func (a *attacker) stop() {
	a.i.t.Helper()
	a.end()
	for line := range a.lines {
		a.judge(line)
	}
}

func (a *attacker) judge(line string) {
	a.i.t.Helper()
	if a.fails && strings.HasPrefix(line, "GOT") {
		a.i.t.Errorf("a process of uid %d: %s", a.uid, line)
	}
}

// awaits waits for it to say something.
func (a *attacker) awaits(prefix string) string {
	a.i.t.Helper()
	for limit := time.After(time.Minute); ; {
		select {
		case line, more := <-a.lines:
			switch {
			case !more:
				a.i.t.Fatalf("the attacker ended and never said %q", prefix)
			case strings.HasPrefix(line, prefix):
				return line
			}
			a.judge(line)
		case <-limit:
			a.i.t.Fatalf("the attacker does not say %q", prefix)
		}
	}
}

// environ is a variable of a process, as only root can read it.
func (i *isolated) environ(pid int, name string) string {
	i.t.Helper()
	body, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	i.must(err)
	for v := range strings.SplitSeq(string(body), "\x00") {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	i.t.Fatalf("process %d has no %s", pid, name)
	return ""
}

func TestOnlyTheTokenGetsASessionAlsoUnderLoad(t *testing.T) {
	t.Parallel()
	i := newIsolated(t, 0o711, "")
	s := i.start(testKeys, credentials.Order{})
	url, token := i.environ(s.ClientPID, envFullURI), i.environ(s.ClientPID, envAuthToken)
	_, port, _ := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(url, "http://"), endpointPath), ":")
	var all []*attacker
	for uid, args := range map[uint32][]string{mountUID: {"flood", port}, otherUID: {"flood", port, "held"}} {
		a := i.attacker(uid, args...)
		a.awaits("flooding")
		all = append(all, a)
	}
	scanner := i.attacker(otherUID, "scan", port)
	// Every request of the client is answered while others try.
	i.attacker(mountUID, "ask", port, token).awaits("asked")
	if fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", i.helper)); err != nil || len(fds) > 2*maxReading+30 {
		t.Errorf("the helper has %d descriptors: %v", len(fds), err)
	}
	scanner.awaits("scanned")
	for _, a := range append(all, scanner) {
		a.stop()
	}
}

func TestTheHelpersSocketIsForTheDriverAlone(t *testing.T) {
	t.Parallel()
	i := newIsolated(t, 0o711, "")
	for _, open := range []bool{false, true} {
		if open { // whatever the file's mode: the helper looks who asks
			i.must(os.Chmod(i.socket, 0o666))
		}
		for _, uid := range []uint32{mountUID, otherUID} {
			a := i.attacker(uid, "connect", i.socket)
			line := a.awaits("refused")
			if want := map[bool]string{false: "permission denied", true: "is not allowed to send requests to this helper"}[open]; !strings.Contains(line, want) {
				t.Errorf("uid %d, open %v: %s", uid, open, line)
			}
		}
	}
	if fi, err := os.Stat(i.dir + "/state"); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the state directory: %v, %v", fi.Mode(), err)
	}
}

func TestHelperAndExchangeProgramCannotBeTraced(t *testing.T) {
	t.Parallel()
	for _, mode := range []os.FileMode{0o711, 0o755} {
		i := newIsolated(t, mode, "")
		pidFile := i.dir + "/state/exchange"
		i.start(credentials.Keys{}, orderNamed("hang:"+pidFile))
		exchange := pidIn(t, pidFile)
		for _, uid := range []uint32{mountUID, otherUID} {
			a := i.attacker(uid, "look", strconv.Itoa(i.helper), strconv.Itoa(exchange))
			a.awaits("looked into " + strconv.Itoa(i.helper))
			a.awaits("looked into " + strconv.Itoa(exchange))
			a.stop()
		}
		for _, pid := range []int{i.helper, exchange} {
			proc := "/proc/" + strconv.Itoa(pid)
			limits, err := os.ReadFile(proc + "/limits")
			i.must(err)
			if !slices.ContainsFunc(strings.Split(string(limits), "\n"), func(l string) bool {
				return slices.Equal(strings.Fields(l), []string{"Max", "core", "file", "size", "0", "0", "bytes"})
			}) {
				t.Errorf("process %d may dump core:\n%s", pid, limits)
			}
			for _, file := range []string{"cmdline", "environ"} {
				if body, err := os.ReadFile(proc + "/" + file); err != nil || strings.Contains(string(body), "canary") {
					t.Errorf("a secret is in %s of process %d: %q, %v", file, pid, body, err)
				}
			}
		}
	}
}

// A program that its user cannot read is protected from its first instruction on.
func TestAnUnreadableExchangeProgramCannotBeCaughtAtItsStart(t *testing.T) {
	t.Parallel()
	i := newIsolated(t, 0o711, "")
	s := i.start(testKeys, credentials.Order{})
	a := i.attacker(mountUID, "pounce", strconv.Itoa(i.helper), strconv.Itoa(s.ClientPID))
	a.awaits("pouncing")
	const sessions = 5
	i.must(i.peer.Renew(bounded(t), credentials.Keys{}, orderNamed("ok:2s")))
	since := uint64(0)
	for {
		s, err := i.peer.WaitStatus(bounded(t), since)
		i.must(err)
		if since = s.Revision; s.Session.Renewals >= sessions {
			break
		}
		if s.Session.Error != "" && s.Session.Kind != "unauthenticated" {
			t.Fatalf("%+v", s.Session)
		}
	}
	a.awaits("missed") // it was there
	a.stop()
}

// Where the program can be read, as in a developer's directory, one that is traced gets no order.
func TestExchange_TracedProgramGetsNoOrder(t *testing.T) {
	t.Parallel()
	i := newIsolated(t, 0o755, "+slow")
	s := i.start(testKeys, credentials.Order{})
	a := i.attacker(mountUID, "pounce", strconv.Itoa(i.helper), strconv.Itoa(s.ClientPID))
	a.awaits("pouncing")
	a.fails = false
	i.must(i.peer.Renew(bounded(t), credentials.Keys{}, orderNamed("ok:1h")))
	for !strings.Contains(a.awaits("GOT"), "a trace") {
		continue
	}
	since := s.Revision
	for {
		s, err := i.peer.WaitStatus(bounded(t), since)
		i.must(err)
		if since = s.Revision; s.Session.Renewals > 0 {
			t.Fatal("the traced program was given the order")
		}
		if s.Session.Failures > 0 {
			if !fault.Is(s.Session.Fault(), fault.Denied) || !strings.Contains(s.Session.Error, "traces it") {
				t.Errorf("%+v", s.Session)
			}
			break
		}
	}
}
