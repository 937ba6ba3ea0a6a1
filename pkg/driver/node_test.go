package driver

import (
	"reflect"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func newTestNode(t *testing.T) (*Node, *fakeMounter) {
	t.Helper()
	m := newFakeMounter()
	n := NewNode(m, "s3.csi.driver", NodeOptions{NodeID: "node-1"})
	n.MaxVolumes = 7
	return n, m
}

// refusedPublish is a change of a publish request, and how the changed request is refused.
type refusedPublish struct {
	what   string
	change func(*csi.NodePublishVolumeRequest)
	code   codes.Code
	says   []string
}

// refusePublish checks that a node refuses requests before it calls the mounter, without showing secrets.
func refusePublish(t *testing.T, newNode func(*testing.T) (*Node, *fakeMounter), request func() *csi.NodePublishVolumeRequest, tests []refusedPublish) {
	t.Helper()
	for _, tt := range tests {
		n, m := newNode(t)
		req := request()
		tt.change(req)
		_, err := n.NodePublishVolume(t.Context(), req)
		refused(t, tt.what, csi.Node_NodePublishVolume_FullMethodName, err, tt.code, tt.says...)
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: the error shows a secret: %v", tt.what, err)
		}
		if m.calls > 0 {
			t.Errorf("%s: refused after the mounter was called", tt.what)
		}
	}
}

func TestNodePublish_RefusesInvalidRequests(t *testing.T) {
	const invalid, precondition = codes.InvalidArgument, codes.FailedPrecondition
	flags := func(flags ...string) func(*csi.NodePublishVolumeRequest) {
		return func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = flags }
	}
	context := func(pairs ...string) func(*csi.NodePublishVolumeRequest) {
		return func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = map[string]string{}
			for i := 0; i < len(pairs); i += 2 {
				r.VolumeContext[pairs[i]] = pairs[i+1]
			}
		}
	}
	refusePublish(t, newTestNode, publishRequest, []refusedPublish{
		{"no id", func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "" }, invalid, []string{"volume_id: is missing"}},
		{"long id", func(r *csi.NodePublishVolumeRequest) { r.VolumeId = strings.Repeat("x", 129) }, invalid, []string{"volume_id: has 129"}},
		{"no target", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" }, invalid, []string{"target_path: is missing"}},
		{"relative target", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "pods/1" }, invalid, []string{"target_path:", "absolute"}},
		{"climbing target", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/pods/../etc" }, invalid, []string{"target_path:", `".."`}},
		{"root target", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "//./" }, invalid, []string{"target_path:", "root"}},
		{"zero byte", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/pods/\x00" }, invalid, []string{"target_path:", "zero byte"}},
		{"long target", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/" + strings.Repeat("x", 4095) }, invalid, []string{"target_path: has 4096"}},
		{"no capability", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil }, invalid, []string{"volume_capability: is missing"}},
		{"no mode", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode = nil }, invalid, []string{"volume_capability.access_mode"}},
		{"access mode of the future", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode.Mode = 99 }, invalid,
			[]string{"volume_capability.access_mode"}},
		{"block", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}, invalid, []string{"volume_capability.block"}},
		{"oversize flags", flags(strings.Repeat("x", 4097)), invalid, []string{"volume_capability.mount.mount_flags"}},
		{"injected flag", flags("allow-delete", "-o x"), invalid, []string{"volume_capability.mount.mount_flags[1]"}},
		{"newline", flags("uid=1\n--x"), invalid, []string{"volume_capability.mount.mount_flags[0]"}},
		{"flag twice", flags("uid=1", "uid=2"), invalid, []string{"volume_capability.mount.mount_flags[1]"}},
		{"two labels", flags("context=a:b:c", "context=a:b:c"), invalid, []string{"two SELinux contexts"}},
		{"no label", flags(`context=a:b:c,rw`), invalid, []string{"not an SELinux context"}},
		{"half a label", flags(`context="a:b"`), invalid, []string{"not an SELinux context"}},
		{"group name", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "users" }, invalid,
			[]string{"volume_capability.mount.volume_mount_group"}},
		{"no group", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.GetMount().VolumeMountGroup = "4294967295"
		}, invalid, []string{"volume_capability.mount.volume_mount_group"}},
		{"oversize context", context("mountOptions", strings.Repeat("x", 4097)), invalid, []string{"volume_context: has"}},
		{"unknown context key", context("bucketNam", "x"), invalid, []string{"volume_context.bucketNam"}},
		{"another bucket", context("bucketName", "bucket-2"), invalid, []string{"volume_context.bucketName"}},
		{"static without bucket", func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "my-volume" }, invalid, []string{"volume_context.bucketName"}},
		{"inline", context("csi.storage.k8s.io/ephemeral", "true"), precondition, []string{"inline volumes", "not enabled"}},
		{"inline, and the CO does not say so", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeId = "csi-" + strings.Repeat("0123456789abcdef", 4)
			r.VolumeContext = map[string]string{"bucketName": "bucket-1", "csi.storage.k8s.io/ephemeral": "false"}
		}, precondition, []string{"inline volumes", "not enabled"}},
		{"driver's and secret", func(r *csi.NodePublishVolumeRequest) { context("credentials", "driver")(r); r.Secrets = tenantKeys() }, invalid,
			[]string{"secrets: hold S3 keys"}},
		{"secret without keys", context("credentials", "secret"), precondition, []string{"nodePublishSecretRef"}},
		{"misspelt secret", func(r *csi.NodePublishVolumeRequest) { r.Secrets = map[string]string{"accessKeyId": "canary"} }, invalid,
			[]string{"secrets: have neither", "accessKeyId"}},
		{"half a secret", func(r *csi.NodePublishVolumeRequest) { r.Secrets = map[string]string{"secretAccessKey": "canary"} }, invalid,
			[]string{"secrets.accessKeyID"}},
		{"oversize secrets", func(r *csi.NodePublishVolumeRequest) { r.Secrets = map[string]string{"x": strings.Repeat("x", 4096)} }, invalid,
			[]string{"secrets: has"}},
	})
}

func TestNodePublish_ReadsTheWholeRequest(t *testing.T) {
	n, m := newTestNode(t)
	req := &csi.NodePublishVolumeRequest{
		VolumeId:   "tenants:bucket-1/a/",
		TargetPath: "/pods/1//mount/",
		VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
			"max-threads=8", `context="system_u:object_r:container_file_t:s0:c1,c2"`),
		VolumeContext: map[string]string{"client": "mountpoint-s3", "mountOptions": "allow-delete", tokensKey: strings.Repeat("x", 5000)},
		Secrets:       map[string]string{"accessKeyID": "AKIA1", "secretAccessKey": "s", "sessionToken": "t", tokensKey: strings.Repeat("x", 5000)},
	}
	req.VolumeCapability.GetMount().VolumeMountGroup = "2000"
	if _, err := n.NodePublishVolume(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	p := m.last
	if p.VolumeID != "tenants:bucket-1/a/" || p.Target != "/pods/1/mount" || p.Volume != (volume.ID{Backend: "tenants", Bucket: "bucket-1", Prefix: "a/"}) {
		t.Errorf("place: %+v", p)
	}
	if p.Attributes.Client != "mountpoint-s3" || len(p.Options) != 2 || p.Options[0].String() != "allow-delete" || p.Options[1].String() != "max-threads=8" {
		t.Errorf("options: %+v", p.Options)
	}
	if p.SELinuxContext != "system_u:object_r:container_file_t:s0:c1,c2" || p.MountGroup == nil || *p.MountGroup != 2000 {
		t.Errorf("label %q, group %v", p.SELinuxContext, p.MountGroup)
	}
	if p.Source != credentials.SourceSecret || p.Identity != "secret:AKIA1" ||
		p.Keys != (credentials.Keys{AccessKeyID: "AKIA1", SecretAccessKey: "s", SessionToken: "t"}) {
		t.Errorf("credentials: %s %s", p.Source, p.Identity)
	}
	if !p.SingleWriter || p.ReadOnly {
		t.Errorf("modes: %+v", p)
	}
}

// A CO may say the same thing in other words when it publishes again.
func TestNodePublish_EqualRequestsAreEqual(t *testing.T) {
	n, m := newTestNode(t)
	for what, change := range map[string]func(*csi.NodePublishVolumeRequest){
		"a slash at the end": func(r *csi.NodePublishVolumeRequest) { r.TargetPath += "/" },
		"pod information": func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = map[string]string{"csi.storage.k8s.io/pod.name": "pod"}
		},
		"another fs_type": func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().FsType = "ext4" },
		"another access mode": func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		},
	} {
		if _, err := n.NodePublishVolume(t.Context(), publishRequest()); err != nil {
			t.Fatal(err)
		}
		first, again := m.last, publishRequest()
		change(again)
		_, err := n.NodePublishVolume(t.Context(), again)
		last := m.last
		last.PodName = first.PodName // it is for people: nothing is decided by it
		if err != nil || !reflect.DeepEqual(first, last) {
			t.Errorf("%s: %+v, %v; want %+v", what, m.last, err, first)
		}
	}
}

func TestNodePublish_ReadsPodName(t *testing.T) {
	n, m := newTestNode(t)
	r := publishRequest()
	r.VolumeContext = map[string]string{podNameKey: "web-0", podNamespaceKey: "team-a"}
	if _, err := n.NodePublishVolume(t.Context(), r); err != nil || m.last.PodName != "web-0" || m.last.PodNamespace != "team-a" {
		t.Errorf("%+v, %v", m.last, err)
	}
	r.VolumeContext[podNameKey] = "web/0"
	if _, err := n.NodePublishVolume(t.Context(), r); !fault.Is(err, fault.Invalid) {
		t.Errorf("a name that is none: %v", err)
	}
}

func TestNodePublish_AccessModes(t *testing.T) {
	for mode, want := range map[csi.VolumeCapability_AccessMode_Mode]struct{ readOnly, single bool }{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        {false, false},
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   {true, false},
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:    {true, false},
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER:  {false, false},
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:   {false, false},
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: {false, true},
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  {false, false},
	} {
		for _, readOnly := range []bool{false, true} {
			n, m := newTestNode(t)
			req := publishRequest()
			req.VolumeCapability, req.Readonly = mountCapability(mode), readOnly
			if _, err := n.NodePublishVolume(t.Context(), req); err != nil {
				t.Errorf("%v: %v", mode, err)
			}
			if m.last.ReadOnly != (want.readOnly || readOnly) || m.last.Attributes.ReadOnly != want.readOnly || m.last.SingleWriter != want.single {
				t.Errorf("%v, readonly %v: %+v", mode, readOnly, m.last)
			}
		}
	}
}

func TestNodePublish_CredentialSource(t *testing.T) {
	for _, tt := range []struct {
		said    string
		secrets map[string]string
		want    string
	}{
		{"", nil, "driver"},
		{"driver", nil, "driver"},
		{"", map[string]string{tokensKey: "token"}, "driver"},
		{"", tenantKeys(), "secret:AKIA1"},
		{"secret", tenantKeys(), "secret:AKIA1"},
	} {
		n, m := newTestNode(t)
		req := publishRequest()
		req.Secrets = tt.secrets
		if tt.said != "" {
			req.VolumeContext = map[string]string{"credentials": tt.said}
		}
		if _, err := n.NodePublishVolume(t.Context(), req); err != nil || m.last.Identity != tt.want {
			t.Errorf("%q with %d secrets: %s, %v", tt.said, len(tt.secrets), m.last.Identity, err)
		}
		if isSecret := strings.HasPrefix(tt.want, "secret"); isSecret == m.last.Keys.IsZero() {
			t.Errorf("%q: keys %v", tt.said, m.last.Keys)
		}
	}
}

func TestNodePublish_StaticVolume(t *testing.T) {
	n, m := newTestNode(t)
	req := publishRequest()
	req.VolumeId = "my-volume"
	req.VolumeContext = map[string]string{"bucketName": "bucket-9", "prefix": "team/"}
	if _, err := n.NodePublishVolume(t.Context(), req); err != nil || m.last.Volume != (volume.ID{Backend: "default", Bucket: "bucket-9", Prefix: "team/"}) {
		t.Errorf("%+v, %v", m.last.Volume, err)
	}
}

func TestNodeUnpublish(t *testing.T) {
	n, m := newTestNode(t)
	const method = csi.Node_NodeUnpublishVolume_FullMethodName
	if _, err := n.NodePublishVolume(t.Context(), publishRequest()); err != nil {
		t.Fatal(err)
	}
	_, err := n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{TargetPath: "/pods/1/mount"})
	refused(t, "no id", method, err, codes.InvalidArgument, "volume_id")
	_, err = n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "v"})
	refused(t, "no target", method, err, codes.InvalidArgument, "target_path")
	_, err = n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "v", TargetPath: "/a/../b"})
	refused(t, "climbing target", method, err, codes.InvalidArgument, "target_path")
	for range 2 {
		if _, err := n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "default:bucket-1/a/", TargetPath: "/pods/1/mount/"}); err != nil {
			t.Error(err)
		}
	}
	if len(m.published) != 0 {
		t.Errorf("still published: %v", m.published)
	}
}

func TestNodeGetVolumeStats(t *testing.T) {
	n, _ := newTestNode(t)
	const method = csi.Node_NodeGetVolumeStats_FullMethodName
	if _, err := n.NodePublishVolume(t.Context(), publishRequest()); err != nil {
		t.Fatal(err)
	}
	ask := func(id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
		return n.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	}
	_, err := ask("", "/pods/1/mount")
	refused(t, "no id", method, err, codes.InvalidArgument, "volume_id")
	_, err = ask("default:bucket-1/a/", "")
	refused(t, "no path", method, err, codes.InvalidArgument, "volume_path")
	_, err = ask("default:bucket-1/a/", "some/path")
	refused(t, "relative path", method, err, codes.NotFound, "some/path")
	_, err = ask("default:bucket-1/a/", "/pods/2/mount")
	refused(t, "another path", method, err, codes.NotFound)
	_, err = ask("default:bucket-1/b/", "/pods/1/mount")
	refused(t, "another volume", method, err, codes.NotFound)
	resp, err := ask("default:bucket-1/a/", "/pods/1/mount")
	if err != nil || len(resp.GetUsage()) != 2 {
		t.Fatalf("%v, %v", resp, err)
	}
	if u := resp.GetUsage()[0]; u.GetUnit() != csi.VolumeUsage_BYTES || u.GetTotal() != 6 || u.GetUsed() != 1 || u.GetAvailable() != 5 {
		t.Errorf("bytes: %v", u)
	}
	if u := resp.GetUsage()[1]; u.GetUnit() != csi.VolumeUsage_INODES || u.GetTotal() != 60 || u.GetUsed() != 10 || u.GetAvailable() != 50 {
		t.Errorf("inodes: %v", u)
	}
}

func TestNode_InfoAndCapabilities(t *testing.T) {
	n, _ := newTestNode(t)
	info, err := n.NodeGetInfo(t.Context(), nil)
	if err != nil || info.GetNodeId() != "node-1" || info.GetMaxVolumesPerNode() != 7 || info.GetAccessibleTopology() != nil {
		t.Errorf("%v, %v", info, err)
	}
	caps, err := n.NodeGetCapabilities(t.Context(), nil)
	if err != nil || len(caps.GetCapabilities()) != 3 {
		t.Errorf("%v, %v", caps, err)
	}
	for _, c := range caps.GetCapabilities() {
		if c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME {
			t.Error("staging is claimed and not done")
		}
	}
}

func FuzzSELinuxContextHoldsNoSecondOption(f *testing.F) {
	f.Add(`context="system_u:object_r:container_file_t:s0:c1,c2"`)
	f.Add("context=a:b:c")
	f.Add(`context="a:b:c",allow_other`)
	f.Fuzz(func(t *testing.T, flag string) {
		_, context, err := splitSELinux([]string{flag}, "f")
		if err != nil || context == "" {
			return
		}
		// Within mount(2)'s comma-separated data only a level may hold a comma; quotes and anything else never.
		if strings.ContainsAny(context, "\"'\\ \t\n=\x00") || strings.Contains(strings.Join(strings.SplitN(context, ":", 4)[:3], ""), ",") {
			t.Errorf("%q gives %q", flag, context)
		}
	})
}
