// Package parts assembles the dependencies of package runner and of those above it for tests: a real store in a temporary directory,
// and the fakes of package mounttest.
package parts

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/sockets"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

// UID is the uid of all mounts that Mount makes.
const UID = 5000

// Parts are the parts.
type Parts struct {
	t         *testing.T
	Namespace *host.Namespace
	Clients   client.Registry
	Backends  creds.Backends
	Tokens    *mounttest.Tokens
	Store     *state.Store
	Tracker   *tracker.Tracker
	Pins      *pins.Pins
	Fusectl   *host.Fusectl
	Sources   *source.Sources
	Creds     *creds.Provider
	Peer      func(name string) *helper.Peer
}

// New makes the parts. It skips the test without root, which the store needs.
func New(t *testing.T, b creds.Backends) *Parts {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the directories of mounts belong to users of their own")
	}
	dir, err := os.MkdirTemp("", "m") //nolint:usetesting // paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	p := &Parts{
		t: t, Namespace: host.Own(), Clients: client.Registry{Source: client.Set{}, Default: "mountpoint-s3"}, Backends: b, Tokens: &mounttest.Tokens{},
	}
	p.Tracker = tracker.New(p.Namespace.Overdue)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	paths := state.Paths{Dir: filepath.Join(dir, "state"), Cache: filepath.Join(dir, "cache")}
	if p.Store, err = state.Open(t.Context(), p.Namespace, paths, UID); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Store.Close()
		mounts, err := p.Namespace.Mounts(context.WithoutCancel(t.Context()))
		for _, m := range slices.Backward(mounts) {
			if strings.HasPrefix(m.Mountpoint, dir+"/") {
				_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
			}
		}
		if rerr := os.RemoveAll(dir); err != nil || rerr != nil {
			t.Error(err, rerr)
		}
	})
	p.Fusectl = host.NewFusectl(p.Namespace, p.Store.FusectlDir())
	p.Pins = pins.New(p.Namespace, p.Store.SourcesDir())
	p.Sources = source.New(p.Namespace, p.Fusectl, p.Store, p.Pins)
	p.Peer = sockets.Peers(p.Namespace, p.Store.Paths)
	p.Creds = creds.New(b, p.Tokens, p.Clients, p.Peer)
	return p
}

// Key is a mount's key of the letter and of letters of this process's own: tests of other packages that run meanwhile have mounts in the
// same mount table.
func Key(letter string) string {
	own := strings.NewReplacer("0", "k", "1", "l", "8", "m", "9", "n").Replace(strconv.Itoa(os.Getpid()))
	return strings.Repeat(letter, 24-len(own)) + own
}

// Mount makes the directories and the record of a running mount, without processes. Its key is that of the letter. change may be nil.
func (p *Parts) Mount(letter, generation, client string, change func(*state.Mount)) state.Mount {
	p.t.Helper()
	name := Key(letter) + "-" + generation
	m := state.Mount{
		Name: name, Key: mount.KeyOf(name), Phase: state.Running, VolumeID: "v", Source: mount.SourceName("v", name), Client: client, UID: UID,
		Spec: mount.Spec{Backend: "default", Bucket: "b", Source: credentials.SourceDriver}, Backend: p.digest(),
	}
	m.Command.Argv = []string{"/bin/true"}
	if change != nil {
		change(&m)
	}
	if err := p.Store.Make(p.t.Context(), m); err != nil {
		p.t.Fatal(err)
	}
	return m
}

// Secret is Mount for a mount of a secret with the identity "old", and shows it at a target.
func (p *Parts) Secret(letter, client string) (state.Mount, state.Publication) {
	p.t.Helper()
	m := p.Mount(letter, "1", client, func(m *state.Mount) {
		m.Spec = mount.Spec{Backend: "default", Bucket: "bucket", Client: client, Source: credentials.SourceSecret, Identity: "old"}
	})
	return m, p.Show(m)
}

// Backend is the backend named "default".
func (p *Parts) Backend() backend.Backend {
	p.t.Helper()
	be, err := p.Backends.Backend("default")
	if err != nil {
		p.t.Fatal(err)
	}
	return be
}

func (p *Parts) digest() string {
	be, err := p.Backends.Backend("default")
	if err != nil {
		return ""
	}
	return be.MountDigest()
}

// Show mounts something with a mount's source at a target and records the publication.
func (p *Parts) Show(m state.Mount) state.Publication {
	p.t.Helper()
	pub := state.Publication{Target: p.t.TempDir(), VolumeID: m.VolumeID, Mount: m.Name}
	p.MountAt(m, pub.Target)
	p.Publish(pub)
	return pub
}

// Publish records a publication.
func (p *Parts) Publish(pub state.Publication) {
	p.t.Helper()
	if err := p.Store.Pubs.Write(p.t.Context(), pub); err != nil {
		p.t.Fatal(err)
	}
}

// MountAt mounts a file system that is a mount's by its source.
func (p *Parts) MountAt(m state.Mount, path string) {
	p.t.Helper()
	if err := unix.Mount(m.Source, path, "tmpfs", 0, ""); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
}

// HangAt mounts a FUSE file system whose client never answers.
func (p *Parts) HangAt(m state.Mount, path string) {
	p.t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		p.t.Skip("needs /dev/fuse")
	}
	fuse, err := host.NewFuseMount(path, host.FuseMount{Source: m.Source, UID: m.UID, GID: m.UID})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		fuse.Close()
		_ = unix.Unmount(path, unix.MNT_DETACH)
	})
}

// Record returns a mount's record.
func (p *Parts) Record(name string) state.Mount {
	p.t.Helper()
	m, ok, err := p.Store.Mount(p.t.Context(), name)
	if err != nil || !ok {
		p.t.Fatalf("record of %s: %t, %v", name, ok, err)
	}
	return m
}
