// Package lifecycle_test holds the driver's program to what is promised of it as a process: what it passes on, signals,
// sockets, sessions, secrets, and calls that race.
package lifecycle_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/output"
	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

const patience = 20 * time.Second // for what takes much less

const endSignal = syscall.SIGTERM

// process is a run of the driver's program.
type process struct {
	cmd            *exec.Cmd
	stdout, stderr output.Buffer
	exited         chan struct{}
}

// launch starts the driver's program with exactly this environment; it is killed at the test's end.
func launch(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(filepath.Join(rigtest.Bin(t), "s3-csi-driver"), args...), exited: make(chan struct{})}
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = append([]string{}, env...), &p.stdout, &p.stderr
	if os.Getenv(rig.EnvRace) != "" {
		p.cmd.Env = append(p.cmd.Env, "GORACE=atexit_sleep_ms=50")
	}
	// A helper has the driver's stderr until its own log is open: do not wait for it.
	p.cmd.WaitDelay = time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.exited) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if strings.Contains(p.stderr.String(), "DATA RACE") {
			t.Error("the driver has a data race")
		}
		if t.Failed() {
			t.Logf("the driver with %v wrote:\n%s%s", args, p.stdout.String(), p.stderr.String())
		}
	})
	return p
}

// exit waits for the process's end and returns its code.
func (p *process) exit(t *testing.T) int {
	t.Helper()
	eventually(t, "the driver has exited", func() bool {
		select {
		case <-p.exited:
			return true
		default:
			return false
		}
	})
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// connection is a CO's view of a driver.
type connection struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
}

// dial connects to an endpoint; nothing is sent before the first call.
func dial(t *testing.T, endpoint string) connection {
	t.Helper()
	conn, err := rig.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return connection{csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)}
}

// ready waits until the driver says that it is ready.
func (p *process) ready(t *testing.T, c connection) {
	t.Helper()
	eventually(t, "the driver is ready", func() bool {
		select {
		case <-p.exited:
			t.Fatalf("the driver has exited with code %d: %s", p.cmd.ProcessState.ExitCode(), p.stderr.String())
		default:
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		resp, err := c.Probe(ctx, &csi.ProbeRequest{})
		return err == nil && resp.GetReady().GetValue()
	})
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for start := pressure.Now(); !is(); time.Sleep(5 * time.Millisecond) {
		if start.Since() > patience {
			t.Fatalf("after %v it is still not so that %s", patience, what)
		}
	}
}

// environment is what a driver needs to work with the server.
func environment(s *rigtest.Server, more ...string) []string {
	keys := s.Process.Keys()
	return append([]string{
		"AWS_REGION=" + s.Region(), "AWS_ENDPOINT_URL=" + s.Endpoint(), "AWS_EC2_METADATA_DISABLED=true",
		"AWS_ACCESS_KEY_ID=" + keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY=" + keys.SecretAccessKey,
	}, more...)
}

// socket is the endpoint of a UNIX socket that does not exist, in a directory that does.
func socket(t *testing.T) (endpoint, path string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "s3csi-") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path = filepath.Join(dir, "csi.sock")
	return "unix://" + path, path
}

// port is a TCP address of the loopback interface that no process uses.
func port(t *testing.T) string {
	t.Helper()
	addr, err := ports.Free()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// get reads a page of the driver's HTTP endpoint; status 0: it did not answer.
func get(t *testing.T, address, path string) (status int, body string) {
	t.Helper()
	resp, err := (&http.Client{Timeout: 5 * time.Second}).Get("http://" + address + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// hasCode fails the test if an error has another code, or if its text lacks one of the words.
func hasCode(t *testing.T, err error, want codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("got %s (%v), want %s", status.Code(err), err, want)
		return
	}
	for _, w := range words {
		if !strings.Contains(status.Convert(err).Message(), w) {
			t.Errorf("the message does not say %q: %v", w, err)
		}
	}
}

// contains fails the test if a text lacks one of the words.
func contains(t *testing.T, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%q is not in: %s", w, text)
		}
	}
}

// pause stops the server's process as it stands, until the test's end or resume: requests to it hang.
func pause(t *testing.T, s *rigtest.Server) (resume func()) {
	t.Helper()
	rigtest.Freeze(t, s.PID())
	resume = func() {
		if err := syscall.Kill(s.PID(), syscall.SIGCONT); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Error(err)
		}
	}
	t.Cleanup(resume)
	return resume
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }
