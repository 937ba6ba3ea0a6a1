//go:build !lane || ordinary

package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A PersistentVolume of the AWS Mountpoint driver is published as it is by a driver of that name, and means what it meant.
func TestAVolumeOfTheAWSDriver(t *testing.T) {
	rigtest.ProcessOnly(t, "handles and attributes are read in the same way with each launcher")
	t.Parallel()
	e := start(t, "--driver-name=s3.csi.aws.com") // and with another default client
	e.Put(t, bucket, "some-s3-prefix/data", "hello")
	v := &csi.Volume{VolumeId: "s3-csi-driver-volume", VolumeContext: map[string]string{
		"bucketName": bucket, "authenticationSource": "driver", "stsRegion": "us-east-1", "mountpointContainerResourcesRequestsCpu": "500m",
	}}
	options := []string{"region " + e.Region(), "prefix some-s3-prefix/", "endpoint-url " + e.proxy.Endpoint() + "/", "--force-path-style", "uid=1000",
		"--gid 2000", "allow-other", "-d"}
	target := e.publish(v, "t", flags(options...))
	if err := e.tryPublish(time.Minute, v, target, flags(options...)); err != nil {
		t.Errorf("kubelet republishes: %v", err)
	}
	if got, err := os.ReadFile(filepath.Join(target, "data")); err != nil || string(got) != "hello" {
		t.Errorf("the file holds %q, %v", got, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(target, "data"), &st); err != nil || st.Uid != 1000 || st.Gid != 2000 {
		t.Errorf("the file is %d:%d's, %v", st.Uid, st.Gid, err)
	}
	write(t, filepath.Join(target, "new"), "x")
	for what, err := range map[string]error{
		"removed":  os.Remove(filepath.Join(target, "data")),
		"replaced": os.WriteFile(filepath.Join(target, "data"), []byte("y"), 0o644),
	} {
		if !errors.Is(err, unix.EPERM) {
			t.Errorf("without allow-delete and allow-overwrite a file is %s: %v", what, err)
		}
	}
	if !strings.Contains(e.Logs(), "volume_context.stsRegion: stsRegion: ") {
		t.Error("the log says nothing of what is ignored")
	}
	e.unpublish(v, target)

	target = e.publish(v, "t", flags(append(options, "allow-delete")...))
	if err := os.Remove(filepath.Join(target, "data")); err != nil {
		t.Error(err)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
	if keys := e.Keys(t, bucket, ""); len(keys) != 1 || keys[0] != "some-s3-prefix/new" {
		t.Errorf("the bucket holds %q", keys)
	}

	elsewhere := flags("prefix some-s3-prefix/", "endpoint-url https://s3.example")
	want(t, e.tryPublish(time.Minute, v, e.Target("t"), elsewhere), codes.FailedPrecondition, "mount_flags[1]",
		"declare a backend with endpoint: https://s3.example")
}

// A PersistentVolume that k8s-csi-s3 made is published as it is, with the very secret, as long as that one's keys are meant for
// where they go.
func TestAVolumeOfK8sCSIS3(t *testing.T) {
	rigtest.ProcessOnly(t, "handles and attributes are read in the same way with each launcher")
	t.Parallel()
	e := start(t, "--driver-name=ru.yandex.s3.csi")
	const pvc = "pvc-035763df-0488-4941-9a34-f637292eb95c"
	e.Put(t, bucket, pvc+"/", "")
	e.Put(t, bucket, pvc+"/data", "hello")
	keys := e.user("tenant")
	keys["endpoint"], keys["region"] = e.proxy.Endpoint(), e.Region()
	v := &csi.Volume{VolumeId: bucket + "/" + pvc, VolumeContext: map[string]string{
		"mounter": "rclone", "options": "--dir-cache-time 1s --vfs-cache-mode writes --buffer-size 16M", "bucket": bucket, "capacity": "5368709120",
	}}
	target := e.publish(v, "t", secrets(keys))
	if got, err := os.ReadFile(filepath.Join(target, "data")); err != nil || string(got) != "hello" {
		t.Errorf("the file holds %q, %v", got, err)
	}
	write(t, filepath.Join(target, "new"), "x")
	e.unpublish(v, target)
	e.NothingLeft(t)
	if got := e.Object(t, bucket, pvc+"/new"); got != "x" {
		t.Errorf("the object is %q", got)
	}

	keys["endpoint"] = "https://storage.yandexcloud.net"
	want(t, e.tryPublish(time.Minute, v, e.Target("t"), secrets(keys)), codes.FailedPrecondition, "secrets.endpoint",
		"declare a backend with endpoint: https://storage.yandexcloud.net")
	v.VolumeContext["mounter"], v.VolumeContext["options"] = "geesefs", "--memory-limit 1000"
	want(t, e.tryPublish(time.Minute, v, e.Target("t"), secrets(keys)), codes.InvalidArgument, "volume_context.mounter", "set client: rclone",
		"memory-limit is not supported")

	// A mount option can replace an attribute that Kubernetes does not allow to change.
	keys["endpoint"] = e.proxy.Endpoint()
	target = e.publish(v, "t", secrets(keys), flags("client=rclone", "dir-mode=0750"))
	if got := read(t, filepath.Join(target, "new")); got != "x" {
		t.Errorf("the file holds %q", got)
	}
	if fi, err := os.Stat(target); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("the volume's root is %v, %v", fi, err)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}
