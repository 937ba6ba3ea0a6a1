package lifecycle_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

// flagsOf are a mode's flags, as its help text lists them.
func flagsOf(t *testing.T, mode string) []string {
	t.Helper()
	_, help, _ := run(t, nil, mode, "--help")
	var flags []string
	for _, m := range regexp.MustCompile(`(?m)^ +(?:-[a-z], +)?--([a-z0-9-]+)`).FindAllStringSubmatch(help, -1) {
		flags = append(flags, m[1])
	}
	if len(flags) < 8 {
		t.Fatalf("mode %s seems to have only the flags %v", mode, flags)
	}
	return flags
}

func variable(flag string) string {
	return "S3_CSI_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func TestEveryFlagRefusesABadValueOnTheCommandLineAndFromItsVariable(t *testing.T) {
	t.Parallel()
	bad := map[string]string{
		"endpoint": "relative/path", "driver-name": "a_b", "config": "relative.yaml", "http-endpoint": "nowhere", "logging-format": "xml",
		"v": "many", "shutdown-timeout": "-1s", "cluster-id": "two words", "deletion-workers": "65", "node-id": "two words",
		"state-dir": "relative", "cache-dir": "/a/../b", "client-dir": "relative", "default-client": "no-such-client", "launcher": "systemctl",
		"uid-range": "2000000", "target-root": "relative", "volume-attach-limit": "-1", "mount-timeout": "1ms", "drain-timeout": "soon",
		"host-dir": "relative", "heal": "perhaps", "allow-isolated": "perhaps", "node-dns": "cluster", "inline-volumes": "perhaps", "hang-timeout": "1ms", "memory-limit": "1MiB", "cpu-weight": "10001", "tasks-max": "31", "slice-memory-limit": "101%",
	}
	for _, mode := range []string{"all", "controller", "node"} {
		for _, flag := range flagsOf(t, mode) {
			value, known := bad[flag]
			switch {
			case flag == "version" || flag == "help":
				continue
			case !known:
				t.Errorf("no bad value is known for --%s: add one", flag)
				continue
			}
			t.Run(mode+" --"+flag, func(t *testing.T) {
				t.Parallel()
				// Where the value is not refused, nothing of this machine's is touched.
				endpoint, _ := socket(t)
				env := []string{"S3_CSI_ENDPOINT=" + endpoint}
				dir := filepath.Dir(strings.TrimPrefix(endpoint, "unix://"))
				env = append(env, "S3_CSI_STATE_DIR="+dir+"/s", "S3_CSI_CACHE_DIR="+dir+"/c")
				for _, try := range []struct {
					env  []string
					args []string
					says string
				}{
					{env, []string{mode, "--" + flag + "=" + value}, "--" + flag},
					{append(env, variable(flag)+"="+value), []string{mode}, variable(flag)},
				} {
					code, stdout, stderr := run(t, try.env, try.args...)
					if code != exitUsage || stdout != "" {
						t.Errorf("%v with %v: exit code %d, want %d; stdout %q", try.args, try.env, code, exitUsage, stdout)
					}
					contains(t, stderr, try.says, value)
				}
			})
		}
	}
}

func TestEveryFlagCanBeSetByTheEnvironment(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	endpoint, _ := socket(t)
	http := port(t)
	config := filepath.Join(n.Dir, "config.yaml")
	if err := os.WriteFile(config, []byte(fmt.Sprintf("backends: {other: {endpoint: %q}}\n", n.Endpoint())), 0o600); err != nil {
		t.Fatal(err)
	}
	targets := filepath.Dir(filepath.Dir(n.Target("x")))
	p := launchProgram(t, filepath.Join(rigtest.Bin(t), "s3-csi-driver"), append(n.Environment(),
		"S3_CSI_ENDPOINT="+endpoint, "S3_CSI_DRIVER_NAME=env.example.com", "S3_CSI_CONFIG="+config, "S3_CSI_HTTP_ENDPOINT="+http,
		"S3_CSI_LOGGING_FORMAT=json", "S3_CSI_V=5", "S3_CSI_SHUTDOWN_TIMEOUT=30s", "S3_CSI_CLUSTER_ID=cluster-of-env", "S3_CSI_DELETION_WORKERS=2",
		"S3_CSI_NODE_ID=node-of-env", "S3_CSI_STATE_DIR="+n.State, "S3_CSI_CACHE_DIR="+n.Cache, "S3_CSI_CLIENT_DIR="+n.Clients, "S3_CSI_DEFAULT_CLIENT="+rigtest.Client,
		"S3_CSI_LAUNCHER=process", fmt.Sprintf("S3_CSI_UID_RANGE=%d-%d", n.FirstUID, n.FirstUID+1), "S3_CSI_TARGET_ROOT="+targets, "S3_CSI_VOLUME_ATTACH_LIMIT=17",
		"S3_CSI_MOUNT_TIMEOUT=30s", "S3_CSI_DRAIN_TIMEOUT=30s", "CSI_ENDPOINT=unix:///nonexistent/weaker.sock", "CSI_NODE_NAME=weaker",
		"S3_CSI_ALLOW_ISOLATED="+strconv.FormatBool(rig.Isolated())),
	)
	c := dial(t, endpoint)
	p.ready(t, c)
	ctx := rigtest.Context(t, time.Minute)

	info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "env.example.com" {
		t.Errorf("driver name: %v, %v", info, err)
	}
	node, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil || node.GetNodeId() != "node-of-env" || node.GetMaxVolumesPerNode() != 17 {
		t.Errorf("node: %v, %v", node, err)
	}
	if code, _ := get(t, http, "/readyz"); code != 200 {
		t.Errorf("/readyz: %d", code)
	}
	v := rigtest.Create(t, c, "vol", "backend", "other")
	if !strings.HasPrefix(v.GetVolumeId(), "other:") {
		t.Errorf("volume id %s is not of the config's backend", v.GetVolumeId())
	}
	var record struct{ Cluster string }
	if err := json.Unmarshal([]byte(n.Object(t, rigtest.Bucket, ".s3-csi/volumes/vol")), &record); err != nil || record.Cluster != "cluster-of-env" {
		t.Errorf("record: %+v, %v", record, err)
	}
	_, err = c.NodePublishVolume(ctx, rigtest.PublishRequest(v, filepath.Join(n.Dir, "outside")))
	hasCode(t, err, codes.InvalidArgument, "target_path", targets)
	target := n.Target("a")
	rigtest.Publish(t, c, v, target)
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if running := n.Processes(); len(running) == 0 {
		t.Errorf("no process has a user id of the range %d-%d", n.FirstUID, n.LastUID)
	}
	for _, dir := range []string{filepath.Join(n.State, "mounts"), n.Cache} {
		if entries, _ := os.ReadDir(dir); len(entries) == 0 {
			t.Errorf("nothing is in %s", dir)
		}
	}
	rigtest.Unpublish(t, c, v, target)
	rigtest.Delete(t, c, v.GetVolumeId())
	for line := range strings.Lines(p.stderr.String()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("not a line of JSON: %s", line)
		}
	}
	contains(t, p.stderr.String(), `"Request"`)
	n.NothingLeft(t)
}

func TestTheCommandLineWinsAndTheNamesOfOtherDriversAreHonoured(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	endpoint, _ := socket(t)
	p := launch(t, environment(n.Server, "CSI_ENDPOINT="+endpoint, "CSI_NODE_NAME=node-of-csi", "S3_CSI_DRIVER_NAME=env.example.com", "S3_CSI_HTTP_ENDPOINT="),
		"--driver-name=flag.example.com", "--state-dir="+n.State, "--cache-dir="+n.Cache, "--default-client="+rigtest.Client)
	c := dial(t, endpoint)
	p.ready(t, c)
	ctx := rigtest.Context(t, patience)
	if info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); err != nil || info.GetName() != "flag.example.com" {
		t.Errorf("%v, %v: want the name of the command line", info, err)
	}
	if node, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err != nil || node.GetNodeId() != "node-of-csi" {
		t.Errorf("%v, %v: want the name of CSI_NODE_NAME", node, err)
	}
}

func TestTheNodeIsNamedAfterTheHostUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	endpoint, _ := socket(t)
	p := launch(t, environment(n.Server), "node", "--launcher=process", "--endpoint="+endpoint, "--state-dir="+n.State, "--cache-dir="+n.Cache)
	c := dial(t, endpoint)
	p.ready(t, c)
	host, _ := os.Hostname()
	if node, err := c.NodeGetInfo(rigtest.Context(t, patience), &csi.NodeGetInfoRequest{}); err != nil || node.GetNodeId() != host {
		t.Errorf("%v, %v: want %s", node, err, host)
	}
}

// The server accepts signatures for its own region only, so a volume that is there proves that both variables were read.
func TestAWSVariablesSayWhereVolumesAre(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{Region: "eu-test-7"})
	for _, form := range [][2]string{{"AWS_REGION", "AWS_ENDPOINT_URL"}, {"AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"}} {
		t.Run(strings.Join(form[:], " and "), func(t *testing.T) {
			endpoint, _ := socket(t)
			keys := s.Process.Keys()
			p := launch(t, []string{
				form[0] + "=" + s.Region(), form[1] + "=" + s.Endpoint(), "AWS_EC2_METADATA_DISABLED=true",
				"AWS_ACCESS_KEY_ID=" + keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY=" + keys.SecretAccessKey,
			}, "controller", "--endpoint="+endpoint)
			c := dial(t, endpoint)
			p.ready(t, c)
			v := rigtest.Create(t, c, "vol-"+strings.ToLower(strings.ReplaceAll(form[0], "_", "-")))
			if _, err := c.CreateVolume(rigtest.Context(t, patience), &csi.CreateVolumeRequest{
				Name: "bucket-" + strings.ToLower(strings.ReplaceAll(form[0], "_", "-")), VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()},
			}); err != nil {
				t.Errorf("a bucket of its own: %v", err)
			}
			if got := s.Keys(t, rigtest.Bucket, ".s3-csi/volumes/vol-"); len(got) == 0 {
				t.Errorf("volume %s has no record on the server", v.GetVolumeId())
			}
		})
	}
	if got := s.Buckets(t); len(got) != 3 {
		t.Errorf("buckets on the server: %v, want %s and two more", got, rigtest.Bucket)
	}
}
