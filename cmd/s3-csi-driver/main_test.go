package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// The variables that make the test binary the driver or a helper.
const (
	asDriver = "S3CSI_TEST_AS_DRIVER"
	asHelper = "S3CSI_TEST_AS_HELPER"
)

func TestMain(m *testing.M) {
	if os.Getenv(asHelper) != "" && len(os.Args) > 1 && os.Args[1] == "helper" {
		if err := helper.Run(context.Background(), helper.Program{Exchange: "/proc/self/exe"}, os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(asDriver) != "" || len(os.Args) > 1 && os.Args[1] == session.Mode { // a helper gives that no variables
		main()
	}
	os.Exit(runWithCoverage(m))
}

// coverage is the variable with the directory for the coverage data of a program. Without it, go test -cover has programs write a warning to
// their standard error.
const coverage = "GOCOVERDIR"

// runWithCoverage runs the tests. Those of the programs that they start have a directory for coverage data.
func runWithCoverage(m *testing.M) int {
	dir, err := os.MkdirTemp("", "coverage")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	_ = os.Setenv(coverage, dir)
	return m.Run()
}

func driverCommand(ctx context.Context, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append([]string{asDriver + "=1", "PATH=" + os.Getenv("PATH"), coverage + "=" + os.Getenv(coverage)}, env...)
	return cmd
}

func TestExitCodesAndMessages(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(broken, []byte("backends:\n  default:\n    endpont: https://s3.example.com\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		args   string
		env    []string
		code   int
		stdout string
		stderr string
	}{
		{"--help", nil, 0, "--endpoint", ""},
		{"controller --help", nil, 0, `mode "controller"`, ""},
		{"node --help", nil, 0, "--uid-range", ""},
		{"--version", nil, 0, "\n", ""},
		{"node --version", nil, 0, "\n", ""},
		{"contoller", nil, 2, "", "unknown mode"},
		{"controller --uid-range=2000-3000", nil, 2, "", "is a flag of modes all and node"},
		{"controller --endpoint=tcp://0.0.0.0:1", nil, 2, "", "loopback"},
		{"controller", []string{"S3_CSI_V=loud"}, 2, "", "S3_CSI_V"},
		{"controller --endpoint=" + dir + "/csi.sock --config=" + broken, nil, 1, "", broken + ": backends.default.endpont"},
		{"controller --config=/nonexistent/config.yaml", nil, 1, "", "/nonexistent/config.yaml"},
		{"controller --endpoint=/nonexistent/csi.sock", nil, 1, "", "does not exist"},
		{"helper", nil, 2, "", "unknown mode"},
		{"run-as 0 0 helper", nil, 2, "", "unknown mode"},
	}
	for _, tt := range tests {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cmd := driverCommand(ctx, tt.env, strings.Fields(tt.args)...)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		cancel()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); got != tt.code {
			t.Errorf("%s: exit code %d, want %d\n%s", tt.args, got, tt.code, stderr.String())
		}
		if !strings.Contains(stdout.String(), tt.stdout) || !strings.Contains(stderr.String(), tt.stderr) {
			t.Errorf("%s: stdout %q, stderr %q", tt.args, stdout.String(), stderr.String())
		}
		if failed := tt.code != 0; failed && stdout.Len() > 0 || !failed && stderr.Len() > 0 {
			t.Errorf("%s: not only on its own stream: stdout %q, stderr %q", tt.args, stdout.String(), stderr.String())
		}
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("a driver that did not start left %v", left)
	}
}

// freePort is an address below the kernel's range of ephemeral ports, so that no other process gets it by chance before it
// is bound.
func freePort(t *testing.T) string {
	t.Helper()
	for range 100 {
		lis, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(10000+rand.IntN(22000))))
		if err == nil {
			_ = lis.Close()
			return lis.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}

func TestController_ServesUntilSignalled(t *testing.T) {
	for _, scheme := range []string{"unix", "tcp"} {
		t.Run(scheme, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "csi") //nolint:usetesting // t.TempDir's names are too long for a socket
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			endpoint, target := "unix://"+dir+"/csi.sock", "unix://"+dir+"/csi.sock"
			if scheme == "tcp" {
				target = freePort(t)
				endpoint = "tcp://" + target
			}
			web := freePort(t)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var log bytes.Buffer
			cmd := driverCommand(ctx, []string{"CSI_ENDPOINT=" + endpoint, "AWS_REGION=eu-north-1"}, "controller", "--http-endpoint="+web,
				"--driver-name=test.csi", "--logging-format=json")
			cmd.Stderr = &log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ask(ctx, t, target)
			if body := fetch(t, "http://"+web+"/metrics"); !strings.Contains(body,
				`csi_plugin_operations_seconds_count{driver_name="test.csi",grpc_status_code="OK",method_name="/csi.v1.Identity/GetPluginInfo"} 1`) {
				t.Errorf("metrics:\n%s", body)
			}
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("the end: %v\n%s", err, log.String())
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			lis, err := net.Listen(scheme, strings.TrimPrefix(target, "unix://"))
			if err != nil {
				t.Fatalf("another one cannot have the place at once: %v", err)
			}
			_ = lis.Close()
			for line := range strings.Lines(log.String()) {
				if !strings.HasPrefix(line, "{") {
					t.Errorf("not a JSON log line: %s", line)
				}
			}
		})
	}
}

// ask talks to a controller as a CO does.
func ask(ctx context.Context, t *testing.T, target string) {
	t.Helper()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil || info.GetName() != "test.csi" || info.GetVendorVersion() == "" {
		t.Errorf("GetPluginInfo: %v, %v", info, err)
	}
	if version, err := driverCommand(ctx, nil, "--version").Output(); err != nil || string(version) != info.GetVendorVersion()+"\n" {
		t.Errorf("GetPluginInfo says version %s, and --version %q, %v", info.GetVendorVersion(), version, err)
	}
	caps, err := csi.NewIdentityClient(conn).GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil || len(caps.GetCapabilities()) != 2 {
		t.Errorf("GetPluginCapabilities: %v, %v", caps, err)
	}
	if _, err := csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("CreateVolume: %v", err)
	}
	if _, err := csi.NewControllerClient(conn).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "fake-vol-id"}); err != nil {
		t.Errorf("DeleteVolume: %v", err)
	}
	if _, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("NodeGetInfo in mode controller: %v", err)
	}
}

func fetch(t *testing.T, url string) string {
	t.Helper()
	client := &http.Client{Timeout: 10 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// The program that makes sessions comes along with helpers, once, and only root can read it there.
func TestSessionProgram_IsInstalledBesideHelper(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	touch := func(name string) {
		if err := os.WriteFile(path(name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	touch("s3-csi-helper")
	small := programPaths{helper: path("s3-csi-helper"), clientDir: dir}
	if got := small.sessions(); got != "" || len(small.files()) != 1 || !strings.Contains(small.sessionProblem(), "cannot be renewed") {
		t.Errorf("without the driver beside the helper: %q, files %q", got, small.files())
	}
	touch("s3-csi-driver")
	touch("s3-csi-rclone")
	if err := os.Chmod(path("s3-csi-rclone"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got, files := small.sessions(), small.files(); got != path("s3-csi-driver") ||
		!slices.Equal(files, []string{path("s3-csi-helper"), path("s3-csi-driver"), path("s3-csi-rclone")}) {
		t.Errorf("%q, files %q", got, files)
	}
	for mode, exposed := range map[os.FileMode]bool{0o755: true, 0o711: false} {
		if err := os.Chmod(path("s3-csi-driver"), mode); err != nil {
			t.Fatal(err)
		}
		if got := small.sessionProblem(); (got != "") != exposed {
			t.Errorf("mode %o: %q", mode, got)
		}
	}
}
