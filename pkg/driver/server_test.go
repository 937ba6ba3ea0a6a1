package driver

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

// logBuffer collects a server's log.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}
func (b *logBuffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.buf.String() }

func newTestLogger(w io.Writer) klog.Logger {
	return textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(w), textlogger.Verbosity(6)))
}

// running is a server under test.
type running struct {
	cfg     Config
	mounter *fakeMounter
	log     *logBuffer
	conn    *grpc.ClientConn
	stop    context.CancelFunc
	done    chan error
}

// start runs a server on a real socket until the test's end; change may alter its configuration.
func start(t *testing.T, change func(*Config, *fakeMounter)) *running {
	t.Helper()
	r := &running{mounter: newFakeMounter(), log: &logBuffer{}, done: make(chan error, 1)}
	cfg := testConfig("unix://"+socketPath(t), r.mounter)
	if change != nil {
		change(&cfg, r.mounter)
	}
	r.cfg = cfg
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), newTestLogger(r.log)))
	r.stop = stop
	go func() { r.done <- cfg.Serve(ctx); close(r.done) }()
	t.Cleanup(func() {
		stop()
		select {
		case err := <-r.done:
			_ = err // a test that cares has read it before
		case <-time.After(30 * time.Second):
			t.Error("timed out waiting for the server to stop")
		}
	})
	r.conn = dial(t, cfg.Endpoint)
	return r
}

func dial(t *testing.T, endpoint string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(endpoint, "tcp://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	eventually(t, "the driver serves", func() bool {
		resp, err := csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
		return err == nil && resp.GetReady().GetValue()
	})
	return conn
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("timed out waiting until %s", what)
}

func (r *running) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.done:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("timed out waiting for the server to stop")
		return nil
	}
}

func publishRequest() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: "default:bucket-1/a/", TargetPath: "/pods/1/mount",
		VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)}
}

func mountCapability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

func TestServer_StopsInOrder(t *testing.T) {
	r := start(t, nil)
	path := strings.TrimPrefix(r.cfg.Endpoint, "unix://")
	r.stop()
	if err := r.wait(t); err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if r.cfg.Health.Ready() || r.cfg.Health.Alive() {
		t.Error("a stopped driver says that it is ready")
	}
}

func TestServer_FinishesRequestsBeforeBackground(t *testing.T) {
	ended := make(chan struct{})
	r := start(t, func(cfg *Config, m *fakeMounter) {
		m.block, m.entered = make(chan struct{}), make(chan struct{}, 1)
		cfg.Background = []Background{{Name: "test", Run: func(ctx context.Context) error { <-ctx.Done(); close(ended); return ctx.Err() }}}
	})
	result := make(chan error, 1)
	go func() {
		_, err := csi.NewNodeClient(r.conn).NodePublishVolume(context.Background(), publishRequest())
		result <- err
	}()
	<-r.mounter.entered
	r.stop()
	eventually(t, "the driver is not ready any more", func() bool { return !r.cfg.Health.Ready() })
	select {
	case <-ended:
		t.Error("background work ended before the requests that stand on it")
	case err := <-result:
		t.Errorf("the request was cut off: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(r.mounter.block)
	if err := <-result; err != nil {
		t.Errorf("the request: %v", err)
	}
	if err := r.wait(t); err != nil {
		t.Errorf("Run: %v", err)
	}
	<-ended
}

func TestServer_CancelsOverdueRequests(t *testing.T) {
	r := start(t, func(cfg *Config, m *fakeMounter) {
		cfg.ShutdownTimeout = 50 * time.Millisecond
		m.block, m.entered = make(chan struct{}), make(chan struct{}, 1)
	})
	result := make(chan error, 1)
	go func() {
		_, err := csi.NewNodeClient(r.conn).NodePublishVolume(context.Background(), publishRequest())
		result <- err
	}()
	<-r.mounter.entered
	r.stop()
	if err := r.wait(t); err != nil {
		t.Errorf("Run: %v", err)
	}
	if err := <-result; err == nil {
		t.Error("the cancelled request succeeded")
	}
	if log := r.log.String(); !strings.Contains(log, "NodePublishVolume default:bucket-1/a/ /pods/1/mount") {
		t.Errorf("the log does not name the overdue request:\n%s", log)
	}
}

func TestServer_StopsIfBackgroundFails(t *testing.T) {
	for name, run := range map[string]func(context.Context) error{
		"an error":    func(context.Context) error { return errors.New("disk gone") },
		"a quiet end": func(context.Context) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			begin := make(chan struct{})
			r := start(t, func(cfg *Config, _ *fakeMounter) {
				cfg.Background = []Background{{Name: "monitoring of mounts", Run: func(ctx context.Context) error { <-begin; return run(ctx) }}}
			})
			close(begin)
			if err := r.wait(t); err == nil || !strings.Contains(err.Error(), "monitoring of mounts") {
				t.Errorf("Run: %v", err)
			}
		})
	}
}

func TestServer_ServesOnlyGivenServices(t *testing.T) {
	r := start(t, func(cfg *Config, _ *fakeMounter) { cfg.Node = nil })
	if _, err := csi.NewNodeClient(r.conn).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("node: %v", err)
	}
	if _, err := csi.NewControllerClient(r.conn).ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{}); err != nil {
		t.Errorf("controller: %v", err)
	}
}

func TestServer_HTTPShowsMetricsAndHealth(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := lis.Addr().String()
	if err := lis.Close(); err != nil {
		t.Fatal(err)
	}
	r := start(t, func(cfg *Config, m *fakeMounter) {
		cfg.HTTPEndpoint = address
		cfg.Health.Note("mounts do not survive driver restarts")
		m.block, m.entered = make(chan struct{}), make(chan struct{}, 1)
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for range 2 {
		if _, err := csi.NewNodeClient(r.conn).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	get := func(path string) (int, string) {
		resp, err := client.Get("http://" + address + path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	if _, err := csi.NewNodeClient(r.conn).NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{}); status.Code(err) != codes.Unimplemented {
		t.Fatal(err)
	}
	if code, body := get("/healthz"); code != 200 || body != "ok\n" {
		t.Errorf("/healthz: %d %q", code, body)
	}
	if code, body := get("/readyz"); code != 200 || body != "ok\nnote: mounts do not survive driver restarts\n" {
		t.Errorf("/readyz: %d %q", code, body)
	}
	for _, path := range []string{"/", "/debug/pprof/"} {
		if code, _ := get(path); code != http.StatusNotFound {
			t.Errorf("%s: %d", path, code)
		}
	}
	_, metrics := get("/metrics")
	for _, part := range []string{
		`csi_plugin_operations_seconds_count{driver_name="s3.csi.driver",grpc_status_code="Unimplemented",method_name="/csi.v1.Node/NodeStageVolume"} 1`,
		`csi_plugin_operations_seconds_count{driver_name="s3.csi.driver",grpc_status_code="OK",method_name="/csi.v1.Node/NodeGetInfo"} 2`,
		`s3csi_build_info{driver_name="s3.csi.driver",go_version="go`, `version="v0.0.0-test"} 1`, "go_goroutines ", "process_start_time_seconds ",
		"process_resident_memory_bytes ",
	} {
		if !strings.Contains(metrics, part) {
			t.Errorf("/metrics does not have %s", part)
		}
	}
	go func() { _, _ = csi.NewNodeClient(r.conn).NodePublishVolume(context.Background(), publishRequest()) }()
	<-r.mounter.entered
	r.stop()
	eventually(t, "probes see that the driver stops", func() bool {
		health, _ := get("/healthz")
		ready, _ := get("/readyz")
		return health == http.StatusServiceUnavailable && ready == http.StatusServiceUnavailable
	})
	close(r.mounter.block)
}

func TestServer_AddressInUseLeavesNoSocket(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lis.Close() }()
	path, taken := socketPath(t), lis.Addr().String()
	for _, c := range []struct{ endpoint, http, says string }{{path, taken, "--http-endpoint"}, {"tcp://" + taken, "", "listen on tcp://" + taken}} {
		cfg := testConfig(c.endpoint, newFakeMounter())
		cfg.HTTPEndpoint = c.http
		if err := cfg.Serve(t.Context()); err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), taken) {
			t.Errorf("Run: %v", err)
		}
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// startChild runs this test binary as a driver.
func startChild(t *testing.T, format string) (child *exec.Cmd, endpoint string, log *logBuffer) {
	t.Helper()
	endpoint = "unix://" + socketPath(t)
	log = &logBuffer{}
	child = exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+endpoint, "S3CSI_TEST_CHILD_FORMAT="+format)
	child.Stderr = log
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = child.Process.Kill(); _ = child.Wait() })
	return child, endpoint, log
}

func TestSignals_FirstStopsInOrder(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		child, endpoint, log := startChild(t, "json")
		dial(t, endpoint)
		if err := child.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		if err := child.Wait(); err != nil {
			t.Errorf("%v: %v, want exit code 0\n%s", s, err, log)
		}
		if _, err := os.Lstat(strings.TrimPrefix(endpoint, "unix://")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%v: the socket is left: %v", s, err)
		}
		lines := bufio.NewScanner(strings.NewReader(log.String()))
		for lines.Scan() {
			if !strings.HasPrefix(lines.Text(), `{"ts":`) {
				t.Errorf("not a JSON log line: %s", lines.Text())
			}
		}
	}
}

func TestSignals_SecondExitsAtOnce(t *testing.T) {
	for s, code := range map[syscall.Signal]int{syscall.SIGTERM: 143, syscall.SIGINT: 130} {
		child, endpoint, log := startChild(t, "text")
		conn := dial(t, endpoint)
		go func() { _, _ = csi.NewNodeClient(conn).NodePublishVolume(context.Background(), publishRequest()) }()
		eventually(t, "the request runs", func() bool { return strings.Contains(log.String(), "NodePublishVolume") })
		if err := child.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the driver stops", func() bool { return strings.Contains(log.String(), "Shutting down") })
		begin := time.Now()
		if err := child.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait()
		if got := child.ProcessState.ExitCode(); got != code {
			t.Errorf("second %v: exit code %d, want %d\n%s", s, got, code, log)
		}
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("second %v: it took %v", s, took)
		}
		// The next driver replaces the socket of the exited one.
		lis, cleanup, err := Listen(t.Context(), endpoint)
		if err != nil {
			t.Errorf("the next driver: %v", err)
			continue
		}
		_ = lis
		if err := cleanup(); err != nil {
			t.Error(err)
		}
	}
}
