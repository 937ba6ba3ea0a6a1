package helper

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
)

// standInExchange is this test binary as the program that makes sessions. The end of its file's name says how it gets ready,
// and an order's name what it answers.
func standInExchange() int {
	switch _, how, _ := strings.Cut(filepath.Base(os.Args[0]), "+"); how {
	case "mute":
		time.Sleep(time.Hour) // without cgo, the runtime takes an empty select for a deadlock
	case "other":
		fmt.Println("Usage: ...")
		return 2
	case "dead":
		fmt.Fprintln(os.Stderr, "cannot\nrun \x1b[31mhere")
		return 3
	case "slow": // leaves time to attach to it
		time.Sleep(3 * time.Second)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 1
	}
	fmt.Println("ready")
	line, err := bufio.NewReaderSize(os.Stdin, 64<<10).ReadString('\n')
	var order credentials.Order
	if err != nil || json.Unmarshal([]byte(line), &order) != nil {
		return 1
	}
	verb, rest, _ := strings.Cut(order.Name, ":")
	keys := credentials.Keys{AccessKeyID: "AKIDMADE", SecretAccessKey: "canary-made-secret", SessionToken: "canary-made-token"}
	switch verb {
	case "ok":
		life, _ := time.ParseDuration(rest)
		keys.Expires = time.Now().Add(life)
	case "self":
		list := fds()
		keys.AccessKeyID = strings.Join(append(os.Environ(), append(list, os.Args[1:]...)...), " ")
	case "error":
		kind, text, _ := strings.Cut(rest, ":")
		return say(map[string]any{"error": map[string]string{"kind": kind, "text": text + " " + order.Token}})
	case "hang":
		signal.Ignore(syscall.SIGTERM)
		if rest != "" {
			_ = os.WriteFile(rest, []byte(strconv.Itoa(os.Getpid())), 0o600)
		}
		time.Sleep(time.Hour) // without cgo, the runtime takes an empty select for a deadlock
	case "child":
		child, err := os.StartProcess("/proc/self/exe", helpertest.Argv("child", "wait:/nowhere"), &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
		if err != nil {
			return 1
		}
		_ = os.WriteFile(rest, []byte(strconv.Itoa(child.Pid)), 0o600)
	case "garbage":
		fmt.Println("canary-made-secret")
		return 0
	case "long":
		fmt.Println(strings.Repeat("x", 2*maxAnswer))
		return 0
	case "empty":
		return say(map[string]any{})
	case "crash":
		fmt.Fprintln(os.Stderr, "panic: "+order.Token)
		return 2
	}
	return say(map[string]any{"keys": keys})
}

func say(answer any) int {
	if json.NewEncoder(os.Stdout).Encode(answer) != nil {
		return 1
	}
	return 0
}

func fds() (list []string) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if link, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(link, "anon_inode:") &&
			!strings.HasPrefix(link, "/proc/") && !strings.HasPrefix(link, "/sys/") {
			list = append(list, e.Name()+"="+strings.TrimRight(link, "[]0123456789"))
		}
	}
	return list
}

// exchangeProgram is this test binary under a name that says how it gets ready.
func exchangeProgram(t testing.TB, how string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "exchange"+how)
	if err := os.Symlink("/proc/"+strconv.Itoa(os.Getpid())+"/exe", path); err != nil {
		t.Fatal(err)
	}
	return path
}

func newTestExchanger(t testing.TB, how string) *exchanger {
	t.Helper()
	return newExchanger(exchangeProgram(t, how), options{}.restricted)
}

func orderNamed(name string) credentials.Order {
	o := testOrder
	o.Name = name
	return o
}

func TestExchange_ProgramGetsTheOrderAndNothingElse(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "canary-of-the-helper")
	keys, err := newTestExchanger(t, "").make(bounded(t), orderNamed("self"))
	if err != nil {
		t.Fatal(err)
	}
	for _, canary := range []string{"canary", "/dev/fuse", "socket:"} {
		if strings.Contains(keys.AccessKeyID, canary) {
			t.Errorf("%s is in what it was started with: %s", canary, keys.AccessKeyID)
		}
	}
	fields := strings.Fields(keys.AccessKeyID)
	for _, want := range []string{"AWS_CONFIG_FILE=/dev/null", "AWS_EC2_METADATA_DISABLED=true", "0=pipe:", "1=pipe:", "2=pipe:", ExchangeMode} {
		if !slices.Contains(fields, want) {
			t.Errorf("%s is missing in %s", want, keys.AccessKeyID)
		}
	}
	if n := len(fields) - len(exchangeEnvironment()); n != 4 {
		t.Errorf("%d descriptors and arguments: %s", n, keys.AccessKeyID)
	}
}

func TestExchange_ReturnsTheProgramsSession(t *testing.T) {
	keys, err := newTestExchanger(t, "").make(bounded(t), orderNamed("ok:1h"))
	if err != nil || keys.AccessKeyID != "AKIDMADE" || keys.SessionToken != "canary-made-token" || time.Until(keys.Expires) < 59*time.Minute {
		t.Errorf("%v until %s: %v", keys, keys.Expires, err)
	}
}

func TestExchange_ErrorsKeepTheirKind(t *testing.T) {
	for _, tc := range []struct {
		how, name string
		kind      fault.Kind
		text      string
	}{
		{"", "error:denied:not allowed", fault.Denied, "not allowed"},
		{"", "error:unauthenticated:expired", fault.Unauthenticated, "expired"},
		{"", "error:timeout:slow", fault.Timeout, "slow"},
		{"", "error:busy:throttled", fault.Busy, "throttled"},
		{"", "error:precondition:p", fault.Precondition, "p"},
		{"", "error:unavailable:u", fault.Unavailable, "u"},
		{"", "error:later:of a newer program", fault.Unknown, "of a newer program"},
		{"", "garbage", fault.Unknown, "malformed answer"},
		{"", "long", fault.Unknown, "too long"},
		{"", "empty", fault.Unknown, "without keys"},
		{"", "crash", fault.Unknown, "no answer: the program exited; stderr: panic: "},
		{"+other", "ok:1h", fault.Unknown, "unexpected first line"},
		{"+dead", "ok:1h", fault.Unknown, "waiting for it to become ready: the program exited; stderr: cannot run here"},
	} {
		t.Run(tc.how+tc.name, func(t *testing.T) {
			t.Parallel()
			keys, err := newTestExchanger(t, tc.how).make(bounded(t), orderNamed(tc.name))
			if err == nil || fault.KindOf(err) != tc.kind || !strings.Contains(err.Error(), tc.text) || !keys.IsZero() {
				t.Errorf("%v, %v; want kind %d", keys, err, tc.kind)
			}
			if err != nil && strings.Contains(err.Error(), "canary-made") {
				t.Errorf("what could be a secret is in the error: %v", err)
			}
		})
	}
}

// gone waits for the end of a process.
func gone(t testing.TB, pid int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			return
		}
		if status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); err == nil && strings.Contains(string(status), ") Z ") {
			return // its new parent has not reaped it yet
		}
	}
	t.Errorf("process %d is still running", pid)
}

// pidIn waits for a process to write its number.
func pidIn(t testing.TB, path string) int {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if text, err := os.ReadFile(path); err == nil && len(text) > 0 {
			pid, err := strconv.Atoi(string(text))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("%s was not written", path)
	return 0
}

func TestExchange_UnresponsiveProgramIsKilled(t *testing.T) {
	for _, tc := range []struct{ how, name string }{{"+mute", ""}, {"", "hang:" + t.TempDir() + "/pid"}} {
		x := newTestExchanger(t, tc.how)
		x.timeout = 3 * time.Second // the program comes as far as to hang, on a busy machine too
		began := time.Now()
		_, err := x.make(bounded(t), orderNamed(tc.name))
		if !fault.Is(err, fault.Timeout) || !strings.Contains(err.Error(), "within 3s") || time.Since(began) < x.timeout {
			t.Errorf("%s%s: %v after %s", tc.how, tc.name, err, time.Since(began))
		}
		if path := strings.TrimPrefix(tc.name, "hang:"); path != "" {
			gone(t, pidIn(t, path))
		}
	}
}

func TestExchange_EndsWithItsContext(t *testing.T) {
	pid := t.TempDir() + "/pid"
	ctx, cancel := context.WithCancel(bounded(t))
	go func() { pidIn(t, pid); cancel() }()
	began := time.Now()
	if _, err := newTestExchanger(t, "").make(ctx, orderNamed("hang:"+pid)); !errors.Is(err, context.Canceled) || time.Since(began) > 9*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
	gone(t, pidIn(t, pid))
}

func TestExchange_ChildrenOfTheProgramAreKilled(t *testing.T) {
	pid := t.TempDir() + "/pid"
	if keys, err := newTestExchanger(t, "").make(bounded(t), orderNamed("child:"+pid)); err != nil || keys.IsZero() {
		t.Fatalf("%v, %v", keys, err)
	}
	gone(t, pidIn(t, pid))
}

func TestExchange_LeaksNoDescriptors(t *testing.T) {
	x := newTestExchanger(t, "")
	run := func() {
		_, _ = x.make(bounded(t), orderNamed("ok:1h"))
		_, _ = x.make(bounded(t), orderNamed("crash"))
		_, _ = (&exchanger{program: "/nowhere", timeout: time.Second, restricted: options{}.restricted}).make(bounded(t), testOrder)
	}
	run()
	before := openFDs(t)
	for range 3 {
		run()
	}
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestMissingExchangeProgramIsPrecondition(t *testing.T) {
	x := newExchanger("/nowhere/s3-csi-driver", options{}.restricted)
	if _, err := x.make(bounded(t), testOrder); !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "/nowhere/s3-csi-driver") {
		t.Errorf("%v", err)
	}
}
