package driver

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
)

func newTestController(t *testing.T) (*Controller, *fakeProvisioner) {
	t.Helper()
	p := newFakeProvisioner()
	c := NewController(p, newFakeSnapshots(), fakeBackends{})
	return c, p
}

func createRequest() *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               "pvc-1",
		VolumeCapabilities: []*csi.VolumeCapability{mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
		Parameters:         map[string]string{"bucketName": "bucket-1"},
	}
}

func tenantKeys() map[string]string {
	return map[string]string{"accessKeyID": "AKIA1", "secretAccessKey": "s"}
}

// refused checks that err has the code and contains each part.
func refused(t *testing.T, what, method string, err error, code codes.Code, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", what)
		return
	}
	if got := codeOf(t.Context(), method, err); got != code {
		t.Errorf("%s: %v (%v), want %v", what, got, err, code)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %q does not say %q", what, err, part)
		}
	}
}

func TestCreateVolume_RefusesInvalidRequests(t *testing.T) {
	const invalid = codes.InvalidArgument
	tests := []struct {
		what   string
		change func(*csi.CreateVolumeRequest)
		code   codes.Code
		says   []string
	}{
		{"no name", func(r *csi.CreateVolumeRequest) { r.Name = "" }, invalid, []string{"name: is missing"}},
		{"long name", func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("n", 129) }, invalid, []string{"name: has 129 bytes"}},
		{"control character", func(r *csi.CreateVolumeRequest) { r.Name = "a\x01" }, invalid, []string{"name:", "control character"}},
		{"C1 control character", func(r *csi.CreateVolumeRequest) { r.Name = "a\u0085" }, invalid, []string{"name:", "control character"}},
		{"no capabilities", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil }, invalid, []string{"volume_capabilities: are missing"}},
		{"nil capability", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = append(r.VolumeCapabilities, nil) }, invalid,
			[]string{"volume_capabilities[1]: is missing"}},
		{"no access mode", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode = nil }, invalid,
			[]string{"volume_capabilities[0].access_mode: is missing"}},
		{"access mode of the future", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode.Mode = 99 }, invalid,
			[]string{"volume_capabilities[0].access_mode: 99"}},
		{"no access type", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessType = nil }, invalid,
			[]string{"volume_capabilities[0].access_type: is missing"}},
		{"block", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}, invalid, []string{"volume_capabilities[0].block", "not supported"}},
		{"long fs_type", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().FsType = strings.Repeat("x", 129)
		}, invalid, []string{"volume_capabilities[0].mount.fs_type"}},
		{"oversize mount flags", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{strings.Repeat("x", 4097)}
		}, invalid, []string{"volume_capabilities[0].mount.mount_flags", "4097"}},
		{"oversize mount flags together", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"a=" + strings.Repeat("x", 2046), "b=" + strings.Repeat("x", 2047)}
		}, invalid, []string{"volume_capabilities[0].mount.mount_flags", "4097"}},
		{"injected mount flag", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"allow-delete", "-oallow_root"}
		}, invalid, []string{"volume_capabilities[0].mount.mount_flags[1]"}},
		{"mount flag that the named client lacks", func(r *csi.CreateVolumeRequest) {
			r.Parameters["client"] = "mountpoint-s3"
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"endpoint-url=http://evil"}
		}, invalid, []string{"volume_capabilities[0].mount.mount_flags[0]", "endpoint-url"}},
		{"mount flag that is a mount option already", func(r *csi.CreateVolumeRequest) {
			r.Parameters["mountOptions"] = "allow-delete"
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"allow-delete"}
		}, invalid, []string{"volume_capabilities[0].mount.mount_flags", "allow-delete", "mountOptions"}},
		{"broken SELinux context", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"context=x"}
		}, invalid, []string{"volume_capabilities[0].mount.mount_flags", "SELinux"}},
		{"less memory than its client needs", func(r *csi.CreateVolumeRequest) {
			r.Parameters["client"], r.Parameters["memoryLimit"] = "mountpoint-s3", "512Mi"
		}, invalid, []string{"parameters.memoryLimit", "at least 640Mi"}},
		{"less memory than a mount flag wants", func(r *csi.CreateVolumeRequest) {
			r.Parameters["client"], r.Parameters["memoryLimit"] = "mountpoint-s3", "1Gi"
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"memory-target=1024"}
		}, invalid, []string{"parameters.memoryLimit", "memory-target=1024", "at least 1280Mi"}},
		{"unknown client", func(r *csi.CreateVolumeRequest) { r.Parameters["client"] = "nosuch" }, invalid, []string{"parameters.client", "nosuch"}},
		{"negative size", func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: -1} }, invalid,
			[]string{"capacity_range.required_bytes: -1"}},
		{"negative limit", func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: -1} }, invalid,
			[]string{"capacity_range.limit_bytes: -1"}},
		{"limit below size", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}
		}, invalid, []string{"capacity_range:"}},
		{"a snapshot itself, to write to", func(r *csi.CreateVolumeRequest) {
			r.Parameters["snapshotAccess"] = "direct"
			r.VolumeContentSource = snapshotSource("default:bucket-1/s@1")
		}, invalid, []string{"volume_capabilities[0].access_mode", "read-only"}},
		{"a snapshot itself, of another bucket", func(r *csi.CreateVolumeRequest) {
			r.Parameters["snapshotAccess"] = "direct"
			r.VolumeContentSource = snapshotSource("default:bucket-2/s@1")
		}, invalid, []string{"parameters.bucketName", "bucket-2"}},
		{"a snapshot itself, of none", func(r *csi.CreateVolumeRequest) { r.Parameters["snapshotAccess"] = "direct" }, invalid,
			[]string{"parameters.snapshotAccess"}},
		{"a snapshot that cannot be", func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = snapshotSource("s") }, codes.NotFound,
			[]string{"volume_content_source.snapshot"}},
		{"a volume that cannot be", func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "v"}}}
		}, codes.NotFound, []string{"volume_content_source.volume"}},
		{"content source", func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }, invalid, []string{"volume_content_source"}},
		{"mutable parameters", func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} }, invalid,
			[]string{"mutable_parameters", "unknown: a"}},
		{"parameters that are not mutable", func(r *csi.CreateVolumeRequest) {
			r.MutableParameters = map[string]string{"client": "rclone", "uid": "7", "nosuch": "x"}
		}, invalid, []string{"mutable_parameters", "unknown: nosuch", "fixed at creation: client, uid"}},
		{"tags of a prefix", func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"tags": "a=b"} }, invalid,
			[]string{"parameters.tags", "bucketName"}},
		{"reserved tags", func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"tags": "s3.csi/volume=b"} }, invalid,
			[]string{"mutable_parameters.tags", "reserved"}},
		{"oversize parameters", func(r *csi.CreateVolumeRequest) { r.Parameters["prefix"] = strings.Repeat("x", 4096) }, invalid, []string{"parameters: has"}},
		{"unknown parameter", func(r *csi.CreateVolumeRequest) { r.Parameters["bucketNam"] = "x" }, invalid, []string{"parameters.bucketNam", "bucketName"}},
		{"bad onDelete", func(r *csi.CreateVolumeRequest) { r.Parameters["onDelete"] = "perhaps" }, invalid, []string{"parameters.onDelete"}},
		{"mount option of another client than the backend's default", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"bucketName": "bucket-1", "backend": "cached", "mountOptions": "allow-delete"}
		}, invalid, []string{"parameters.mountOptions", "allow-delete"}},
		{"injected mount option", func(r *csi.CreateVolumeRequest) { r.Parameters["mountOptions"] = "debug,--config /etc/passwd extra" }, invalid,
			[]string{"parameters.mountOptions[1]"}},
		{"unknown backend", func(r *csi.CreateVolumeRequest) { r.Parameters["backend"] = "gone" }, codes.FailedPrecondition, []string{`"gone"`}},
		{"secret that is not asked for", func(r *csi.CreateVolumeRequest) { r.Secrets = tenantKeys() }, invalid,
			[]string{"secrets: hold S3 keys", "controllerCredentials: secret"}},
		{"secret that is missing", func(r *csi.CreateVolumeRequest) { r.Parameters["backend"] = "tenants" }, codes.FailedPrecondition,
			[]string{"provisioner-secret-name", "may have been deleted", "accessKeyID"}},
		{"half a secret", func(r *csi.CreateVolumeRequest) {
			r.Parameters["backend"], r.Secrets = "tenants", map[string]string{"accessKeyID": "x"}
		}, invalid, []string{"secrets.secretAccessKey"}},
		{"oversize secrets", func(r *csi.CreateVolumeRequest) {
			r.Parameters["backend"], r.Secrets = "tenants", tenantKeys()
			r.Secrets["x"] = strings.Repeat("x", 4096)
		}, invalid, []string{"secrets: has"}},
	}
	for _, tt := range tests {
		c, p := newTestController(t)
		req := createRequest()
		tt.change(req)
		_, err := c.CreateVolume(t.Context(), req)
		refused(t, tt.what, csi.Controller_CreateVolume_FullMethodName, err, tt.code, tt.says...)
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: the error shows a secret: %v", tt.what, err)
		}
		if p.calls > 0 {
			t.Errorf("%s: refused after a side effect", tt.what)
		}
	}
}

func TestCreateVolume_AcceptsAllowedRequests(t *testing.T) {
	for what, change := range map[string]func(*csi.CreateVolumeRequest){
		"plain":        func(*csi.CreateVolumeRequest) {},
		"longest name": func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("n", 128) },
		"longest place": func(r *csi.CreateVolumeRequest) {
			r.Name, r.Parameters["bucketName"] = strings.Repeat("ü", 64), strings.Repeat("b", 63)
		},
		"longest base prefix": func(r *csi.CreateVolumeRequest) {
			r.Name, r.Parameters["prefix"] = strings.Repeat("ü", 64), "base/${pvc.namespace}/"
			r.Parameters["csi.storage.k8s.io/pvc/namespace"] = strings.Repeat("namespace", 7)
		},
		"Unicode name":  func(r *csi.CreateVolumeRequest) { r.Name = "große Daten/日本" },
		"every mode":    func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = everyMode() },
		"a file system": func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].GetMount().FsType = "ext4" },
		"an SELinux context": func(r *csi.CreateVolumeRequest) {
			r.Parameters["client"] = "rclone"
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}
		},
		"an empty range":  func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{} },
		"only a limit":    func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: 5} },
		"topology":        func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = &csi.TopologyRequirement{} },
		"metadata":        func(r *csi.CreateVolumeRequest) { r.Parameters["csi.storage.k8s.io/pvc/name"] = "data" },
		"metadata secret": func(r *csi.CreateVolumeRequest) { r.Secrets = map[string]string{} },
	} {
		c, _ := newTestController(t)
		req := createRequest()
		change(req)
		resp, err := c.CreateVolume(t.Context(), req)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if id := resp.GetVolume().GetVolumeId(); len(id) > 128 || strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }) {
			t.Errorf("%s: the volume id %q is too long, or has what COs cannot put into file names, labels and logs", what, id)
		}
		again, err := c.CreateVolume(t.Context(), req)
		if err != nil || !proto.Equal(resp, again) {
			t.Errorf("%s: a retry gives %v, %v, not %v", what, again, err, resp)
		}
	}
}

func everyMode() (all []*csi.VolumeCapability) {
	for mode := range csi.VolumeCapability_AccessMode_Mode_name {
		if mode != 0 {
			all = append(all, mountCapability(csi.VolumeCapability_AccessMode_Mode(mode)))
		}
	}
	return all
}

func TestCreateVolume_CapacityIsPartOfTheVolume(t *testing.T) {
	c, _ := newTestController(t)
	req := createRequest()
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 10, LimitBytes: 10}
	resp, err := c.CreateVolume(t.Context(), req)
	if err != nil || resp.GetVolume().GetCapacityBytes() != 10 {
		t.Fatalf("%v, %v", resp, err)
	}
	if resp, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "pvc-2", VolumeCapabilities: req.GetVolumeCapabilities(), CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 30, LimitBytes: 2 << 30},
	}); err != nil || resp.GetVolume().GetCapacityBytes() < 1<<30 || resp.GetVolume().GetCapacityBytes() > 2<<30 {
		t.Errorf("a range: %v, %v", resp, err)
	}
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 20, LimitBytes: 20}
	_, err = c.CreateVolume(t.Context(), req)
	refused(t, "another size", csi.Controller_CreateVolume_FullMethodName, err, codes.AlreadyExists, `create volume "pvc-1"`)
}

func TestCreateVolume_ContextHasNoSecrets(t *testing.T) {
	c, p := newTestController(t)
	req := createRequest()
	req.Parameters = map[string]string{"bucketName": "bucket-1", "backend": "tenants", "client": "rclone", "uid": "1000", "csi.storage.k8s.io/pvc/name": "data"}
	req.Secrets = tenantKeys()
	resp, err := c.CreateVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := resp.GetVolume().GetVolumeContext(), map[string]string{"client": "rclone", "uid": "1000"}; !maps.Equal(got, want) {
		t.Errorf("context %v, want %v", got, want)
	}
	if p.secret.Keys.AccessKeyID != "AKIA1" || p.secret.Keys.SecretAccessKey != "s" {
		t.Errorf("keys %v", p.secret)
	}
}

func TestCreateVolume_PassesNamespaceAndRole(t *testing.T) {
	c, p := newTestController(t)
	role := "arn:aws:iam::111122223333:role/tenant"
	req := createRequest()
	req.Parameters = map[string]string{"bucketName": "bucket-1", "backend": "tenants", "csi.storage.k8s.io/pvc/namespace": "team-a"}
	req.Secrets = map[string]string{"accessKeyID": "AKIA1", "secretAccessKey": "s", "roleARN": role}
	resp, err := c.CreateVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if p.last.Namespace != "team-a" || p.last.RoleARN != role {
		t.Errorf("namespace %q, role %q", p.last.Namespace, p.last.RoleARN)
	}
	p.secret = provision.Secret{}
	if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: resp.GetVolume().GetVolumeId(), Secrets: req.Secrets}); err != nil ||
		p.secret.RoleARN != role {
		t.Errorf("deletion: %v, role %q", err, p.secret.RoleARN)
	}
	req.Secrets["roleARN"] = "arn:aws:iam::111122223333:user/tenant"
	_, err = c.CreateVolume(t.Context(), req)
	refused(t, "no role", csi.Controller_CreateVolume_FullMethodName, err, codes.InvalidArgument, "secrets.roleARN")
	req.Secrets = map[string]string{"roleARN": role}
	_, err = c.CreateVolume(t.Context(), req)
	refused(t, "no keys", csi.Controller_CreateVolume_FullMethodName, err, codes.InvalidArgument, "secrets", "accessKeyID")
}

func TestCreateVolume_SecondRequestInFlightIsAborted(t *testing.T) {
	c, p := newTestController(t)
	p.block, p.entered = make(chan struct{}), make(chan struct{}, 2)
	first := make(chan error, 1)
	go func() { _, err := c.CreateVolume(t.Context(), createRequest()); first <- err }()
	<-p.entered
	_, err := c.CreateVolume(t.Context(), createRequest())
	refused(t, "second", csi.Controller_CreateVolume_FullMethodName, err, codes.Aborted, `"pvc-1"`)
	other := createRequest()
	other.Name = "pvc-2"
	second := make(chan error, 1)
	go func() { _, err := c.CreateVolume(t.Context(), other); second <- err }()
	<-p.entered // another name is not held up
	close(p.block)
	for _, result := range []chan error{first, second} {
		if err := <-result; err != nil {
			t.Error(err)
		}
	}
	if _, err := c.CreateVolume(t.Context(), createRequest()); err != nil {
		t.Errorf("after the first ended: %v", err)
	}
}

func TestDeleteVolume(t *testing.T) {
	tests := []struct {
		what, id string
		secrets  map[string]string
		code     codes.Code // OK: success
		called   bool
		says     string
	}{
		{"ours", "default:bucket-1/pvc-1/", nil, codes.OK, true, ""},
		{"ours with keys", "tenants:bucket-1/pvc-1/", tenantKeys(), codes.OK, true, ""},
		{"no id", "", nil, codes.InvalidArgument, false, "volume_id: is missing"},
		{"long id", strings.Repeat("x", 129), nil, codes.InvalidArgument, false, "volume_id: has 129 bytes"},
		{"an id that the driver cannot have made", "default:bucket-1/a/../pvc-1/", nil, codes.OK, false, ""},
		{"an id without its slash", "default:bucket-1/pvc-1", nil, codes.OK, false, ""},
		{"sanity's", "fake-vol-id", nil, codes.OK, false, ""},
		{"nonsense with a colon", "x y:z", nil, codes.OK, false, ""},
		{"another driver's", "pvc-0f1e2d3c-1111-2222-3333-444455556666", nil, codes.FailedPrecondition, false, "another S3 driver"},
		{"another driver's prefix", "bucket-1/pvc-1", nil, codes.FailedPrecondition, false, "nothing is deleted"},
		{"backend gone", "gone:bucket-1/pvc-1/", nil, codes.FailedPrecondition, false, `"gone"`},
		{"secret gone", "tenants:bucket-1/pvc-1/", nil, codes.FailedPrecondition, false, "provisioner-deletion-secret-name"},
		{"secret not asked for", "default:bucket-1/pvc-1/", tenantKeys(), codes.InvalidArgument, false, "secrets"},
	}
	for _, tt := range tests {
		c, p := newTestController(t)
		_, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: tt.id, Secrets: tt.secrets})
		if tt.code == codes.OK && err != nil {
			t.Errorf("%s: %v", tt.what, err)
		} else if tt.code != codes.OK {
			refused(t, tt.what, csi.Controller_DeleteVolume_FullMethodName, err, tt.code, tt.says)
		}
		if (p.calls > 0) != tt.called {
			t.Errorf("%s: the provisioner was called %d times", tt.what, p.calls)
		}
	}
	c, p := newTestController(t)
	p.err = fault.Errorf(fault.Busy, "deleted 3000 of about 9000 objects")
	_, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "default:bucket-1/pvc-1/"})
	refused(t, "under way", csi.Controller_DeleteVolume_FullMethodName, err, codes.Aborted, "default:bucket-1/pvc-1/", "3000 of about 9000")
}

func TestValidateVolumeCapabilities(t *testing.T) {
	c, _ := newTestController(t)
	made := createRequest()
	made.Parameters["uid"] = "1000"
	created, err := c.CreateVolume(t.Context(), made)
	if err != nil {
		t.Fatal(err)
	}
	id := created.GetVolume().GetVolumeId()
	good := mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
	block := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}, AccessMode: good.GetAccessMode()}
	one := func(c *csi.VolumeCapability) []*csi.VolumeCapability { return []*csi.VolumeCapability{c} }
	tests := []struct {
		what string
		req  *csi.ValidateVolumeCapabilitiesRequest
		code codes.Code
		says string // part of the error, or of the message of an unconfirmed answer
	}{
		{"confirmed", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: everyMode(), Parameters: made.GetParameters(),
			VolumeContext: created.GetVolume().GetVolumeContext()}, codes.OK, ""},
		{"block", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{good, block}}, codes.OK,
			"volume_capabilities[1].block"},
		{"mutable", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: one(good), MutableParameters: map[string]string{"a": "b"}},
			codes.OK, "mutable_parameters"},
		{"context", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: one(good), VolumeContext: map[string]string{"x": "y"}}, codes.OK,
			"volume_context"},
		{"parameters", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: one(good), Parameters: map[string]string{"x": "y"}}, codes.OK,
			"parameters.x"},
		{"no id", &csi.ValidateVolumeCapabilitiesRequest{VolumeCapabilities: one(good)}, codes.InvalidArgument, "volume_id"},
		{"no capabilities", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id}, codes.InvalidArgument, "volume_capabilities"},
		{"no mode", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: one(&csi.VolumeCapability{AccessType: good.GetAccessType()})},
			codes.InvalidArgument, "volume_capabilities[0].access_mode"},
		{"big context", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: one(good),
			VolumeContext: map[string]string{"x": strings.Repeat("y", 4096)}}, codes.InvalidArgument, "volume_context"},
		{"absent", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "default:bucket-1/other/", VolumeCapabilities: one(good)}, codes.NotFound,
			"default:bucket-1/other/"},
		{"foreign", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "fake-vol-id", VolumeCapabilities: one(good)}, codes.NotFound, "fake-vol-id"},
	}
	for _, tt := range tests {
		resp, err := c.ValidateVolumeCapabilities(t.Context(), tt.req)
		switch {
		case tt.code != codes.OK:
			refused(t, tt.what, csi.Controller_ValidateVolumeCapabilities_FullMethodName, err, tt.code, tt.says)
		case err != nil:
			t.Errorf("%s: %v", tt.what, err)
		case tt.says == "" && len(resp.GetConfirmed().GetVolumeCapabilities()) != len(tt.req.GetVolumeCapabilities()):
			t.Errorf("%s: %v", tt.what, resp)
		case tt.says != "" && (resp.GetConfirmed() != nil || !strings.Contains(resp.GetMessage(), tt.says)):
			t.Errorf("%s: %v", tt.what, resp)
		}
	}
}

// inUse are volumes that the process's own node has published, by id.
type inUse map[string]string

func (u inUse) PublishedAt(_ context.Context, volumeID string) (string, error) {
	if u[volumeID] == "error" {
		return "", errors.New("the state directory cannot be read")
	}
	return u[volumeID], nil
}

func TestDeleteVolume_InUseIsRefused(t *testing.T) {
	const used, other, unknown = "default:bucket-1/pvc-1/", "default:bucket-1/pvc-2/", "default:bucket-1/pvc-3/"
	c, p := newTestController(t)
	c.InUse = inUse{used: "/targets/a", unknown: "error"}
	_, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: used})
	refused(t, "in use", csi.Controller_DeleteVolume_FullMethodName, err, codes.FailedPrecondition, "/targets/a")
	_, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: unknown})
	refused(t, "not known", csi.Controller_DeleteVolume_FullMethodName, err, codes.Aborted)
	if p.calls != 0 {
		t.Errorf("the provisioner was called %d times", p.calls)
	}
	if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: other}); err != nil || p.calls != 1 {
		t.Errorf("an unused volume: %v, %d calls", err, p.calls)
	}
}

// A static volume is read as a publication reads it, and its bucket is looked for.
func TestValidateVolumeCapabilities_StaticVolumes(t *testing.T) {
	keys := map[string]string{"accessKeyID": "AK", "secretAccessKey": "SK"}
	static := map[string]string{"bucketName": "team-data", "prefix": "pre/"}
	tests := []struct {
		what, id  string
		context   map[string]string
		flags     []string
		secrets   map[string]string
		code      codes.Code
		confirmed bool
		asked     bool // the provisioner, with the secret's keys
	}{
		{"attributes", "my-static-volume", static, nil, nil, codes.OK, true, false},
		{"secret of publications", "my-static-volume", static, nil, keys, codes.OK, true, false},
		{"secret of the controller", "my-static-volume", map[string]string{"bucketName": "secrets", "backend": "tenants"}, nil, keys, codes.OK, true, true},
		{"refused to the controller", "my-static-volume", map[string]string{"bucketName": "locked"}, nil, nil, codes.OK, true, false},
		{"unreachable", "my-static-volume", map[string]string{"bucketName": "down"}, nil, nil, codes.Unavailable, false, false},
		{"absent bucket", "my-static-volume", map[string]string{"bucketName": "absent"}, nil, nil, codes.NotFound, false, false},
		{"no such backend", "my-static-volume", map[string]string{"bucketName": "team-data", "backend": "else"}, nil, nil, codes.FailedPrecondition, false, false},
		{"bad attribute", "my-static-volume", map[string]string{"bucketName": "team-data", "clint": "rclone"}, nil, nil, codes.OK, false, false},
		{"bad name", "my-static-volume", map[string]string{"bucketName": "Team_Data"}, nil, nil, codes.NotFound, false, false},
		{"unknown client", "my-static-volume", map[string]string{"bucketName": "team-data", "client": "none"}, nil, nil, codes.OK, false, false},
		{"half a secret", "my-static-volume", static, nil, map[string]string{"accessKeyID": "AK"}, codes.InvalidArgument, false, false},
		{"handle of k8s-csi-s3", "team-data/pre", nil, nil, nil, codes.OK, true, false},
		{"flags of the AWS driver", "my-static-volume", map[string]string{"bucketName": "team-data"}, []string{"prefix some/"}, nil, codes.OK, true, false},
		{"id with data and no record", "default:team-data/pre/", nil, nil, nil, codes.OK, true, false},
		{"id without data", "default:team-data/other/", nil, nil, nil, codes.NotFound, false, false},
		{"id of a bucket", "default:team-data", nil, nil, nil, codes.OK, true, false},
		{"id that the controller may not see", "default:locked", nil, nil, nil, codes.PermissionDenied, false, false},
	}
	for _, tt := range tests {
		c, p := newTestController(t)
		p.places = map[string]error{
			"default:team-data": nil, "default:team-data/pre/": nil, "tenants:secrets": nil,
			"default:locked": fault.Errorf(fault.Denied, "403"), "default:down": fault.Errorf(fault.Unavailable, "503"),
		}
		capability := mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
		capability.GetMount().MountFlags = tt.flags
		resp, err := c.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: tt.id, VolumeContext: tt.context, Secrets: tt.secrets, VolumeCapabilities: []*csi.VolumeCapability{capability},
		})
		switch {
		case tt.code != codes.OK:
			refused(t, tt.what, csi.Controller_ValidateVolumeCapabilities_FullMethodName, err, tt.code)
		case err != nil || (resp.GetConfirmed() != nil) != tt.confirmed || tt.confirmed == (resp.GetMessage() != ""):
			t.Errorf("%s: %v, %v", tt.what, resp, err)
		}
		if (p.secret != provision.Secret{}) != tt.asked {
			t.Errorf("%s: looked up with %+v", tt.what, p.secret)
		}
	}
}

func TestController_Capabilities(t *testing.T) {
	c, p := newTestController(t)
	resp, err := c.ControllerGetCapabilities(t.Context(), nil)
	if err != nil || len(resp.GetCapabilities()) != 10 {
		t.Errorf("%v, %v", resp, err)
	}
	p.secretsOnly = true
	resp, err = c.ControllerGetCapabilities(t.Context(), nil)
	if err != nil || len(resp.GetCapabilities()) != 8 {
		t.Errorf("without credentials for listing: %v, %v", resp, err)
	}
	_, err = c.GetCapacity(t.Context(), nil)
	if got := statusOf(t.Context(), "", "", err); !strings.Contains(got.Error(), "Unimplemented") {
		t.Errorf("GetCapacity: %v", got)
	}
}
