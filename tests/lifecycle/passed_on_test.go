package lifecycle_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// What flags and variables mean is tested in pkg/driver: here is that the process passes them on. The server accepts signatures
// for its own region only, so volumes that are there prove that both of its variables were read.
func TestTheProcessPassesOnItsModeFlagsAndVariables(t *testing.T) {
	t.Parallel()
	n := rigtest.On(t, rigtest.StartServer(t, s3server.Options{Region: "eu-test-7"}))
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		args, env        []string
		region, endpoint string // the variables that name the server
		controller, node codes.Code
		name, id         string
	}{
		{nil, nil, "AWS_REGION", "AWS_ENDPOINT_URL", codes.OK, codes.OK, "s3.csi.driver", host},
		{
			[]string{"all", "--driver-name=flag.example.com"}, []string{"S3_CSI_DRIVER_NAME=env.example.com", "CSI_NODE_NAME=node-of-csi", "S3_CSI_HTTP_ENDPOINT="},
			"AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", codes.OK, codes.OK, "flag.example.com", "node-of-csi",
		},
		{[]string{"controller"}, nil, "AWS_REGION", "AWS_ENDPOINT_URL", codes.OK, codes.Unimplemented, "s3.csi.driver", ""},
		{[]string{"node", "--node-id=node-of-flag"}, nil, "AWS_REGION", "AWS_ENDPOINT_URL", codes.Unimplemented, codes.OK, "s3.csi.driver", "node-of-flag"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			endpoint, _ := socket(t)
			keys := n.Process.Keys()
			p := launch(t, slices.Concat(c.env, []string{
				"CSI_ENDPOINT=" + endpoint, c.region + "=" + n.Region(), c.endpoint + "=" + n.Endpoint(), "AWS_EC2_METADATA_DISABLED=true",
				"AWS_ACCESS_KEY_ID=" + keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY=" + keys.SecretAccessKey,
				"S3_CSI_STATE_DIR=" + n.State, "S3_CSI_CACHE_DIR=" + n.Cache, "S3_CSI_LAUNCHER=process", "S3_CSI_DEFAULT_CLIENT=" + rigtest.Client,
			}), c.args...)
			d := dial(t, endpoint)
			p.ready(t, d)
			ctx := rigtest.Context(t, patience)
			if info, err := d.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); err != nil || info.GetName() != c.name {
				t.Errorf("%v, %v: want the name %s", info, err, c.name)
			}
			node, err := d.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			if hasCode(t, err, c.node); node.GetNodeId() != c.id {
				t.Errorf("%v: want the id %q", node, c.id)
			}
			_, err = d.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
			if hasCode(t, err, c.controller); err == nil {
				rigtest.Create(t, d, fmt.Sprint("vol-", i))
				_, err = d.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: fmt.Sprint("bucket-", i), VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()}})
				hasCode(t, err, codes.OK)
			}
			p.signal(t, os.Interrupt)
			if code := p.exit(t); code != 0 {
				t.Errorf("exit code %d after SIGINT, want 0", code)
			}
			if strings.Contains(p.stderr.String(), `"Request"`) || strings.Contains(p.stderr.String(), `"Request succeeded"`) != (c.controller == codes.OK) {
				t.Error("the log is not of the default verbosity")
			}
		})
	}
	if records, buckets := n.Keys(t, rigtest.Bucket, ".s3-csi/volumes/vol-"), n.Buckets(t); len(records) != 3 || len(buckets) != 4 {
		t.Errorf("on the server are records %v and buckets %v, want 3, and %s and three more", records, buckets, rigtest.Bucket)
	}
}

func TestTheProcessDoesAllThatVariablesTellIt(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	endpoint, _ := socket(t)
	http := port(t)
	config := filepath.Join(n.Dir, "config.yaml")
	if err := os.WriteFile(config, []byte(fmt.Sprintf("backends: {other: {endpoint: %q}}\n", n.Endpoint())), 0o600); err != nil {
		t.Fatal(err)
	}
	targets := filepath.Dir(filepath.Dir(n.Target("x")))
	p := launch(t, append(n.Environment(),
		"S3_CSI_ENDPOINT="+endpoint, "S3_CSI_DRIVER_NAME=env.example.com", "S3_CSI_CONFIG="+config, "S3_CSI_HTTP_ENDPOINT="+http,
		"S3_CSI_LOGGING_FORMAT=json", "S3_CSI_V=10", "S3_CSI_SHUTDOWN_TIMEOUT=30s", "S3_CSI_CLUSTER_ID=cluster-of-env", "S3_CSI_DELETION_WORKERS=2",
		"S3_CSI_NODE_ID=node-of-env", "S3_CSI_STATE_DIR="+n.State, "S3_CSI_CACHE_DIR="+n.Cache, "S3_CSI_CLIENT_DIR="+n.Clients,
		"S3_CSI_DEFAULT_CLIENT="+rigtest.Client,
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
	_, err = c.NodePublishVolume(ctx, rigtest.PublishRequest(&csi.Volume{VolumeId: "default:no-such-bucket/x/"}, n.Target("b")))
	hasCode(t, err, codes.NotFound, "no-such-bucket")
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
	p.signal(t, endSignal)
	if code := p.exit(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	lines := 0
	for line := range strings.Lines(p.stderr.String()) {
		var entry struct {
			Ts  float64
			Msg string
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Ts == 0 || entry.Msg == "" {
			t.Errorf("not a log entry (%v): %s", err, line)
		}
		lines++
	}
	if lines < 10 {
		t.Errorf("only %d lines at verbosity 10", lines)
	}
	contains(t, p.stderr.String(), `"msg":"Request"`, `"method":"Probe"`)
	n.NothingLeft(t)
}
