package launcher_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// The test binary is all the programs: the helper, its client, and a driver that starts a helper and waits to be killed.
func TestMain(m *testing.M) {
	switch {
	case helpertest.IsClient():
		os.Exit(helpertest.Client())
	case len(os.Args) > 1 && os.Args[1] == "helper":
		if err := helper.Run(context.Background(), helper.Program{Version: "test"}, os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) == 5 && os.Args[1] == "driver":
		os.Exit(driver(os.Args[2], os.Args[3], os.Args[4]))
	}
	if flag.Parse(); flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(m.Run()) // the fuzzing engine leaves goroutines behind
	}
	goleak.VerifyTestMain(m)
}

// plain is the namespace of a driver that is not in a container.
type plain struct{}

func (plain) Foreign() bool { return false }
func (plain) Do(_ context.Context, _ string, fn func() error) error {
	return fn()
}

// driver starts a helper and then does nothing.
func driver(name, dir, uid string) int {
	n, err := strconv.Atoi(uid)
	if err != nil {
		return 2
	}
	if err := startUnit(name, dir, uint32(n)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("started")
	select {}
}

func startUnit(name, dir string, uid uint32) error {
	socket, err := helper.Listen(filepath.Join(dir, "sock"))
	if err != nil {
		return err
	}
	defer socket.Close()
	p := launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{})
	return p.Start(context.Background(), launcher.Unit{Name: name, UID: uid, GID: uid, StateDir: filepath.Join(dir, "state"), Socket: socket})
}

// Uids of these tests; one for each mount, as in life.
const firstUID = 2_100_000_000

// unit is a started helper.
type unit struct {
	t       *testing.T
	p       *launcher.Process
	uid     uint32
	dir     string // of the socket and, below, the state
	peer    *helper.Peer
	program string
}

var keys = credentials.Keys{AccessKeyID: "AKIDCANARY", SecretAccessKey: "canary-secret-key", SessionToken: "canary-session-token"}

// prepare makes everything but the helper.
func prepare(t *testing.T, uid uint32) *unit {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: helpers run under uids of their own")
	}
	// Not t.TempDir, whose parents only root can enter.
	dir, err := os.MkdirTemp("", "launcher") //nolint:usetesting // its directories are closed to other uids
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	state := filepath.Join(dir, "state")
	for _, err := range []error{os.Chmod(dir, 0o755), os.Mkdir(state, 0o700), os.Chown(state, int(uid), int(uid))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	u := &unit{
		t: t, uid: uid, dir: dir, peer: helper.NewPeer(helper.Dial(filepath.Join(dir, "sock"))), program: helpertest.Program(t, dir),
		p: launcher.NewProcess(plain{}, "/proc/self/exe", launcher.Options{UIDs: launcher.UIDRange{First: firstUID, Last: firstUID + 1000}}),
	}
	t.Cleanup(func() {
		if err := u.p.Kill(bounded(t), uid); err != nil {
			t.Error(err)
		}
	})
	return u
}

func start(t *testing.T, uid uint32) *unit {
	t.Helper()
	u := prepare(t, uid)
	socket, err := helper.Listen(filepath.Join(u.dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if err := u.p.Start(bounded(t), launcher.Unit{Name: "test-1", UID: uid, GID: uid, StateDir: u.state(), Socket: socket}); err != nil {
		t.Fatal(err)
	}
	return u
}

func (u *unit) state() string { return filepath.Join(u.dir, "state") }

func (u *unit) hello() helper.Status {
	u.t.Helper()
	s, err := u.peer.Status(bounded(u.t))
	if err != nil {
		u.t.Fatalf("%v\n%s", err, u.log())
	}
	return s
}

func (u *unit) run(steps ...string) helper.Status {
	u.t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		u.t.Skipf("needs /dev/fuse: %v", err)
	}
	defer fuse.Close()
	command := client.Command{Argv: helpertest.Argv(u.program, steps...), Env: []string{"A=b"}}
	s, err := u.peer.Start(bounded(u.t), helper.StartRequest{Client: client.Default, Keys: keys, Command: command}, fuse)
	if err != nil {
		u.t.Fatalf("%v\n%s", err, u.log())
	}
	return s
}

func (u *unit) until(what string, ok func(helper.Status) bool) helper.Status {
	u.t.Helper()
	ctx := bounded(u.t)
	for since := uint64(0); ; {
		s, err := u.peer.WaitStatus(ctx, since)
		if err != nil {
			u.t.Fatalf("waiting for %s: %v\n%s", what, err, u.log())
		}
		if ok(s) {
			return s
		}
		since = s.Revision
	}
}

func exited(s helper.Status) bool { return s.State == helper.StateExited }

func (u *unit) says(prefix string) string {
	u.t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, line := range u.hello().Tail {
			if strings.HasPrefix(line, prefix) {
				return line
			}
		}
	}
	u.t.Fatalf("the client never said %q\n%s", prefix, u.log())
	return ""
}

func (u *unit) log() string {
	body, _ := os.ReadFile(filepath.Join(u.state(), launcher.LogFile))
	return string(body)
}

func (u *unit) alive() bool {
	u.t.Helper()
	alive, err := u.p.Alive(bounded(u.t), u.uid)
	if err != nil {
		u.t.Fatal(err)
	}
	return alive
}

func (u *unit) mustGo() {
	u.t.Helper()
	for end := time.Now().Add(10 * time.Second); u.alive(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			u.t.Fatalf("uid %d still has processes\n%s", u.uid, u.log())
		}
	}
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	t.Cleanup(cancel)
	return ctx
}
