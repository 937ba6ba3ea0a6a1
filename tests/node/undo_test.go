//go:build !lane || ordinary

package node

import (
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
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
