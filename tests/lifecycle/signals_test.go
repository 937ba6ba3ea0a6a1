package lifecycle_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// stuck is a controller with a CreateVolume that waits for a server that does not answer.
type stuck struct {
	*process
	http, socket string
	resume       func()
	answer       chan error
	connection   connection
}

func startStuck(t *testing.T, env ...string) stuck {
	t.Helper()
	server := rigtest.StartServer(t, s3server.Options{})
	endpoint, path := socket(t)
	s := stuck{http: port(t), socket: path, answer: make(chan error, 1)}
	s.process = launch(t, environment(server, env...), "controller", "--endpoint="+endpoint, "--http-endpoint="+s.http, "--v=5")
	s.connection = dial(t, endpoint)
	s.ready(t, s.connection)
	rigtest.Create(t, s.connection, "warm") // what the driver has to find out first is found out
	s.resume = pause(t, server)
	go func() {
		_, err := s.connection.CreateVolume(rigtest.Context(t, time.Minute), rigtest.CreateRequest("stuck"))
		s.answer <- err
	}()
	eventually(t, "the request has arrived", func() bool { return strings.Contains(s.stderr.String(), `name="stuck"`) })
	return s
}

func TestSIGTERMMakesTheDriverUnreadyAndLetsRequestsFinish(t *testing.T) {
	t.Parallel()
	s := startStuck(t)
	if code, body := get(t, s.http, "/readyz"); code != 200 {
		t.Errorf("/readyz before: %d %s", code, body)
	}
	s.signal(t, syscall.SIGTERM)
	eventually(t, "/readyz says no", func() bool { code, _ := get(t, s.http, "/readyz"); return code == 503 })
	select {
	case err := <-s.answer:
		t.Fatalf("the request ended while S3 did not answer: %v", err)
	case <-s.exited:
		t.Fatal("the driver exited although a request was running")
	case <-time.After(300 * time.Millisecond):
	}
	_, err := dial(t, "unix://"+s.socket).Probe(rigtest.Context(t, patience), &csi.ProbeRequest{})
	hasCode(t, err, codes.Unavailable)

	s.resume()
	if err := <-s.answer; err != nil {
		t.Errorf("the running request failed: %v", err)
	}
	if code := s.exit(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	for _, file := range []string{s.socket, s.socket + ".lock"} {
		if exists(file) {
			t.Errorf("%s is left", file)
		}
	}
	contains(t, s.stderr.String(), "Shutting down", "terminated", "Shutdown complete")
}

func TestMountsStayWhenTheDriverStopsAndTheNextOneTakesThemOver(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	target, other := n.Target("a"), n.Target("b")
	rigtest.Publish(t, d, v, target)
	file := filepath.Join(target, "file")
	if err := os.WriteFile(file, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	processes := n.Processes()

	for round, end := range []func(){
		func() {
			if code, err := d.Stop(rigtest.Context(t, patience)); err != nil || code != 0 {
				t.Fatalf("exit code %d, %v", code, err)
			}
		},
		func() { d.Kill() }, // the process that d is then
	} {
		end()
		if b, err := os.ReadFile(file); err != nil || string(b) != "before" {
			t.Fatalf("round %d, without a driver: %q, %v", round, b, err)
		}
		if err := os.WriteFile(filepath.Join(target, "without-a-driver"), []byte("x"), 0o600); err != nil {
			t.Errorf("round %d, without a driver: %v", round, err)
		}
		d = n.Drive(t, "all")
		rigtest.Publish(t, d, v, target) // again: nothing to do
		if now := n.Processes(); strings.Join(now, ";") != strings.Join(processes, ";") {
			t.Errorf("round %d: processes were %v and are %v: the mount was not taken over", round, processes, now)
		}
	}
	rigtest.Publish(t, d, v, other)
	if now := n.Processes(); len(now) != len(processes) {
		t.Errorf("a second target started another client: %v", now)
	}
	if b, err := os.ReadFile(filepath.Join(other, "file")); err != nil || string(b) != "before" {
		t.Errorf("second target: %q, %v", b, err)
	}
	rigtest.Unpublish(t, d, v, target)
	rigtest.Unpublish(t, d, v, other)
	n.NothingLeft(t)
	prefix := strings.TrimPrefix(v.GetVolumeId(), "default:"+rigtest.Bucket+"/")
	if got := n.Object(t, rigtest.Bucket, prefix+"file"); got != "before" {
		t.Errorf("stored: %q", got)
	}
	rigtest.Delete(t, d, v.GetVolumeId())
}

func TestSIGTERMLetsAPublicationFinish(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	target := n.Target("a")
	resume := pause(t, n.Server)
	answer := make(chan error, 1)
	go func() {
		_, err := d.NodePublishVolume(rigtest.Context(t, time.Minute), rigtest.PublishRequest(v, target))
		answer <- err
	}()
	eventually(t, "the request has arrived", func() bool { return strings.Contains(n.Logs(), "Request\" method=\"NodePublishVolume\"") })
	if err := d.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "/readyz says no", func() bool { code, _ := get(t, d.HTTP, "/readyz"); return code == 503 })
	resume()
	if err := <-answer; err != nil {
		t.Errorf("the running publication failed: %v", err)
	}
	if code, err := d.Wait(rigtest.Context(t, patience)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v", code, err)
	}
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600); err != nil {
		t.Errorf("the mount does not work: %v", err)
	}
	d = n.Drive(t, "all")
	rigtest.Unpublish(t, d, v, target)
	n.NothingLeft(t)
}

func TestASecondNodeWithTheSameStateDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	target := n.Target("a")
	rigtest.Publish(t, d, v, target)
	endpoint, path := socket(t)
	second := launch(t, environment(n.Server), "node", "--launcher=process", "--endpoint="+endpoint, "--state-dir="+n.State, "--cache-dir="+n.Cache,
		"--default-client="+rigtest.Client)
	if code := second.exit(t); code == 0 {
		t.Error("exit code 0")
	}
	contains(t, second.stderr.String(), "another driver", n.State)
	if exists(path) {
		t.Error("it left its socket behind")
	}
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600); err != nil {
		t.Errorf("the first one's mount: %v", err)
	}
	rigtest.Unpublish(t, d, v, target)
	n.NothingLeft(t)
}
