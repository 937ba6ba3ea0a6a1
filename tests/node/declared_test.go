//go:build !lane || ordinary

package node

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// declare installs the program and starts a driver with the declaration.
func (e *env) declare(fuse, command, settings string) {
	e.t.Helper()
	e.drive(e.declared("rclone", debian, e.declaration(fuse, command, settings)))
}

// A client that the operator declares serves like the driver's own: unprivileged, scoped, healed, and drained before its volume is
// unpublished.
func TestADeclaredClientServes(t *testing.T) {
	t.Parallel()
	for _, way := range []struct {
		fuse, command string
		fuseclients.Case
	}{
		{"path", "mount2", fuseclients.Get(t, "rclone mount2", fuseclients.Declared, fuseclients.Path)},
		{"fusermount", "mount", fuseclients.Get(t, "rclone mount", fuseclients.Declared, fuseclients.Fusermount)},
	} {
		t.Run(way.fuse, func(t *testing.T) {
			t.Parallel()
			serveDeclared(t, way.fuse, way.command, way.Case)
		})
	}
}

func serveDeclared(t *testing.T, fuse, command string, c fuseclients.Case) {
	t.Helper()
	e := newEnv(t)
	e.Put(t, bucket, "declared/file", "content")
	e.drive(e.declared("rclone", debian, e.withSessions(e.declaration(fuse, command, ""))))
	v := static("declared", debian, "mountOptions", "dir-cache-time=1s,no-checksum", "sessionDuration", "8s")
	target := e.publish(v, "declared")
	running := e.Running(debian)
	if len(running) != 1 {
		t.Fatalf("%d processes of the client: %v", len(running), e.Processes())
	}
	process, err := proc.ReadStatus(running[0].PID)
	if err != nil {
		t.Fatal(err)
	}
	if uid, _ := strconv.Atoi(strings.Fields(process.Field("Uid"))[0]); uid < e.FirstUID || process.Field("CapEff") != "0000000000000000" ||
		process.Field("NoNewPrivs") != "1" {
		t.Errorf("it runs as uid %d, with the capabilities %s", uid, process.Field("CapEff"))
	}
	use := e.used(v, target, debian, "declared/")
	unpublish := use.Unpublish
	use.Unpublish = func() {
		write(t, filepath.Join(target, "file"), "last")
		unpublish()
	}
	c.Use(t, use)
	stored := []string{"declared/drained", "declared/file", "declared/renewed"}
	if keys := e.Keys(t, bucket, "declared/"); !slices.Equal(keys, stored) || e.Object(t, bucket, "declared/file") != "last" {
		t.Errorf("the volume has %q, want %q", keys, stored)
	}
	e.awaitNothingLeft(eventually)

	for _, options := range []string{"vfs-cache-mode=full", "dir-cache-time=2h", "endpoint=http://127.0.0.1:1", "no-checksum=yes"} {
		err := e.tryPublish(time.Minute, static("refused", debian, "mountOptions", options), e.Target("refused"))
		want(t, err, codes.InvalidArgument, strings.Split(options, "=")[0])
	}
	want(t, e.tryPublish(time.Minute, static("refused", "undeclared"), e.Target("refused")), codes.InvalidArgument, debian)
	e.undone(e.Target("refused"))
}

// used is a published volume at a prefix, whose sessions are short, for the steps of its client.
func (e *env) used(v *csi.Volume, target, program, prefix string) fuseclients.Volume {
	return fuseclients.Volume{Dir: target, Stored: e.Stored(e.t, bucket, prefix), Restart: func() {
		rigtest.Kill(e.t, e.Running(program)...)
		e.awaitRead(eventually, filepath.Join(target, "file"), "content")
	}, Renew: func() bool {
		before, first := e.Running(program), e.mountStatus(v).Session.Expires
		e.awaitStatus(v, "another session after the first one has expired", func(m status.Mount) bool {
			return time.Now().After(first) && m.Session.Expires.After(first)
		})
		return slices.Equal(e.Running(program), before)
	}, Unpublish: func() { e.unpublish(v, target) }}
}

// The driver's own clients do what the table of the documentation has of them.
func TestTheDriversOwnClients(t *testing.T) {
	t.Parallel()
	for _, c := range []fuseclients.Case{
		fuseclients.Get(t, mountpoint, fuseclients.BuiltIn, fuseclients.Path),
		fuseclients.Get(t, rclone, fuseclients.BuiltIn, fuseclients.Path),
	} {
		t.Run(c.Client, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.Put(t, bucket, "own/file", "content")
			e.drive(fuseclients.WriteConfig(t, e.Rig, e.withSessions(fuseclients.Backend(e.Rig.S3))))
			v := static("own", c.Client, "sessionDuration", "8s")
			target := e.publish(v, "own")
			use := e.used(v, target, programs[c.Client], "own/")
			if c.Client == rclone {
				use.Late = eventually // it stores after close
			}
			c.Use(t, use)
			e.awaitNothingLeft(eventually)
		})
	}
}

// The program of a declared client is the one that was declared, or it does not run.
func TestADeclaredClientRunsNoOtherProgram(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.declare("path", "mount2", "    sha256: \""+strings.Repeat("0", 64)+"\"\n")
	want(t, e.tryPublish(time.Minute, static("other", debian), e.Target("other")), codes.FailedPrecondition, debian, "sha256")
	e.undone(e.Target("other"))
}
