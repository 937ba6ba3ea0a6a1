package lifecycle_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

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
