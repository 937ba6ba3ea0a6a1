package supervisor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/overlap"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// A publication waits without holding a lock, and stops the draining mount itself if no other call does.
func TestAwaitDrained(t *testing.T) {
	begin := func(t *testing.T) (*Supervisor, *parts.Parts, *mounttest.UIDs, state.Mount, func(context.Context) error) {
		t.Helper()
		l := &mounttest.UIDs{Live: map[uint32]bool{}}
		s, p := newSupervisor(t, l, mounttest.S3{})
		m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Phase = state.Ending })
		w := want.Mount{Spec: mount.Spec{Backend: "default", Bucket: "b", Source: credentials.SourceDriver}}
		return s, p, l, m, func(ctx context.Context) error {
			again, err := s.AwaitDrained(ctx, w, &overlap.Error{First: m})
			if again != (err == nil) {
				t.Errorf("again: %t, %v", again, err)
			}
			return err
		}
	}
	t.Run("other errors are returned", func(t *testing.T) {
		s, _, _, _, _ := begin(t)
		failed := errors.New("another")
		if again, err := s.AwaitDrained(t.Context(), want.Mount{}, failed); again || !errors.Is(err, failed) {
			t.Errorf("again: %t, %v", again, err)
		}
	})
	t.Run("it stops it", func(t *testing.T) {
		_, p, _, m, wait := begin(t)
		if err := wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if p.Store.Exists(t.Context(), m.Name) {
			t.Error("the mount still exists")
		}
	})
	t.Run("it does not stop in time", func(t *testing.T) {
		_, _, l, m, wait := begin(t)
		l.Live[m.UID] = true // without a helper: it is waited for
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if err := wait(ctx); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), m.Name) {
			t.Errorf("%v", err)
		}
	})
	t.Run("another call stops it", func(t *testing.T) {
		s, _, _, m, wait := begin(t)
		unlock, err := s.keys.Lock(t.Context(), m.Key)
		if err != nil {
			t.Fatal(err)
		}
		waited := make(chan error, 1)
		go func() { waited <- wait(t.Context()) }()
		if err := s.drainer.Stop(t.Context(), m, drain.Options{}); err != nil {
			t.Error(err)
		}
		select {
		case err := <-waited:
			t.Errorf("it did not wait for the lock: %v", err)
		default:
		}
		unlock()
		if err := <-waited; err != nil {
			t.Error(err)
		}
	})
	t.Run("it is published again", func(t *testing.T) {
		_, p, _, m, wait := begin(t)
		m.Phase = state.Running
		if err := p.Store.Write(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		waited := make(chan error, 1)
		go func() { waited <- wait(t.Context()) }()
		p.Show(m)
		if err := <-waited; err != nil {
			t.Error(err)
		}
		if !p.Store.Exists(t.Context(), m.Name) {
			t.Error("a mount in use was stopped")
		}
	})
	t.Run("errors are never final", func(t *testing.T) {
		_, p, _, m, wait := begin(t)
		if err := unix.Mount("tmpfs", p.Store.MountDir(m.Name), "tmpfs", 0, ""); err != nil { // its directory cannot be removed
			t.Fatal(err)
		}
		defer func() { _ = unix.Unmount(p.Store.MountDir(m.Name), unix.MNT_DETACH) }()
		if err := p.Store.Write(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		if err := wait(t.Context()); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), m.Name) {
			t.Errorf("%v", err)
		}
	})
}

// A publication supplies credentials to draining mounts of its own secret or service account, and to those of its volume's former
// secret.
func TestCredentialsForDrainingMounts(t *testing.T) {
	group := uint32(4001)
	own := mount.Spec{Backend: "default", Bucket: "b", Source: credentials.SourceSecret, Identity: "own"}
	former, stranger, grouped := own, own, own
	former.Identity = "former"
	stranger.Identity, stranger.MountGroup = "stranger", &group
	grouped.MountGroup = &group
	for what, tc := range map[string]struct {
		drains   mount.Spec
		volume   string
		denied   bool
		supplied bool
	}{
		"the same secret":                       {drains: grouped, volume: "another", supplied: true},
		"the volume's former secret":            {drains: former, volume: "v", supplied: true},
		"the former secret, the new one denied": {drains: former, volume: "v", denied: true},
		"another volume's secret":               {drains: former, volume: "another"},
		"another secret and group":              {drains: stranger, volume: "v"},
		"a service account": {drains: mount.Spec{Backend: "default", Bucket: "b", Source: credentials.SourceWorkload, Identity: "own"},
			volume: "v"},
	} {
		t.Run(what, func(t *testing.T) {
			b := mounttest.S3{}
			if tc.denied {
				b.Access = fault.Errorf(fault.Denied, "no")
			}
			s, p := newSupervisor(t, &mounttest.UIDs{}, b)
			m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Spec, m.VolumeID = tc.drains, tc.volume })
			keys := credentials.Keys{AccessKeyID: "x", SecretAccessKey: "y"}
			w := want.Mount{Publication: state.Publication{VolumeID: "v"}, Spec: own, Plan: func(ctx context.Context, spec mount.Spec) (*creds.Grant, error) {
				return p.Creds.Plan(ctx, mount.Request{Keys: keys}, spec)
			}}
			grant, err := drainWait{s, w, m.Name}.grantFor(t.Context(), &m)
			if err != nil || (grant != nil) != tc.supplied {
				t.Fatalf("%v, %v", grant, err)
			}
			if grant != nil && grant.Order().Keys != keys {
				t.Errorf("it supplies %v", grant)
			}
			if now := m.Serves().Identity; tc.supplied != (now == own.Identity) && tc.drains.Source == own.Source {
				t.Errorf("the mount serves %s", now)
			}
		})
	}
}
