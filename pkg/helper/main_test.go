package helper

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

func TestMain(m *testing.M) {
	// Processes that tests start end with syscall.Exit: with go test -cover, os.Exit would write to their output.
	if helpertest.IsClient() {
		syscall.Exit(helpertest.Client())
	}
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case ExchangeMode:
			syscall.Exit(standInExchange())
		case "helper":
			syscall.Exit(realHelper())
		case attackMode:
			syscall.Exit(attack(os.Args[2], os.Args[3:]))
		}
	}
	if flag.Parse(); flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(m.Run()) // the fuzzing engine leaves goroutines behind
	}
	// What started the tests may have left descriptors open; clients here must not inherit them.
	if err := closeInherited(); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// rig is a helper in this process, at a real socket.
type rig struct {
	t       testing.TB
	h       *helper
	peer    *Peer
	dir     string // its state directory
	socket  string
	program string // the stand-in client
	signals chan os.Signal
	cancel  context.CancelFunc
	ended   chan struct{} // closed when it has
}

var testKeys = credentials.Keys{AccessKeyID: "AKIDCANARY", SecretAccessKey: "canary/secret+key=1", SessionToken: "canary-session-token//=="}

// testOptions are those of a helper that needs no real mount.
func testOptions(stateDir string, log *os.File) options {
	return options{
		args: Arguments{StateDir: stateDir}, stderr: log, now: time.Now, cpuTime: proc.CPUTime,
		idleLimit: time.Minute, endGrace: time.Minute, idleQueue: time.Minute, idleSilent: time.Minute,
		random:    func() float64 { return 0 },
		checkFuse: func(*os.File) error { return nil },
		lookup: func(name string) (client.Client, error) {
			if name != "stand-in" {
				return client.Client{}, errors.New("unknown")
			}
			return client.Client{Name: name, Queue: func(line string) (q client.Queue, ok bool) {
				_, err := fmt.Sscanf(line, "queue %d %d", &q.Uploads, &q.Bytes)
				return q, err == nil
			}, Flushed: func(line string) (unsent int, ok bool) {
				_, err := fmt.Sscanf(line, "flushed %d", &unsent)
				return unsent, err == nil
			}}, nil
		},
	}
}

func newRig(t testing.TB, change ...func(*options)) *rig {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "sock")
	f, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	o := testOptions(state, log)
	for _, c := range change {
		c(&o)
	}
	program := helpertest.Program(t, dir) // which takes its time, and a helper's idle time counts from when it is made
	h, err := newHelper(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &rig{
		t: t, h: h, peer: NewPeer(Dial(socket)), dir: state, socket: socket, program: program,
		signals: make(chan os.Signal, 1), cancel: cancel, ended: make(chan struct{}),
	}
	go func() {
		defer close(r.ended)
		h.run(ctx, l.(*net.UnixListener), uint32(os.Getuid()), r.signals)
	}()
	t.Cleanup(func() {
		_, _ = r.peer.Quit(context.Background())
		r.mustEnd()
		cancel()
		_ = log.Close()
	})
	return r
}

func (r *rig) mustEnd() {
	r.t.Helper()
	select {
	case <-r.ended:
	case <-time.After(10 * time.Second):
		r.t.Fatal("the helper has not ended")
	}
}

func (r *rig) mustLive() {
	r.t.Helper()
	select {
	case <-r.ended:
		r.t.Fatal("the helper has ended")
	case <-time.After(100 * time.Millisecond):
	}
}

func (r *rig) log() string {
	r.t.Helper()
	log, err := os.ReadFile(filepath.Join(filepath.Dir(r.socket), "log"))
	if err != nil {
		r.t.Fatal(err)
	}
	return string(log)
}

// start runs a stand-in with a descriptor that leads nowhere.
func (r *rig) start(steps ...string) Status {
	r.t.Helper()
	s, err := r.tryStart(steps...)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func (r *rig) tryStart(steps ...string) (Status, error) { return r.tryStartWith(testKeys, steps...) }

// tryStartWithoutKeys leaves the helper those that it has.
func (r *rig) tryStartWithoutKeys(steps ...string) (Status, error) {
	return r.tryStartWith(credentials.Keys{}, steps...)
}

func (r *rig) tryStartWith(keys credentials.Keys, steps ...string) (Status, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return Status{}, err
	}
	defer null.Close()
	req := r.request(steps...)
	req.Keys = keys
	return r.peer.Start(bounded(r.t), req, null)
}

// request is for a stand-in.
func (r *rig) request(steps ...string) StartRequest {
	return StartRequest{
		Client:  "stand-in",
		Command: client.Command{Argv: helpertest.Argv(r.program, steps...), Env: []string{"PATH=/nowhere", "AWS_CONFIG_FILE=/etc/passwd", "GREETING=hello"}},
	}
}

// until waits for a status that pleases.
func (r *rig) until(what string, ok func(Status) bool) Status {
	r.t.Helper()
	ctx := bounded(r.t)
	var s Status
	for since := uint64(0); ; since = s.Revision {
		var err error
		if s, err = r.peer.WaitStatus(ctx, since); err != nil {
			r.t.Fatalf("waiting for %s: %v (last: %+v)\n%s", what, err, s, r.log())
		}
		if ok(s) {
			return s
		}
	}
}

// says waits for a line in the tail, which changes no revision.
func (r *rig) says(prefix string) string {
	r.t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		s, err := r.peer.Status(bounded(r.t))
		if err != nil {
			r.t.Fatal(err)
		}
		for _, line := range s.Tail {
			if strings.HasPrefix(line, prefix) {
				return line
			}
		}
	}
	r.t.Fatalf("the client never said %q\n%s", prefix, r.log())
	return ""
}

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func exited(s Status) bool { return s.State == StateExited }

func touch(t testing.TB, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// openFDs counts this process's descriptors.
func openFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
