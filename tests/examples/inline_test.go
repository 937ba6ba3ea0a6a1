package examples

import (
	"context"
	"maps"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

// podRecorder publishes volumes whose client runs in the pod, and remembers the last one.
type podRecorder struct{ podvolume.Volume }

func (r *podRecorder) Publish(_ context.Context, v podvolume.Volume, refused error) error {
	r.Volume = v
	return refused
}

// inline is an inline volume of a pod.
type inline struct {
	Driver           string            `json:"driver"`
	ReadOnly         bool              `json:"readOnly"`
	VolumeAttributes map[string]string `json:"volumeAttributes"`
	Secret           struct {
		Name string `json:"name"`
	} `json:"nodePublishSecretRef"`
}

// checkInline publishes an inline volume as kubelet does, up to where it would be mounted.
func (e example) checkInline(name string, v inline) {
	e.t.Helper()
	const (
		uid       = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"
		ofKubelet = "csi.storage.k8s.io/"
	)
	published := &recorder{}
	node := driver.NewNode(published, v.Driver, driver.NodeOptions{NodeID: "node", InlineVolumes: true, PodClients: true})
	inPod := &podRecorder{}
	node.PodClients = inPod
	attributes := map[string]string{ofKubelet + "ephemeral": "true", ofKubelet + "pod.uid": uid, ofKubelet + "pod.namespace": "research",
		ofKubelet + "serviceAccount.name": "trainer"}
	maps.Copy(attributes, v.VolumeAttributes)
	secrets := map[string]string{ofKubelet + "serviceAccount.tokens": `{"sts.amazonaws.com": {"token": "t", "expirationTimestamp": "2030-01-01T00:00:00Z"}}`}
	source := credentials.SourceWorkload
	if v.Secret.Name != "" {
		source = credentials.SourceSecret
		keys := map[string]string{"accessKeyID": "AKIAEXAMPLE", "secretAccessKey": "example"}
		if e.config != nil {
			keys = e.named("Secret", v.Secret.Name).StringData
		}
		maps.Copy(secrets, keys)
	}
	ownClient := podvolume.Requested(v.VolumeAttributes)
	if _, err := node.NodePublishVolume(e.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: "csi-" + strings.Repeat("0", 64), TargetPath: "/var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~csi/" + name + "/mount",
		VolumeContext: attributes, Secrets: secrets, Readonly: v.ReadOnly, VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		},
	}); err != nil {
		e.t.Fatalf("volume %s: %v", name, err)
	}
	if ownClient {
		if inPod.EmptyDir == "" {
			e.t.Errorf("volume %s: %+v", name, inPod.Volume)
		}
		return
	}
	p := published.Request
	if p.Source != source {
		e.t.Errorf("volume %s has credentials of source %s, want %s", name, p.Source, source)
	}
	checkClient(e.t, p.Attributes, p.Options)
	c, err := client.Get(p.Attributes.Client)
	if err != nil {
		e.t.Fatal(err)
	}
	if err := c.CheckInline(p.Attributes, p.Options, client.Share{Memory: 1 << 30, CPUWeight: 100, Tasks: 1024}); err != nil { // the node's defaults
		e.t.Error(err)
	}
	e.checkClaims(p.Volume.Backend, v.Secret.Name, p.Claims)
}

// recorder records the request of a publication.
type recorder struct {
	driver.Mounter
	mount.Request
}

func (r *recorder) Publish(_ context.Context, p mount.Request, refused error) error {
	r.Request = p
	return refused
}
