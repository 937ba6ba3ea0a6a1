package driver

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

// podPublisher remembers what it is asked to publish.
type podPublisher struct {
	volume  podvolume.Volume
	refused error
}

func (p *podPublisher) Publish(_ context.Context, v podvolume.Volume, refused error) error {
	p.volume, p.refused = v, refused
	return refused
}

func podRequest() *csi.NodePublishVolumeRequest {
	const uid = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"
	return &csi.NodePublishVolumeRequest{
		VolumeId: "csi-" + strings.Repeat("0", 64), TargetPath: "/var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~csi/data/mount",
		VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{VolumeMountGroup: "1000"}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		},
		VolumeContext: map[string]string{
			podvolume.AttributeEmptyDir: "fd", podvolume.AttributeSocket: "s.sock", ephemeralKey: "true", podUIDKey: uid,
		},
		Secrets: map[string]string{tokensKey: "{}"},
	}
}

func TestPodClients(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		want   podvolume.Volume // without target and id
		kind   fault.Kind       // of the error; Unknown: none
		field  string
	}{
		"as it is": {func(*csi.NodePublishVolumeRequest) {}, podvolume.Volume{}, fault.Unknown, ""},
		"pod names": {func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext[podNamespaceKey], r.VolumeContext[podNameKey] = "team-a", "web-0"
		}, podvolume.Volume{PodNamespace: "team-a", PodName: "web-0"}, fault.Unknown, ""},
		"a pod name that is none": {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[podNameKey] = "web\n0" }, podvolume.Volume{}, fault.Invalid,
			"volume_context." + podNameKey},
		"read-only": {func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }, podvolume.Volume{ReadOnly: true}, fault.Unknown, ""},
		"SELinux": {func(r *csi.NodePublishVolumeRequest) {
			r.GetVolumeCapability().GetMount().MountFlags = []string{`context="u:r:t:s0:c1,c2"`}
		}, podvolume.Volume{SELinuxContext: "u:r:t:s0:c1,c2"}, fault.Unknown, ""},
		"an option": {func(r *csi.NodePublishVolumeRequest) {
			r.GetVolumeCapability().GetMount().MountFlags = []string{"allow-delete"}
		}, podvolume.Volume{}, fault.Invalid, flagsField},
		"a secret": {func(r *csi.NodePublishVolumeRequest) { r.Secrets["accessKeyID"] = "x" }, podvolume.Volume{}, fault.Invalid, "secrets"},
		"a bucket": {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext["bucketName"] = "b" }, podvolume.Volume{}, fault.Invalid,
			"volume_context.bucketName"},
		"one attribute": {func(r *csi.NodePublishVolumeRequest) { delete(r.VolumeContext, podvolume.AttributeEmptyDir) }, podvolume.Volume{}, fault.Invalid,
			"volume_context." + podvolume.AttributeEmptyDir},
		"a claim": {func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "default:b"; delete(r.VolumeContext, ephemeralKey) }, podvolume.Volume{},
			fault.Invalid, "volume_context." + podvolume.AttributeEmptyDir},
		"forged pod": {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[podUIDKey] = "x" }, podvolume.Volume{}, fault.Precondition, ""},
		"block": {func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}, podvolume.Volume{}, fault.Invalid, capabilityField + ".block"},
		"no target path": {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" }, podvolume.Volume{}, fault.Invalid, "target_path"},
	} {
		pods := &podPublisher{}
		n := &Node{podClients: true, PodClients: pods, mounter: nil}
		req := podRequest()
		tc.change(req)
		_, err := n.NodePublishVolume(t.Context(), req)
		if tc.kind != fault.Unknown {
			f := (*fault.Error)(nil)
			if !fault.Is(err, tc.kind) || tc.field != "" && (!errors.As(err, &f) || f.Field != tc.field) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		tc.want.Target, tc.want.VolumeID, tc.want.EmptyDir, tc.want.Socket = req.GetTargetPath(), req.GetVolumeId(), "fd", "s.sock"
		if err != nil || pods.volume != tc.want {
			t.Errorf("%s: %+v, %v", name, pods.volume, err)
		}
	}
}

// Turned off, the request is refused, by the publisher, which knows what is published already.
func TestPodClients_AreOffByDefault(t *testing.T) {
	pods := &podPublisher{}
	n := NewNode(&fakeMounter{}, "s3.csi.driver", NodeOptions{NodeID: "n", InlineVolumes: true})
	n.PodClients = pods
	if _, err := n.NodePublishVolume(t.Context(), podRequest()); !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "--pod-clients") ||
		pods.volume.Target == "" {
		t.Errorf("%v, %+v", err, pods)
	}
}

func TestPodClients_NeedHealing(t *testing.T) {
	for _, args := range [][]string{{"--pod-clients", "--heal=false"}, {"--pod-clients"}} {
		_, err := Parse(append([]string{"node", "--node-id=n"}, args...), environment(nil))
		if got := err != nil && strings.Contains(err.Error(), "pod-clients"); got != (len(args) == 2) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
