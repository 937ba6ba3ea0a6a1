//go:build !lane || ordinary

package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// patience is for what takes much less.
const patience = 20 * time.Second

// Names of an allocation and of how it uses a volume, which are in target paths.
const (
	nomadAllocation = "5f0d3c1e-7a40-4b62-9c1d-2f8e6a90b7d3"
	nomadUsage      = "rw-file-system-multi-node-multi-writer"
)

// nomad makes the calls that Nomad 2.0 makes, in its order and with its arguments. Nomad cannot be built into tests: it is no module.
type nomad struct {
	t    *testing.T
	n    *rigtest.Node
	d    *rig.Driver
	root string // stage_publish_base_dir
}

// plugin starts the plugin's task and fingerprints it.
func (o *nomad) plugin() {
	o.t.Helper()
	o.d = o.n.Drive(o.t, "all", "--target-root="+filepath.Dir(filepath.Dir(o.root)))
	ctx := rigtest.Context(o.t, time.Minute)
	info, err := o.d.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() == "" || info.GetVendorVersion() == "" {
		o.t.Fatalf("GetPluginInfo: %v, %v", info, err)
	}
	services, err := o.d.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil || !slices.ContainsFunc(services.GetCapabilities(), func(c *csi.PluginCapability) bool {
		return c.GetService().GetType() == csi.PluginCapability_Service_CONTROLLER_SERVICE
	}) {
		o.t.Fatalf("GetPluginCapabilities: %v, %v", services, err)
	}
	controller, err := o.d.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil || !slices.ContainsFunc(controller.GetCapabilities(), func(c *csi.ControllerServiceCapability) bool {
		return c.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME
	}) {
		o.t.Fatalf("ControllerGetCapabilities: %v, %v", controller, err)
	}
	node, err := o.d.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil || slices.ContainsFunc(node.GetCapabilities(), func(c *csi.NodeServiceCapability) bool {
		return c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME
	}) {
		o.t.Fatalf("NodeGetCapabilities: %v, %v", node, err)
	}
	if id, err := o.d.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err != nil || id.GetNodeId() == "" {
		o.t.Fatalf("NodeGetInfo: %v, %v", id, err)
	}
}

// create is `nomad volume create`.
func (o *nomad) create(name string, parameters map[string]string) *csi.Volume {
	o.t.Helper()
	resp, err := o.d.CreateVolume(rigtest.Context(o.t, time.Minute), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{}, VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()},
		Parameters: parameters, AccessibilityRequirements: &csi.TopologyRequirement{},
	})
	if err != nil {
		o.t.Fatal(err)
	}
	return resp.GetVolume()
}

// register is `nomad volume register`: the plugin must confirm the capabilities.
func (o *nomad) register(v *csi.Volume) (confirmed bool, err error) {
	resp, err := o.d.ValidateVolumeCapabilities(rigtest.Context(o.t, time.Minute), &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: v.GetVolumeId(), VolumeContext: v.GetVolumeContext(), VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()},
	})
	return len(resp.GetConfirmed().GetVolumeCapabilities()) == 1, err
}

// mount publishes a volume for the allocation. Nomad makes the target's parent, not the target.
func (o *nomad) mount(name string, v *csi.Volume) (target string) {
	o.t.Helper()
	dir := filepath.Join(o.root, "per-alloc", nomadAllocation, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		o.t.Fatal(err)
	}
	target = filepath.Join(dir, nomadUsage)
	rigtest.Publish(o.t, o.d, v, target)
	return target
}

// unmount unpublishes a volume, without a deadline. Nomad then takes an error for success if it can remove the target.
func (o *nomad) unmount(ctx context.Context, v *csi.Volume, target string) error {
	_, err := o.d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
	return err
}

func (o *nomad) delete(v *csi.Volume) error {
	_, err := o.d.DeleteVolume(rigtest.Context(o.t, time.Minute), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	return err
}

func TestNomadsCalls(t *testing.T) {
	rigtest.ProcessOnly(t, "Nomad's calls are the same with each launcher")
	t.Parallel()
	rigtest.NeedClient(t, "rclone")
	n := rigtest.New(t)
	o := &nomad{t: t, n: n, root: filepath.Join(n.Dir, "targets", "nomad", "client", "csi", "monolith", "s3")}
	if err := os.MkdirAll(o.root, 0o700); err != nil {
		t.Fatal(err)
	}
	o.plugin()

	v := o.create("data[0]", map[string]string{"bucketName": rigtest.Bucket, "client": "rclone"})
	if again := o.create("data[0]", map[string]string{"bucketName": rigtest.Bucket, "client": "rclone"}); again.GetVolumeId() != v.GetVolumeId() {
		t.Errorf("created again as %s, not %s", again.GetVolumeId(), v.GetVolumeId())
	}
	n.Put(t, rigtest.Bucket, "shared/file", "of others")
	static := rigtest.Static("shared", "rclone")
	for _, tt := range []struct {
		what string
		v    *csi.Volume
		code codes.Code
	}{
		{"a created volume", v, codes.OK},
		{"a static volume", static, codes.OK},
		{"a static volume by its place", &csi.Volume{VolumeId: "default:" + rigtest.Bucket + "/shared/"}, codes.OK},
		{"a static volume of no bucket", &csi.Volume{VolumeId: "x", VolumeContext: map[string]string{"bucketName": "no-such-bucket"}}, codes.NotFound},
	} {
		if confirmed, err := o.register(tt.v); status.Code(err) != tt.code || confirmed != (tt.code == codes.OK) {
			t.Errorf("registering %s: %t, %v", tt.what, confirmed, err)
		}
	}

	target, shared := o.mount("data[0]", v), o.mount("shared", static)
	if b, err := os.ReadFile(filepath.Join(shared, "file")); err != nil || string(b) != "of others" {
		t.Errorf("the static volume: %q, %v", b, err)
	}
	if err := os.WriteFile(filepath.Join(target, "before"), []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	processes := n.Processes()
	if code, err := o.d.Stop(rigtest.Context(t, patience)); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	o.plugin() // a job update
	if now := n.Processes(); !slices.Equal(now, processes) {
		t.Errorf("processes were %v and are %v", processes, now)
	}

	// `nomad volume delete` asks the plugin first and looks at claims afterwards.
	want(t, o.delete(v), codes.FailedPrecondition)
	if b, err := os.ReadFile(filepath.Join(target, "before")); err != nil || string(b) != "before" {
		t.Errorf("after the refused deletion: %q, %v", b, err)
	}

	rigtest.Freeze(t, n.Server.PID())
	resume := func() { _ = unix.Kill(n.Server.PID(), unix.SIGCONT) }
	t.Cleanup(resume)
	if err := os.WriteFile(filepath.Join(target, "late"), []byte("late"), 0o600); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() { answer <- o.unmount(t.Context(), v, target) }()
	rigtest.Await(t, patience, "the mount to be draining", func() bool { return strings.Contains(rigtest.Get(t, o.d, "/metrics"), `state="draining"} 1`) })
	select {
	case err := <-answer:
		t.Errorf("answered before everything was stored: %v", err)
	default:
	}
	want(t, o.delete(v), codes.FailedPrecondition) // the data is not stored yet
	resume()
	if err := <-answer; err != nil {
		t.Error(err)
	}
	prefix := strings.TrimPrefix(v.GetVolumeId(), "default:"+rigtest.Bucket+"/")
	if got := n.Object(t, rigtest.Bucket, prefix+"late"); got != "late" {
		t.Errorf("stored: %q", got)
	}
	for path, v := range map[string]*csi.Volume{target: v, shared: static} {
		err := o.unmount(t.Context(), v, path)
		if _, left := os.Lstat(path); err != nil || !os.IsNotExist(left) {
			t.Errorf("%s: %v, the target: %v", path, err, left)
		}
	}
	n.NothingLeft(t)

	rigtest.Delete(t, o.d, v.GetVolumeId())
	if keys := n.Keys(t, rigtest.Bucket, prefix); len(keys) != 0 {
		t.Errorf("left: %q", keys)
	}
	if got := n.Object(t, rigtest.Bucket, "shared/file"); got != "of others" {
		t.Errorf("the static volume's object: %q", got)
	}
}
