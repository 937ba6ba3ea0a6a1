// Package runnertest makes runners for the tests of the packages above package runner.
package runnertest

import (
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/spares"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/uids"
)

// New returns a runner with its parts, which has uids for two mounts. hangTimeout is runner.Runner.HangTimeout.
func New(t *testing.T, l runner.Launcher, b creds.Backends, hangTimeout time.Duration) (*runner.Runner, *parts.Parts) {
	t.Helper()
	p := parts.New(t, b)
	u := &uids.Allocator{Namespace: p.Namespace, Launcher: l, Store: p.Store, Range: launcher.UIDRange{First: parts.UID, Last: parts.UID + 1}}
	return &runner.Runner{
		Namespace: p.Namespace, Launcher: l, Backend: b.Backend, Clients: p.Clients, Store: p.Store, Sources: p.Sources, Creds: p.Creds, Tracker: p.Tracker,
		Programs: mounttest.Programs("/opt"), Peer: p.Peer, UIDs: u,
		Spares:       spares.New(spares.Options{Namespace: p.Namespace, Launcher: l, UIDs: u, Store: p.Store, Tracker: p.Tracker}),
		MountTimeout: time.Minute, HangTimeout: hangTimeout, Started: func(string) {},
	}, p
}
