package driver

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const inlinePod = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"

// inlineRequest is a publication of an inline volume as kubelet makes it (makeVolumeHandle and SetUpAt of Kubernetes' pkg/volume/csi):
// with attributes of the pod's author, podInfoOnMount and tokenRequests.
func inlineRequest(attributes map[string]string) *csi.NodePublishVolumeRequest {
	context := map[string]string{"bucketName": "bucket-1", "prefix": "a"}
	maps.Copy(context, attributes)
	maps.Copy(context, map[string]string{
		ephemeralKey: "true", metadataPrefix + "pod.name": "web-0", podUIDKey: inlinePod, podNamespaceKey: "team-a", serviceAccountKey: "app",
	})
	return &csi.NodePublishVolumeRequest{
		VolumeId:         fmt.Sprintf("csi-%x", sha256.Sum256([]byte(inlinePod+"data"))),
		TargetPath:       "/var/lib/kubelet/pods/" + inlinePod + "/volumes/kubernetes.io~csi/data/mount",
		VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
		VolumeContext:    context,
		Secrets:          map[string]string{tokensKey: tokensOf(audience, tokenOf("system:serviceaccount:team-a:app"))},
	}
}

func newInlineNode(t *testing.T) (*Node, *fakeMounter) {
	t.Helper()
	m := newFakeMounter()
	n := NewNode(m, "s3.csi.driver", NodeOptions{NodeID: "node-1", InlineVolumes: true})
	return n, m
}

func TestInlineVolume_ReadsAttributes(t *testing.T) {
	keys := func(r *csi.NodePublishVolumeRequest) { maps.Copy(r.Secrets, tenantKeys()) }
	nothing := func(*csi.NodePublishVolumeRequest) {}
	for _, tt := range []struct {
		what       string
		attributes map[string]string
		change     func(*csi.NodePublishVolumeRequest)
		identity   string
		readOnly   bool // the volume itself
	}{
		{"nothing said", nil, nothing, "workload:team-a/app", false},
		{"workload", map[string]string{"credentials": "workload"}, nothing, "workload:team-a/app", false},
		{"a secret", nil, keys, "secret:AKIA1", false},
		{"a secret, said", map[string]string{"credentials": "secret"}, keys, "secret:AKIA1", false},
		{"read-only by its source", nil, func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }, "workload:team-a/app", true},
		{"read-only by its attributes", map[string]string{"readOnly": "true"}, nothing, "workload:team-a/app", true},
	} {
		n, m := newInlineNode(t)
		req := inlineRequest(tt.attributes)
		tt.change(req)
		if _, err := n.NodePublishVolume(t.Context(), req); err != nil {
			t.Errorf("%s: %v", tt.what, err)
			continue
		}
		p := m.last
		if !p.Ephemeral || p.Volume != (volume.ID{Backend: "default", Bucket: "bucket-1", Prefix: "a/"}) || p.SingleWriter || p.PodNamespace != "team-a" {
			t.Errorf("%s: %+v", tt.what, p)
		}
		if p.Identity != tt.identity || p.Source == credentials.SourceDriver || p.Attributes.ReadOnly != tt.readOnly || p.ReadOnly != req.GetReadonly() {
			t.Errorf("%s: identity %q of source %s, read-only %t", tt.what, p.Identity, p.Source, p.Attributes.ReadOnly)
		}
	}
}

// A volume of a class is read-only for one pod without being so for others: this is for inline volumes alone.
func TestNodePublish_ReadOnlyIsOfOnePublication(t *testing.T) {
	n, m := newInlineNode(t)
	req := publishRequest()
	req.Readonly = true
	if _, err := n.NodePublishVolume(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if p := m.last; p.Ephemeral || p.Attributes.ReadOnly || !p.ReadOnly {
		t.Errorf("%+v", p)
	}
}

func TestInlineVolume_IsRefused(t *testing.T) {
	const invalid, precondition, denied = codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied
	set := func(pairs ...string) func(*csi.NodePublishVolumeRequest) {
		return func(r *csi.NodePublishVolumeRequest) {
			for i := 0; i < len(pairs); i += 2 {
				r.VolumeContext[pairs[i]] = pairs[i+1]
			}
		}
	}
	unset := func(keys ...string) func(*csi.NodePublishVolumeRequest) {
		return func(r *csi.NodePublishVolumeRequest) {
			for _, key := range keys {
				delete(r.VolumeContext, key)
			}
		}
	}
	request := func() *csi.NodePublishVolumeRequest { return inlineRequest(nil) }
	refusePublish(t, newInlineNode, request, []refusedPublish{
		{"the driver's credentials", set("credentials", "driver"), denied, []string{"volume_context.credentials", "never use the driver's own"}},
		{"the driver's credentials beside a secret", func(r *csi.NodePublishVolumeRequest) {
			set("credentials", "driver")(r)
			maps.Copy(r.Secrets, tenantKeys())
		}, denied, []string{"never use the driver's own"}},
		{"a secret that is not there", set("credentials", "secret"), precondition, []string{"nodePublishSecretRef", "pod"}},
		{"no token", func(r *csi.NodePublishVolumeRequest) { r.Secrets = nil }, precondition, []string{"credentials: workload", "tokenRequests"}},
		{"another pod's token in the context", func(r *csi.NodePublishVolumeRequest) {
			r.Secrets = nil
			set(tokensKey, tokensOf(audience, tokenOf("system:serviceaccount:kube-system:admin")))(r)
		}, invalid, []string{"kube-system/admin"}},
		{"a secret beside workload", func(r *csi.NodePublishVolumeRequest) {
			set("credentials", "workload")(r)
			maps.Copy(r.Secrets, tenantKeys())
		}, invalid, []string{"secrets: hold S3 keys"}},
		{"no bucket", unset("bucketName"), invalid, []string{"volume_context.bucketName: is missing"}},
		{"an empty bucket", set("bucketName", ""), invalid, []string{"volume_context.bucketName: is missing"}},
		{"no bucket, and attributes of k8s-csi-s3", func(r *csi.NodePublishVolumeRequest) {
			unset("bucketName")(r)
			set("bucket", "bucket-1", "mounter", "rclone")(r)
		}, invalid, []string{"volume_context.bucketName: is missing"}},
		{"a misspelt attribute", set("prefx", "b/"), invalid, []string{"volume_context.prefx", "prefix"}},
		{"a snapshot", set("snapshot", "s@1"), codes.PermissionDenied, []string{"volume_context.snapshot"}},
		{"the driver's own prefix", set("prefix", ".s3-csi/volumes"), invalid, []string{"volume_context.prefix"}},
		{"no word of kubelet", unset(ephemeralKey, podUIDKey, podNamespaceKey, serviceAccountKey), precondition, []string{"podInfoOnMount"}},
		{"another word than kubelet's", set(ephemeralKey, "false"), precondition, []string{"podInfoOnMount"}},
		{"the author's word", func(r *csi.NodePublishVolumeRequest) {
			unset(podUIDKey)(r)
			set(podNamespaceKey, "kube-system", serviceAccountKey, "admin")(r)
		}, precondition, []string{"podInfoOnMount"}},
		{"the author's word, with a guess", set(podUIDKey, "0b9c7f1e-53a4-4f0b-8d1c-000000000000", podNamespaceKey, "kube-system"), precondition,
			[]string{"podInfoOnMount"}},
		{"a target that names no pod", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/targets/" + inlinePod + "/mount" }, precondition,
			[]string{"podInfoOnMount"}},
		{"no UID, and a target that names no pod", func(r *csi.NodePublishVolumeRequest) {
			unset(podUIDKey)(r)
			r.TargetPath = "/mount"
		}, precondition, []string{"podInfoOnMount"}},
	})
}

func TestInlineVolume_IsOffByDefault(t *testing.T) {
	if o := parse(t, "node", nil); o.Node.InlineVolumes {
		t.Error("they are on by default")
	}
	const code = codes.FailedPrecondition
	request, says := func() *csi.NodePublishVolumeRequest { return inlineRequest(nil) }, []string{"not enabled", "inlineVolumes: true", "--inline-volumes"}
	refusePublish(t, newTestNode, request, []refusedPublish{
		{"as kubelet asks", func(*csi.NodePublishVolumeRequest) {}, code, says},
		{"without its word", func(r *csi.NodePublishVolumeRequest) { delete(r.VolumeContext, ephemeralKey) }, code, says},
		{"with another handle", func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "default:bucket-1/a/" }, code, says},
	})
}
