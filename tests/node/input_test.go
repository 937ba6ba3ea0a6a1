//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Mount options cannot be made to say more than their names: each of these is refused by name, before anything is done,
// whether it comes with the publication or with the volume.
func TestInjectionIsRefused(t *testing.T) {
	t.Parallel()
	e := start(t)
	bad := [][]string{
		{"-o allow_other"}, {"-o", "allow_other"}, {"-oallow_other"}, {"-o=x"}, {"-f"}, {"--"}, {"-"}, {""},
		{"--endpoint-url=http://127.0.0.1:1"}, {"endpoint-url=http://127.0.0.1:1"}, {"--endpoint=http://127.0.0.1:1"}, {"ENDPOINT=x"},
		{"--region=eu-north-1"}, {"--profile=admin"}, {"--no-sign-request"}, {"--allow-root"}, {"--auto-unmount"},
		{"--log-directory=/etc"}, {"--cache=/etc"}, {"--cache-dir=/etc"}, {"--ca-bundle=/etc/passwd"}, {"--ca-file=/etc/passwd"},
		{"--bucket=other"}, {"--prefix=other/"}, {"--uid=0"}, {"--read-only"}, {"ro"}, {"--fuse-fd=0"}, {"--config=/etc/passwd"},
		{"debug", "debug"}, {"debug", "--debug"}, {"debug --endpoint-url=x"}, {"debug --x"}, {" debug"}, {"debug "}, {"debug\t"},
		{"debug\x00"}, {"debug\n--endpoint-url=x"}, {"debug\r"}, {"debug\u2028x"}, {"debug=yes"}, {"debug=--x"},
		{"storage-class=STANDARD -o x"}, {"--storage-class  STANDARD"}, {"storage-class=standard;rm"}, {"storage-class=$(id)"}, {"storage-class="},
		{"unknown-option"}, {"unknown-option=1"}, {"DEBUG"}, {"de bug"}, {"bind,ro"}, {"nosuid,suid"}, {"suid"}, {"dev"}, {"exec"},
		{strings.Repeat("x", 5000)},
	}
	// Static volumes may have been written for the AWS driver, whose words these are: see TestWordsOfTheAWSDriverReachNoClient. They
	// are refused as all others with a volume of this driver's own.
	understood := []string{"-f", "--region=eu-north-1", "--allow-root", "--auto-unmount", "--log-directory=/etc", "--cache=/etc", "--uid=0", "--read-only",
		" debug", "debug ", "--storage-class  STANDARD"}
	elsewhere := []string{"--endpoint-url=http://127.0.0.1:1", "endpoint-url=http://127.0.0.1:1"}
	for _, client := range clients {
		v := static("v", client)
		own := &csi.Volume{VolumeId: "default:" + bucket + "/v/", VolumeContext: map[string]string{"client": client}}
		for _, f := range bad {
			target := e.Target("t")
			want(t, e.tryPublish(10*time.Second, own, target, flags(f...)), codes.InvalidArgument, "mount")
			switch {
			case slices.Contains(understood, f[0]):
			case slices.Contains(elsewhere, f[0]):
				want(t, e.tryPublish(10*time.Second, v, target, flags(f...)), codes.FailedPrecondition, "mount_flags[0]", "declare a backend")
			default:
				want(t, e.tryPublish(10*time.Second, v, target, flags(f...)), codes.InvalidArgument, "mount")
			}
			// In the volume, options are one list with commas.
			if list := strings.Join(f, ","); list != "" && !strings.ContainsRune(list, '\x00') {
				err := e.tryPublish(10*time.Second, static("v", client, "mountOptions", list), target)
				want(t, err, codes.InvalidArgument, "volume")
			}
			e.undone(target)
		}
		// Once in the volume, once with the publication.
		want(t, e.tryPublish(10*time.Second, static("v", client, "mountOptions", "debug"), e.Target("t"), flags("debug")), codes.InvalidArgument, "debug")
	}
	if got := e.lives(); got != 0 {
		t.Errorf("%d mounts were made", got)
	}
}

// What is understood of the AWS driver's mount options says something about the mount, or nothing; none of it is on a command line
// as it was written.
func TestWordsOfTheAWSDriverReachNoClient(t *testing.T) {
	rigtest.ProcessOnly(t, "requests are checked before anything is started")
	t.Parallel()
	e := start(t)
	for _, client := range clients {
		v := static("v-"+client, client)
		target := e.publish(v, client, flags("-f", "--region="+e.Region(), "--allow-root", "--auto-unmount", "--log-directory=/etc/log", "--cache=/etc/cache",
			"--uid=1000", "--read-only", " debug ",
			"--storage-class  STANDARD", "--debug-crt", "--user-agent-prefix=x", "aws-max-attempts 99", "endpoint-url "+e.proxy.Endpoint()))
		argv := strings.Split(strings.TrimRight(read(t, fmt.Sprintf("/proc/%d/cmdline", e.client(client).PID)), "\x00"), "\x00")
		for _, arg := range argv {
			for _, written := range []string{"-f", "/etc", "allow-root", "auto-unmount", "log-directory", "debug-crt", "agent-prefix=x", "max-attempts"} {
				if arg == written || len(written) > 2 && strings.Contains(arg, written) {
					t.Errorf("client %s was started with %q", client, arg)
				}
			}
		}
		for _, arg := range []string{"--debug", "--storage-class=STANDARD", "--uid=1000"} {
			if !slices.Contains(argv, arg) {
				t.Errorf("client %s was started without %s: %q", client, arg, argv)
			}
		}
		if err := os.WriteFile(filepath.Join(target, "file"), nil, 0o644); !errors.Is(err, unix.EROFS) {
			t.Errorf("a read-only volume is written to: %v", err)
		}
		e.unpublish(v, target)
	}
	e.NothingLeft(t)
}

// What is allowed arrives at the client, from both places.
func TestOptionsReachTheClient(t *testing.T) {
	t.Parallel()
	e := start(t)
	for client, options := range map[string][]string{rclone: {"transfers=3", "debug"}, mountpoint: {"max-threads=3", "debug"}} {
		v := static("v-"+client, client, "mountOptions", options[0])
		target := e.publish(v, client, flags("--"+options[1]))
		argv := strings.Split(read(t, fmt.Sprintf("/proc/%d/cmdline", e.client(client).PID)), "\x00")
		for _, o := range options {
			if !strings.Contains(strings.Join(argv, " ")+" ", " --"+o+" ") {
				t.Errorf("client %s was started without %s: %q", client, o, argv)
			}
		}
		e.unpublish(v, target)
	}
	e.NothingLeft(t)
}

// The error of a malformed volume names the field and what is wrong with it.
func TestMalformedRequestsAreRefused(t *testing.T) {
	rigtest.ProcessOnly(t, "requests are checked before anything is started")
	t.Parallel()
	e := start(t)
	good := static("v", rclone)
	context := func(pairs ...string) *csi.Volume { return static("v", rclone, pairs...) }
	tests := []struct {
		name   string
		volume *csi.Volume
		field  string
		change change
	}{
		{"no volume id", &csi.Volume{VolumeContext: good.GetVolumeContext()}, "volume_id", nil},
		{"an over-long volume id", &csi.Volume{VolumeId: strings.Repeat("x", 129), VolumeContext: good.GetVolumeContext()}, "volume_id", nil},
		{"a control character in the id", &csi.Volume{VolumeId: "a\nb", VolumeContext: good.GetVolumeContext()}, "volume_id", nil},
		{"a handle that says nothing and no bucket", &csi.Volume{VolumeId: "v"}, "bucketName", nil},
		{"an id that contradicts the context", &csi.Volume{VolumeId: "default:volumes/x/", VolumeContext: map[string]string{"bucketName": "other"}}, "bucketName",
			nil},
		{"a bad bucket", context("bucketName", "../x"), "bucketName", nil},
		{"a prefix that climbs", context("prefix", "a/../b/"), "prefix", nil},
		{"an absolute prefix", context("prefix", "/a/"), "prefix", nil},
		{"a prefix with a newline", context("prefix", "a\nb/"), "prefix", nil},
		{"an unknown key", context("bucketname", "x"), "bucketname", nil},
		{"a bad uid", context("uid", "root"), "uid", nil},
		{"a bad mode", context("dirMode", "0999"), "dirMode", nil},
		{"a mode with more than permissions", context("fileMode", "4755"), "fileMode", nil},
		{"a bad boolean", context("readOnly", "yes"), "readOnly", nil},
		{"a bad account", context("expectedBucketOwner", "me"), "expectedBucketOwner", nil},
		{"no capability", good, "volume_capability", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil }},
		{"no access type", good, "volume_capability", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessType = nil }},
		{"an oversize context", context("x", strings.Repeat("x", 5000)), "volume_context", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := rigtest.PublishRequest(tt.volume, e.Target("t"))
			if tt.change != nil {
				tt.change(req)
			}
			_, err := e.NodePublishVolume(rigtest.Context(t, 10*time.Second), req)
			want(t, err, codes.InvalidArgument, tt.field)
			e.undone(e.Target("t"))
		})
	}
	if got := e.lives(); got != 0 {
		t.Errorf("%d mounts were made", got)
	}
	for _, req := range []*csi.NodeUnpublishVolumeRequest{{TargetPath: e.Target("t")}, {VolumeId: "v"}, {VolumeId: "v", TargetPath: "relative"}} {
		_, err := e.NodeUnpublishVolume(rigtest.Context(t, 10*time.Second), req)
		want(t, err, codes.InvalidArgument)
	}
}

// Volumes that no controller made are found by their context, whatever their handle is.
func TestStaticVolumes(t *testing.T) {
	rigtest.ProcessOnly(t, "requests are checked before anything is started")
	t.Parallel()
	e := start(t)
	e.Put(t, bucket, "top", "1")
	e.Put(t, bucket, "deep/down/file", "2")
	tests := []struct {
		handle  string
		context map[string]string
		file    string
	}{
		{"any handle at all", map[string]string{"bucketName": bucket}, "top"},
		{"any handle at all", map[string]string{"bucketName": bucket}, "deep/down/file"},
		{"with-prefix", map[string]string{"bucketName": bucket, "prefix": "deep/"}, "down/file"},
		{"without-slash", map[string]string{"bucketName": bucket, "prefix": "deep/down"}, "file"},
		{"with-backend", map[string]string{"bucketName": bucket, "prefix": "deep/down/", "backend": "default"}, "file"},
		{"default:" + bucket + "/deep/", nil, "down/file"},
		{"default:" + bucket, map[string]string{"csi.storage.k8s.io/pod.name": "p", "storage.kubernetes.io/csiProvisionerIdentity": "i"}, "top"},
	}
	for _, client := range clients {
		for i, tt := range tests {
			v := &csi.Volume{VolumeId: tt.handle, VolumeContext: map[string]string{"client": client}}
			maps.Copy(v.VolumeContext, tt.context)
			target := e.publish(v, fmt.Sprint(i))
			if got := read(t, target+"/"+tt.file); got != map[bool]string{true: "1", false: "2"}[tt.file == "top"] {
				t.Errorf("%s %v: %s is %q", tt.handle, tt.context, tt.file, got)
			}
			e.unpublish(v, target)
		}
	}
	e.NothingLeft(t)
}

func TestNodeGetInfo(t *testing.T) {
	t.Parallel()
	e := start(t, "--volume-attach-limit=17")
	info, err := e.NodeGetInfo(rigtest.Context(t, 10*time.Second), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != "node-1" || info.GetMaxVolumesPerNode() != 17 {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	caps, err := e.NodeGetCapabilities(rigtest.Context(t, 10*time.Second), &csi.NodeGetCapabilitiesRequest{})
	if err != nil || len(caps.GetCapabilities()) != 3 {
		t.Errorf("NodeGetCapabilities: %v, %v", caps, err)
	}
}
