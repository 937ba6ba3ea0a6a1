package symptoms

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

const (
	answers  = "docs/reference/errors.md#answers-of-s3"
	sessions = "docs/reference/errors.md#publishing-credentials-and-sessions"
	clients  = "docs/reference/errors.md#publishing-clients-and-the-node"
	shown    = "docs/how-to/status.md#the-mounts-of-a-node"
	// wrong is a secret key of nothing.
	wrong = "WrongWrongWrongWrongWrongWrongWrong12345"
)

// A pod does not start: the event has the error of the publication.
func TestAPodDoesNotStart(t *testing.T) {
	t.Parallel()
	e := start(t, "--mount-timeout=8s")
	blind, err := e.AddUser(t.Context(), "blind", "")
	if err != nil {
		t.Fatal(err)
	}
	down := faultproxy.Faults{Refuse: true}
	silent := faultproxy.Faults{Blackhole: true}
	for _, tt := range []struct {
		symptom string
		volume  *csi.Volume
		change  change
		sts     s3server.STS
		s3      faultproxy.Faults
		page    string
	}{
		{"role does not trust the pod", volume("v", "roleARN", s3server.RoleARN("another-team")), e.workload(time.Hour), s3server.STS{}, faultproxy.Faults{},
			sessions},
		{"token service refuses", volume("v"), e.workload(time.Hour), s3server.STS{Fault: s3server.FaultRefuse}, faultproxy.Faults{}, sessions},
		{"token service away", volume("v"), e.workload(time.Hour), s3server.STS{Fault: s3server.FaultDown}, faultproxy.Faults{}, sessions},
		{"token expired", volume("v"), e.workload(-time.Minute), s3server.STS{}, faultproxy.Faults{}, sessions},
		{"no token", volume("v", "credentials", "workload"), nil, s3server.STS{}, faultproxy.Faults{}, sessions},
		{"service ignores session policies", volume("v", "scope", "required"), e.workload(time.Hour), s3server.STS{IgnorePolicies: true}, faultproxy.Faults{},
			sessions},
		{"no session can be made", plain("v", "scope", "required"), nil, s3server.STS{}, faultproxy.Faults{}, sessions},
		{"wrong secret key", plain("v"), secret("accessKeyID", e.owner.AccessKeyID, "secretAccessKey", wrong), s3server.STS{}, faultproxy.Faults{}, answers},
		{"unknown access key", plain("v"), secret("accessKeyID", "AKIAUNKNOWN000000000", "secretAccessKey", wrong), s3server.STS{}, faultproxy.Faults{}, answers},
		{"keys without rights", plain("v"), keys(blind), s3server.STS{}, faultproxy.Faults{}, answers},
		{"no secret", plain("v", "credentials", "secret"), nil, s3server.STS{}, faultproxy.Faults{}, sessions},
		{"half a secret", plain("v"), secret("accessKeyID", e.owner.AccessKeyID), s3server.STS{}, faultproxy.Faults{}, "docs/reference/parameters.md"},
		{"no bucket", plain("v", "bucketName", "no-such-bucket"), nil, s3server.STS{}, faultproxy.Faults{}, answers},
		{"no backend", plain("v", "backend", "elsewhere"), nil, s3server.STS{}, faultproxy.Faults{}, clients},
		{"unknown client", volume("v", "client", "floppy"), nil, s3server.STS{}, faultproxy.Faults{}, "docs/reference/parameters.md"},
		{"unknown parameter", volume("v", "prefiks", "a/"), nil, s3server.STS{}, faultproxy.Faults{}, "docs/reference/parameters.md"},
		{"unknown option", volume("v", "mountOptions", "noatime"), nil, s3server.STS{}, faultproxy.Faults{}, "docs/reference/parameters.md"},
		{"S3 refuses connections", plain("v"), nil, s3server.STS{}, down, answers},
		{"S3 does not answer", plain("v"), nil, s3server.STS{}, silent, answers},
		{"name does not resolve", plain("v", "backend", "nowhere"), nil, s3server.STS{}, faultproxy.Faults{}, answers},
	} {
		if tt.change == nil {
			tt.change = func(*csi.NodePublishVolumeRequest) {}
		}
		e.sts(tt.sts)
		e.proxy.Set(tt.s3)
		err := e.tryPublish(time.Minute, tt.volume, e.Target("t"), tt.change)
		leads(t, tt.symptom, message(t, tt.symptom, err), tt.page)
	}
	e.sts(s3server.STS{})
	e.proxy.Set(faultproxy.Faults{})
	e.NothingLeft(t)
}

// A pod does not start because of its client.
func TestAClientDoesNotStart(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ symptom, script, page string }{
		{"a library is missing", "echo error while loading shared libraries: libfuse.so.2: cannot open shared object file >&2; exit 127", clients},
		{"the client crashes", "case $* in *version*) exit 0;; esac; echo 'cannot serve: the moon is full' >&2; exit 7", clients},
		{"the client does not answer", "case $* in *version*) exit 0;; esac; exec /bin/sleep 1000", clients},
	} {
		t.Run(tt.symptom, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			if err := rig.WriteProgram(filepath.Join(e.Clients, rig.Programs()[client]), []byte("#!/bin/sh\n"+tt.script+"\n")); err != nil {
				t.Fatal(err)
			}
			e.drive("--mount-timeout=8s")
			leads(t, tt.symptom, message(t, tt.symptom, e.tryPublish(time.Minute, plain("v"), e.Target("t"))), tt.page)
			e.NothingLeft(t)
		})
	}
}

// All user ids are in use.
func TestNoUserIDIsFree(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.LastUID = e.FirstUID + 3
	e.drive()
	var err error
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		if err = e.tryPublish(time.Minute, plain(name), e.Target(name)); err != nil {
			break
		}
	}
	leads(t, "no uid", message(t, "no uid", err), clients)
}

// The cache disk is full: before a mount starts, and below one that runs.
func TestTheCacheDiskIsFull(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.tmpfs(e.Cache, "4m")
	e.drive("--mount-timeout=8s")
	target := e.publish(plain("v"), "v")
	if err := os.WriteFile(filepath.Join(target, "file"), make([]byte, 16<<20), 0o644); err == nil {
		t.Error("a write of 16 MiB to a disk of 4 MiB succeeded")
	} else {
		t.Logf("a program sees: %v", err)
	}
	fill(t, e.Cache)
	leads(t, "running mount, full disk", e.awaitStatus("is full"), shown)
	leads(t, "full disk", message(t, "full disk", e.tryPublish(time.Minute, plain("w"), e.Target("w"))), clients)
}
