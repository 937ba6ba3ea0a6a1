//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
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
