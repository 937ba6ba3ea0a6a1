//go:build !lane || ordinary

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// program replaces a client's program.
func (e *env) program(client, script string) {
	e.t.Helper()
	path := e.ClientProgram(e.t, programs[client])
	e.await(20*time.Second, "the driver to run every client once", func() bool {
		return strings.Count(e.Logs(), `"Client runs on this node"`) == len(clients)
	})
	if err := os.Remove(path); err != nil {
		e.t.Fatal(err)
	}
	if script == "" {
		return
	}
	if err := rig.WriteProgram(path, []byte("#!/bin/sh\n"+script)); err != nil {
		e.t.Fatal(err)
	}
}

// A publication that fails says why, in the client's own words where it is the client, and leaves nothing.
func TestFailedPublicationsSayWhyAndLeaveNothing(t *testing.T) {
	t.Parallel()
	t.Run("the client says why it ends", func(t *testing.T) {
		e := start(t)
		e.program(rclone, "echo starting; echo 'cannot serve: the moon is full' >&2; exit 7\n")
		target := e.Target("t")
		err := e.tryPublish(30*time.Second, static("v", rclone), target)
		want(t, err, codes.Unavailable, "cannot serve: the moon is full", "exit status 7", target)
		e.undone(target)
	})
	t.Run("the client is killed at its start", func(t *testing.T) {
		e := start(t)
		e.program(rclone, "echo last words; kill -9 $$\n")
		target := e.Target("t")
		want(t, e.tryPublish(30*time.Second, static("v", rclone), target), codes.Unavailable, "last words", "SIGKILL")
		e.undone(target)
	})
	t.Run("the client ends in order, but too early", func(t *testing.T) {
		e := start(t)
		e.program(rclone, "exit 0\n")
		target := e.Target("t")
		want(t, e.tryPublish(30*time.Second, static("v", rclone), target), codes.Unavailable, "exited before the mount was ready")
		e.undone(target)
	})
	t.Run("the program is missing", func(t *testing.T) {
		e := start(t)
		e.program(rclone, "")
		target := e.Target("t")
		want(t, e.tryPublish(30*time.Second, static("v", rclone), target), codes.FailedPrecondition, e.ClientProgram(t, programs[rclone]))
		e.undone(target)
	})
	t.Run("the host lacks a library of the client", func(t *testing.T) {
		e := newEnv(t)
		const text = "#!/bin/sh\necho mount-s3: error while loading shared libraries: libfuse.so.2: cannot open shared object file >&2; exit 127\n"
		if err := rig.WriteProgram(filepath.Join(e.Clients, programs[mountpoint]), []byte(text)); err != nil {
			t.Fatal(err)
		}
		e.drive()
		e.logged("Client cannot run on this node", mountpoint, "libfuse.so.2")
		target := e.Target("t")
		want(t, e.tryPublish(30*time.Second, static("v", mountpoint), target), codes.FailedPrecondition, mountpoint, "libfuse.so.2")
		e.undone(target)
	})
	t.Run("the client never answers", func(t *testing.T) {
		e := newEnv(t)
		e.drive("--mount-timeout=8s") // in which others can be mounted, on a busy machine too
		e.program(rclone, "echo dreaming; exec /bin/sleep 1000\n")
		target := e.Target("t")
		began := pressure.Now()
		want(t, e.tryPublish(30*time.Second, static("v", rclone), target), codes.DeadlineExceeded, "dreaming", "8s")
		if took := began.Since(); took > 20*time.Second {
			t.Errorf("it took %s", took)
		}
		e.undone(target)
		// The driver has not lost its ability to mount.
		e.unpublish(static("w", mountpoint), e.publish(static("w", mountpoint), "w"))
		e.NothingLeft(t)
	})
}

// Wrong keys and missing buckets are found out before a client starts.
func TestVolumesThatCannotBeReached(t *testing.T) {
	rigtest.ProcessOnly(t, "the service refuses the same with each launcher")
	t.Parallel()
	e := start(t)
	good := e.user("somebody")
	blind, err := e.AddUser(t.Context(), "nobody", "")
	if err != nil {
		t.Fatal(err)
	}
	other := func(key, value string) map[string]string {
		m := map[string]string{"accessKeyID": good["accessKeyID"], "secretAccessKey": good["secretAccessKey"]}
		m[key] = value
		return m
	}
	const canary = "CanaryCanaryCanaryCanaryCanaryCanary1234"
	e.secrets = append(e.secrets, canary, blind.SecretAccessKey)
	tests := []struct {
		name    string
		volume  *csi.Volume
		secrets map[string]string
		code    codes.Code
		words   []string
	}{
		{"a wrong secret key", nil, other("secretAccessKey", canary), codes.Unauthenticated, []string{"SignatureDoesNotMatch"}},
		{"an unknown access key", nil, other("accessKeyID", "AKIAUNKNOWN000000000"), codes.Unauthenticated, nil},
		{"a user without rights", nil, map[string]string{"accessKeyID": blind.AccessKeyID, "secretAccessKey": blind.SecretAccessKey}, codes.PermissionDenied,
			[]string{bucket}},
		{"no bucket", static("v", "", "bucketName", "no-such-bucket"), nil, codes.NotFound, []string{"no-such-bucket"}},
		{"no backend", static("v", "", "backend", "elsewhere"), nil, codes.FailedPrecondition, []string{"elsewhere"}},
		{"no secret", static("v", "", "credentials", "secret"), nil, codes.FailedPrecondition, []string{"nodePublishSecretRef"}},
		{"half a secret", nil, map[string]string{"accessKeyID": "AKIAUNKNOWN000000000"}, codes.InvalidArgument, []string{"secretAccessKey"}},
		{"no client of that name", static("v", "", "client", "floppy"), nil, codes.InvalidArgument, []string{"floppy", "mountpoint-s3"}},
	}
	for _, client := range clients {
		for _, tt := range tests {
			t.Run(client+"/"+tt.name, func(t *testing.T) {
				v := static("v", client)
				if tt.volume != nil {
					v = tt.volume
					if v.GetVolumeContext()["client"] == "" {
						v.VolumeContext["client"] = client
					}
				}
				target := e.Target("t")
				err := e.tryPublish(30*time.Second, v, target, secrets(tt.secrets))
				want(t, err, tt.code, tt.words...)
				e.noSecretIn("the error", []byte(err.Error()))
				e.undone(target)
				if tt.volume != nil {
					delete(tt.volume.VolumeContext, "client")
					if tt.name == "no client of that name" {
						tt.volume.VolumeContext["client"] = "floppy"
					}
				}
			})
		}
	}
}

// Publish returns when a directory read through the mount has answered, however long that takes, and not before.
func TestPublishReturnsWhenTheVolumeCanBeRead(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "ready/there", "x")
		v := static("ready", client)
		const latency = 700 * time.Millisecond
		e.proxy.Set(faultproxy.Faults{Latency: latency})
		requests := e.proxy.Requests()
		began := time.Now()
		target := e.publish(v, "a")
		took := time.Since(began)
		// The driver's own check and the client's first listing come one after the other.
		if took < 2*latency {
			t.Errorf("published after %s and %d requests that take %s each: nothing has been read", took, e.proxy.Requests()-requests, latency)
		}
		e.proxy.Set(faultproxy.Faults{})
		entries, err := os.ReadDir(target)
		if err != nil || len(entries) != 1 || entries[0].Name() != "there" {
			t.Errorf("the root: %v, %v", entries, err)
		}
		e.unpublish(v, target)
		e.NothingLeft(t)
	})
}
