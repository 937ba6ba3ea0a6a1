package lifecycle_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

const exitUsage = 2

func TestEachModeServesItsServicesAndNoOthers(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	for _, mode := range []string{"", "all", "controller", "node"} {
		t.Run("mode "+mode, func(t *testing.T) {
			endpoint, _ := socket(t)
			args := []string{"--endpoint=" + endpoint}
			if mode != "" {
				args = append([]string{mode}, args...)
			}
			if mode != "controller" {
				args = append(args, "--state-dir="+n.State, "--cache-dir="+n.Cache, "--default-client="+rigtest.Client)
			}
			p := launch(t, environment(n.Server), args...)
			c := dial(t, endpoint)
			p.ready(t, c)
			ctx := rigtest.Context(t, patience)
			_, err := c.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
			hasCode(t, err, served(mode != "node"))
			_, err = c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			hasCode(t, err, served(mode != "controller"))
			p.signal(t, os.Interrupt)
			if code := p.exit(t); code != 0 {
				t.Errorf("exit code %d after SIGINT, want 0", code)
			}
		})
	}
}

func served(yes bool) codes.Code {
	if yes {
		return codes.OK
	}
	return codes.Unimplemented
}

func TestMistakesOnTheCommandLineEndTheDriverWithAClearMessage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		says []string
	}{
		"unknown mode":                {[]string{"serve"}, []string{`unknown mode "serve"`, "all", "controller", "node"}},
		"mode after flags":            {[]string{"--v=2", "node"}, []string{`"node"`, "the mode comes first"}},
		"two modes":                   {[]string{"node", "controller"}, []string{`"controller"`}},
		"unknown flag":                {[]string{"--no-such-flag"}, []string{"no-such-flag", "--help"}},
		"node's flag for controller":  {[]string{"controller", "--state-dir=/x"}, []string{"--state-dir", "all and node", "mode controller"}},
		"controller's flag for node":  {[]string{"node", "--cluster-id=x"}, []string{"--cluster-id", "all and controller", "mode node"}},
		"flag without its value":      {[]string{"--endpoint"}, []string{"--endpoint"}},
		"endpoint is not loopback":    {[]string{"--endpoint=tcp://0.0.0.0:9000"}, []string{"--endpoint", "0.0.0.0", "loopback"}},
		"endpoint of another kind":    {[]string{"--endpoint=http://127.0.0.1:9000"}, []string{"--endpoint", "unix:///path"}},
		"endpoint is too long":        {[]string{"--endpoint=unix:///" + strings.Repeat("x", 120)}, []string{"--endpoint", "107"}},
		"several mistakes at a time":  {[]string{"controller", "--v=11", "--driver-name=-", "--deletion-workers=0"}, []string{"--v", "--driver-name", "--deletion-workers"}},
		"uid range of the host's own": {[]string{"node", "--uid-range=0-99"}, []string{"--uid-range", "1000"}},
		"uid range with nobody":       {[]string{"node", "--uid-range=60000-70000"}, []string{"--uid-range", "65534"}},
		"the config does not exist":   {[]string{"controller", "--config=/nonexistent/config.yaml"}, []string{"/nonexistent/config.yaml"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := run(t, nil, c.args...)
			if code == 0 {
				t.Error("exit code 0")
			}
			if code != exitUsage && name != "the config does not exist" {
				t.Errorf("exit code %d, want %d", code, exitUsage)
			}
			if stdout != "" {
				t.Errorf("it wrote to stdout: %s", stdout)
			}
			contains(t, stderr, c.says...)
		})
	}
}

func TestMistakesInTheConfigFileEndTheDriverWithAClearMessage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config string
		says   []string
	}{
		"unknown key at the top":   {"backend: {}\n", []string{"backend", "unknown key"}},
		"unknown key of a backend": {"backends: {minio: {enpoint: http://127.0.0.1:1}}\n", []string{"backends.minio.enpoint", "unknown key", "endpoint"}},
		"wrong letter case":        {"backends: {minio: {Endpoint: http://127.0.0.1:1}}\n", []string{"backends.minio.Endpoint"}},
		"wrong type":               {"backends: {minio: {singleController: perhaps}}\n", []string{"backends.minio.singleController"}},
		"bad value":                {"backends: {minio: {endpoint: \"ftp://127.0.0.1:1\"}}\n", []string{"backends.minio.endpoint"}},
		"bad name":                 {"backends: {MinIO: {}}\n", []string{"MinIO"}},
		"twice":                    {"backends: {minio: {}, minio: {}}\n", []string{"minio"}},
		"not YAML":                 {"backends: [\n", []string{"config.yaml"}},
		"a missing CA":             {"backends: {minio: {caFile: /nonexistent/ca.pem}}\n", []string{"/nonexistent/ca.pem"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(file, []byte(c.config), 0o600); err != nil {
				t.Fatal(err)
			}
			endpoint, path := socket(t)
			code, _, stderr := run(t, nil, "controller", "--endpoint="+endpoint, "--config="+file)
			if code == 0 {
				t.Error("exit code 0")
			}
			contains(t, stderr, append(c.says, file)...)
			if exists(path) {
				t.Error("it left a socket behind")
			}
		})
	}
}

func TestVersionAndHelpArePrintedAndNothingElseHappens(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"all", "controller", "node"} {
		code, stdout, stderr := run(t, nil, mode, "--version")
		if code != 0 || stderr != "" || len(strings.TrimSpace(stdout)) < 3 || strings.Count(stdout, "\n") != 1 {
			t.Errorf("%s --version: code %d, stdout %q, stderr %q: want one line", mode, code, stdout, stderr)
		}
		code, stdout, stderr = run(t, nil, mode, "--help")
		if code != 0 || stderr != "" {
			t.Errorf("%s --help: code %d, stderr %q", mode, code, stderr)
		}
		contains(t, stdout, "--endpoint", "S3_CSI_", `mode "`+mode+`"`)
	}
}

func TestVersionIsWhatGetPluginInfoSays(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{})
	endpoint, _ := socket(t)
	p := launch(t, environment(s), "controller", "--endpoint="+endpoint)
	c := dial(t, endpoint)
	p.ready(t, c)
	_, stdout, _ := run(t, nil, "--version")
	info, err := c.GetPluginInfo(rigtest.Context(t, patience), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetVendorVersion() != strings.TrimSpace(stdout) || info.GetName() != "s3.csi.driver" {
		t.Errorf("plugin info %v (%v), --version %q", info, err, stdout)
	}
}

func contains(t *testing.T, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%q is not in: %s", w, text)
		}
	}
}
