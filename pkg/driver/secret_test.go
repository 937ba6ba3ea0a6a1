package driver

import (
	"context"
	"maps"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// secretCalls are the RPCs that take secrets, for a volume that the secret's keys may be used for.
func secretCalls(t *testing.T) map[string]func(ctx context.Context, secrets map[string]string) error {
	t.Helper()
	c, _ := newTestController(t)
	n, _ := newTestNode(t)
	const id = "tenants:bucket-1/pvc-1/"
	created := createRequest()
	created.Parameters["backend"], created.Secrets = "tenants", tenantKeys()
	if _, err := c.CreateVolume(t.Context(), created); err != nil {
		t.Fatal(err)
	}
	return map[string]func(context.Context, map[string]string) error{
		csi.Node_NodePublishVolume_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			req := publishRequest()
			req.Secrets = secrets
			_, err := n.NodePublishVolume(ctx, req)
			return err
		},
		csi.Controller_CreateVolume_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			req := createRequest()
			req.Parameters["backend"], req.Secrets = "tenants", secrets
			_, err := c.CreateVolume(ctx, req)
			return err
		},
		csi.Controller_DeleteVolume_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "tenants:bucket-1/pvc-2/", Secrets: secrets})
			return err
		},
		csi.Controller_ControllerExpandVolume_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1},
				Secrets: secrets})
			return err
		},
		csi.Controller_ControllerModifyVolume_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: id, Secrets: secrets})
			return err
		},
		csi.Controller_ValidateVolumeCapabilities_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id,
				VolumeCapabilities: createRequest().GetVolumeCapabilities(), Secrets: secrets})
			return err
		},
		csi.Controller_CreateSnapshot_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id, Secrets: secrets})
			return err
		},
		csi.Controller_DeleteSnapshot_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: "tenants:bucket-1/s@1", Secrets: secrets})
			return err
		},
		csi.Controller_ListSnapshots_FullMethodName: func(ctx context.Context, secrets map[string]string) error {
			_, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{Secrets: secrets})
			return err
		},
	}
}

func TestSecrets_AreUsedOrRefusedByName(t *testing.T) {
	const role = "arn:aws:iam::111122223333:role/reader"
	for _, tt := range []struct {
		what    string
		secrets map[string]string
		field   string // of the error; "": none
	}{
		{"keys", nil, ""},
		{"keys of a session", map[string]string{"sessionToken": "t"}, ""},
		{"a role", map[string]string{"roleARN": role}, ""},
		{"tokens of kubelet", map[string]string{tokensKey: "{}"}, ""},
		{"the service", map[string]string{"endpoint": "https://s3.example", "region": "", "insecure": "false"}, ""},
		{"no values", map[string]string{"accessKeyID": "", "secretAccessKey": ""}, "secrets"},
		{"an empty access key", map[string]string{"accessKeyID": ""}, "secrets.accessKeyID"},
		{"an empty secret key", map[string]string{"secretAccessKey": ""}, "secrets.secretAccessKey"},
		{"a newline after the key", map[string]string{"secretAccessKey": "canary\n"}, "secrets.secretAccessKey"},
		{"a space before the id", map[string]string{"accessKeyID": " canary"}, "secrets.accessKeyID"},
		{"a byte order mark", map[string]string{"accessKeyID": "\ufeffcanary"}, "secrets.accessKeyID"},
		{"a no-break space", map[string]string{"sessionToken": "canary\u00a0"}, "secrets.sessionToken"},
		{"a misspelt token", map[string]string{"session_token": "canary"}, "secrets.session_token"},
		{"a misspelt role", map[string]string{"roleArn": role}, "secrets.roleArn"},
		{"white space in a name", map[string]string{"roleARN ": role}, "secrets.roleARN "},
		{"a role that is none", map[string]string{"roleARN": "reader"}, "secrets.roleARN"},
		{"a role with a newline", map[string]string{"roleARN": role + "\n"}, "secrets.roleARN"},
		{"a key of the orchestrator's that is not known", map[string]string{metadataPrefix + "pod.name": "x"}, "secrets." + metadataPrefix + "pod.name"},
	} {
		for method, call := range secretCalls(t) {
			secrets := tenantKeys()
			maps.Copy(secrets, tt.secrets)
			if err := call(t.Context(), secrets); tt.field != "" {
				refused(t, method+": "+tt.what, method, err, codes.InvalidArgument, tt.field+": ")
				if err != nil && strings.Contains(err.Error(), "canary") {
					t.Errorf("%s: %s: the error shows a secret: %v", method, tt.what, err)
				}
			} else if err != nil {
				t.Errorf("%s: %s: %v", method, tt.what, err)
			}
		}
	}
	for _, secrets := range []map[string]string{
		{"endpoint": "https://s3.example"}, {"roleARN": role}, {"accessKeyId": "x"}, {"": ""}, {"accessKeyID": ""}, {metadataPrefix + "pod.name": "x"},
		{"sessionToken": "x"},
	} {
		for method, call := range secretCalls(t) {
			refused(t, method+": no keys", method, call(t.Context(), secrets), codes.InvalidArgument, "secrets")
		}
	}
}
