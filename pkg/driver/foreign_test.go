package driver

import (
	"reflect"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A PersistentVolume of the AWS Mountpoint driver, as its documentation writes one.
func awsRequest() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: "s3-csi-driver-volume", TargetPath: "/pods/1/mount",
		VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
			"allow-delete", "region us-west-2", "prefix some-s3-prefix/", "uid=1000", "--gid 2000", "allow-other", "endpoint-url https://s3.example",
			`context="a:b:c:s0:c1,c2"`),
		VolumeContext: map[string]string{"bucketName": "bucket-1", "authenticationSource": "driver", "stsRegion": "us-west-2"},
	}
}

func TestNodePublish_VolumesOfTheAWSDriver(t *testing.T) {
	m := newFakeMounter()
	n := NewNode(m, volume.AWSDriverName, NodeOptions{NodeID: "node-1"})
	if _, err := n.NodePublishVolume(t.Context(), awsRequest()); err != nil {
		t.Fatal(err)
	}
	p := m.last
	if want := (volume.ID{Backend: "default", Bucket: "bucket-1", Prefix: "some-s3-prefix/"}); p.Volume != want {
		t.Errorf("place %v", p.Volume)
	}
	want := volume.Attributes{Client: "mountpoint-s3", Credentials: "driver", Region: "us-west-2", UID: new(uint32(1000)), GID: new(uint32(2000))}
	if !reflect.DeepEqual(p.Attributes, want) {
		t.Errorf("got  %+v\nwant %+v", p.Attributes, want)
	}
	if len(p.Options) != 2 || p.Options[0].String() != "allow-delete" || p.Options[1].String() != "allow-overwrite=false" {
		t.Errorf("options %v", p.Options)
	}
	if p.SELinuxContext != "a:b:c:s0:c1,c2" || len(p.Ignored) != 1 || !strings.Contains(p.Ignored[0], "stsRegion") {
		t.Errorf("label %q, ignored %q", p.SELinuxContext, p.Ignored)
	}
	if len(p.Claims) != 1 || p.Claims[0].Value != "https://s3.example" || !strings.HasPrefix(p.Claims[0].Field, "volume_capability.mount.mount_flags[") {
		t.Errorf("claims %v", p.Claims)
	}
}

func TestNodePublish_VolumesOfK8sCSIS3(t *testing.T) {
	n, m := newTestNode(t)
	req := publishRequest()
	req.VolumeId = "shared-bucket/pvc-0f1e2d3c-1111-2222-3333-444455556666"
	req.VolumeContext = map[string]string{"mounter": "rclone", "options": "", "capacity": "1073741824", "bucket": "shared-bucket",
		"storage.kubernetes.io/csiProvisionerIdentity": "1-2-ru.yandex.s3.csi"}
	req.Secrets = tenantKeys()
	req.Secrets["endpoint"], req.Secrets["region"], req.Secrets["insecure"] = "https://s3.example", "", "false"
	if _, err := n.NodePublishVolume(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	p := m.last
	if want := (volume.ID{Backend: "default", Bucket: "shared-bucket", Prefix: "pvc-0f1e2d3c-1111-2222-3333-444455556666/"}); p.Volume != want ||
		p.Attributes.Client != "rclone" || p.Identity != "secret:AKIA1" {
		t.Errorf("%+v", p)
	}
	want := []volume.Claim{{Kind: volume.ClaimEndpoint, Field: "secrets.endpoint", Value: "https://s3.example"},
		{Kind: volume.ClaimInsecure, Field: "secrets.insecure", Value: "false"}}
	if !reflect.DeepEqual(p.Claims, want) {
		t.Errorf("claims %v", p.Claims)
	}
}

// The keys of a secret that expects them elsewhere are not used, whatever is asked for.
func TestController_ChecksSecretsAgainstTheBackend(t *testing.T) {
	for endpoint, agrees := range map[string]bool{"https://s3.example": true, "": true, "https://elsewhere.example": false} {
		c, p := newTestController(t)
		req := createRequest()
		req.Parameters = map[string]string{"backend": "tenants", "bucket": "bucket-1", "mounter": "rclone", "options": ""}
		req.Secrets = tenantKeys()
		req.Secrets["endpoint"] = endpoint
		resp, err := c.CreateVolume(t.Context(), req)
		if agrees {
			if err != nil || resp.GetVolume().GetVolumeId() != "tenants:bucket-1/pvc-1/" || !reflect.DeepEqual(resp.GetVolume().GetVolumeContext(),
				map[string]string{"client": "rclone"}) {
				t.Errorf("%q: %v, %v", endpoint, resp, err)
			}
			continue
		}
		refused(t, "create", csi.Controller_CreateVolume_FullMethodName, err, codes.FailedPrecondition, "secrets.endpoint")
		_, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "tenants:bucket-1/pvc-1/", Secrets: req.Secrets})
		refused(t, "delete", csi.Controller_DeleteVolume_FullMethodName, err, codes.FailedPrecondition, "secrets.endpoint")
		if p.calls > 0 {
			t.Error("the secret was used")
		}
	}
}

func TestCreateVolume_ExplainsParametersOfK8sCSIS3(t *testing.T) {
	c, p := newTestController(t)
	req := createRequest()
	req.Parameters = map[string]string{"mounter": "geesefs", "options": "--memory-limit 1000 --dir-mode 0777 --file-mode 0666"}
	_, err := c.CreateVolume(t.Context(), req)
	refused(t, "geesefs", csi.Controller_CreateVolume_FullMethodName, err, codes.InvalidArgument, "parameters.mounter", "client: rclone", "memory-limit",
		"dir-mode", "file-mode")
	if p.calls > 0 {
		t.Error("refused after a side effect")
	}
}
