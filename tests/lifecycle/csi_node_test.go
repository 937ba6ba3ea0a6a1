package lifecycle_test

// What the CSI specification asks of the Node service and csi-sanity does not check.

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

func TestUnpublishingWhatIsNotPublishedSucceedsAndTouchesNothing(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	target := n.Target("a")
	rigtest.Publish(t, d, v, target)
	ctx := rigtest.Context(t, time.Minute)
	unpublish := func(id, path string) error {
		_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: path})
		return err
	}
	for _, id := range []string{"default:" + rigtest.Bucket + "/never-made/", "pvc-of-another-driver", "nowhere:" + rigtest.Bucket, v.GetVolumeId()} {
		if err := unpublish(id, n.Target("never")); err != nil {
			t.Errorf("volume %s where nothing is: %v", id, err)
		}
		if err := unpublish(id, filepath.Join(n.Dir, "no", "such", "parent")); err != nil {
			t.Errorf("volume %s where not even a parent is: %v", id, err)
		}
	}
	empty := n.Target("empty")
	if err := os.Mkdir(empty, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unpublish("default:"+rigtest.Bucket+"/never-made/", empty); err != nil || exists(empty) {
		t.Errorf("an empty target: %v, still there: %t", err, exists(empty))
	}
	full := n.Target("full")
	if err := errors.Join(os.Mkdir(full, 0o750), os.WriteFile(filepath.Join(full, "file"), []byte("precious"), 0o600)); err != nil {
		t.Fatal(err)
	}
	_ = unpublish("default:"+rigtest.Bucket+"/never-made/", full) // whatever it says
	if !exists(filepath.Join(full, "file")) {
		t.Error("files that lie at a target were deleted")
	}
	foreign := n.Target("foreign")
	if err := os.Mkdir(foreign, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", foreign, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(foreign, "file"), []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	hasCode(t, unpublish("default:"+rigtest.Bucket+"/never-made/", foreign), codes.FailedPrecondition, foreign)
	if !exists(filepath.Join(foreign, "file")) {
		t.Error("a mount of somebody else's was unmounted")
	}
	if err := unix.Unmount(foreign, 0); err != nil {
		t.Error(err)
	}
	// Another volume's target.
	if err := unpublish("default:"+rigtest.Bucket+"/never-made/", target); err == nil {
		t.Error("another volume's target can be unpublished")
	}
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600); err != nil {
		t.Errorf("the published volume: %v", err)
	}
	for range 3 {
		rigtest.Unpublish(t, d, v, target)
	}
	n.NothingLeft(t)
}

func TestPublishingAgainIsCompatibleOrSaysThatItIsNot(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v, other := rigtest.Create(t, d, "vol"), rigtest.Create(t, d, "other")
	target := n.Target("a")
	rigtest.Publish(t, d, v, target)
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	processes := strings.Join(n.Processes(), ";")
	for name, c := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		want   codes.Code
	}{
		"the same":           {func(*csi.NodePublishVolumeRequest) {}, codes.OK},
		"a slash at the end": {func(r *csi.NodePublishVolumeRequest) { r.TargetPath += "/" }, codes.OK},
		"pod information":    {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext["csi.storage.k8s.io/pod.name"] = "pod" }, codes.OK},
		"another fs_type":    {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().FsType = "ext4" }, codes.OK},
		"another access mode": {func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		}, codes.OK},
		"read-only":      {func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }, codes.AlreadyExists},
		"a mount flag":   {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = rig.Writer("transfers=2") }, codes.AlreadyExists},
		"a mount group":  {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "4000" }, codes.AlreadyExists},
		"another volume": {func(r *csi.NodePublishVolumeRequest) { r.VolumeId = other.GetVolumeId() }, codes.AlreadyExists},
	} {
		req := rigtest.PublishRequest(v, target)
		req.VolumeContext = maps.Clone(req.GetVolumeContext())
		if req.VolumeContext == nil {
			req.VolumeContext = map[string]string{}
		}
		c.change(req)
		_, err := d.NodePublishVolume(rigtest.Context(t, patience), req)
		if status.Code(err) != c.want {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
		if !exists(filepath.Join(target, "file")) {
			t.Fatalf("%s: the volume is gone from the target", name)
		}
	}
	if now := strings.Join(n.Processes(), ";"); now != processes {
		t.Errorf("processes were %s and are %s", processes, now)
	}
	rigtest.Unpublish(t, d, v, target)
	n.NothingLeft(t)
}

func TestMalformedPublicationsAreRefusedWithTheFieldAndWithoutSideEffect(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	if err := os.Symlink(n.Dir, filepath.Join(n.Dir, "targets", "link")); err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", 4097)
	for name, c := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		says   string
	}{
		"relative target":        {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "targets/a" }, "target_path"},
		"target that climbs":     {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = n.Dir + "/targets/../../x" }, "target_path"},
		"target is the root":     {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "//" }, "target_path"},
		"target with a zero":     {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = n.Dir + "/targets/a\x00b" }, "target_path"},
		"target is too long":     {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/" + strings.Repeat("x/", 2100) }, "target_path"},
		"volume id is too long":  {func(r *csi.NodePublishVolumeRequest) { r.VolumeId = strings.Repeat("x", 129) }, "volume_id"},
		"context is too large":   {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext = map[string]string{"x": big} }, "volume_context"},
		"unknown in the context": {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext = map[string]string{"clint": "rclone"} }, "client"},
		"another bucket":         {func(r *csi.NodePublishVolumeRequest) { r.VolumeContext = map[string]string{"bucketName": "another"} }, "bucketName"},
		"block":                  {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{} }, "block"},
		"no capability":          {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil }, "volume_capability"},
		"unknown access mode":    {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode.Mode = 99 }, "access_mode"},
		"mount group by name":    {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "users" }, "volume_mount_group"},
		"flag with a newline":    {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = rig.Writer("debug\nx") }, "mount_flags[0]"},
		"flag for elsewhere":     {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = rig.Writer("endpoint=http://127.0.0.1:1") }, "endpoint"},
		"flag twice":             {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = rig.Writer("debug", "debug") }, "mount_flags[1]"},
		"half a secret":          {func(r *csi.NodePublishVolumeRequest) { r.Secrets = map[string]string{"accessKeyID": "x"} }, "secretAccessKey"},
		"secrets are too large":  {func(r *csi.NodePublishVolumeRequest) { r.Secrets = map[string]string{"accessKeyID": big} }, "secrets"},
	} {
		req := rigtest.PublishRequest(v, n.Target("a"))
		c.change(req)
		_, err := d.NodePublishVolume(rigtest.Context(t, patience), req)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want InvalidArgument that says %q", name, err, c.says)
		}
	}
	if exists(n.Target("a")) {
		t.Error("a target was made")
	}
	n.NothingLeft(t)
}

func TestStatisticsAreOfPublishedVolumesOnly(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	v := rigtest.Create(t, d, "vol")
	target := n.Target("a")
	stats := func(id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
		return d.NodeGetVolumeStats(rigtest.Context(t, patience), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	}
	rigtest.Publish(t, d, v, target)
	got, err := stats(v.GetVolumeId(), target)
	if err != nil {
		t.Fatal(err)
	}
	units := map[csi.VolumeUsage_Unit]bool{}
	for _, u := range got.GetUsage() {
		units[u.GetUnit()] = true
		if u.GetTotal() < 0 || u.GetUsed() < 0 || u.GetAvailable() < 0 || u.GetUnit() == csi.VolumeUsage_BYTES && u.GetAvailable() == 0 {
			t.Errorf("usage: %v", u)
		}
	}
	if !units[csi.VolumeUsage_BYTES] || !units[csi.VolumeUsage_INODES] {
		t.Errorf("usage: %v", got)
	}
	_, err = stats(v.GetVolumeId(), filepath.Dir(target))
	hasCode(t, err, codes.NotFound)
	_, err = stats("default:"+rigtest.Bucket+"/other/", target)
	hasCode(t, err, codes.NotFound)
	_, err = stats(v.GetVolumeId(), "some/path")
	hasCode(t, err, codes.NotFound)
	rigtest.Unpublish(t, d, v, target)
	_, err = stats(v.GetVolumeId(), target)
	hasCode(t, err, codes.NotFound)
	n.NothingLeft(t)
}
