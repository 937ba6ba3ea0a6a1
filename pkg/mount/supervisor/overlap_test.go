package supervisor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// endpoints are backends with these endpoints, by name.
type endpoints struct {
	mounttest.S3
	byName map[string]string
}

func (e endpoints) Backend(name string) (backend.Backend, error) {
	endpoint, ok := e.byName[name]
	if !ok {
		return backend.Backend{}, fault.Errorf(fault.Precondition, "no backend %s", name)
	}
	return backend.Backend{Name: name, Endpoint: endpoint}, nil
}

func TestOverlap(t *testing.T) {
	order := drainOrder{&Options{Options: runner.Options{Backends: endpoints{byName: map[string]string{
		"default": "", "aws": "https://s3.eu-west-1.amazonaws.com", "china": "https://s3.cn-north-1.amazonaws.com.cn", "minio": "http://minio.example:9000",
		"alias": "http://MinIO.example:9000/", "other port": "http://minio.example:9001", "tls": "https://store.example", "tls too": "https://store.example:443",
		"not aws": "https://notamazonaws.com",
	}}}}}
	for _, tc := range []struct {
		a, b string // backend bucket prefix
		want bool
	}{
		{"minio b a/", "minio b a/", true},
		{"minio b a/", "minio b a/b/", true},
		{"minio b a/b/", "minio b a/", true},
		{"minio b ", "minio b a/", true},
		{"minio b a/", "minio b ", true},
		{"minio b ", "minio b ", true},
		{"minio b a/", "minio b ab/", false},
		{"minio b a/b/", "minio b a/c/", false},
		{"minio b a/", "minio b b/a/", false},
		{"minio b a/", "minio c a/", false},
		{"minio b a/", "alias b a/", true},
		{"minio b a/", "other port b a/", false},
		{"minio b a/", "default b a/", false},
		{"default b a/", "aws b a/", true},
		{"aws b a/", "china b a/", true}, // of two partitions, which cannot be told from a name
		{"default b a/", "not aws b a/", false},
		{"tls b a/", "tls too b a/", true},
		{"minio b a/", "removed b a/", true}, // its endpoint is unknown
		{"removed b a/", "removed b c/", false},
	} {
		if got := order.overlap(placeOf(tc.a), placeOf(tc.b)); got != tc.want {
			t.Errorf("%q and %q: %t", tc.a, tc.b, got)
		}
	}
}

// placeOf reads "<backend> <bucket> <prefix>".
func placeOf(s string) mount.Spec {
	prefix := s[strings.LastIndexByte(s, ' ')+1:]
	rest := strings.TrimSuffix(s, " "+prefix)
	bucket := rest[strings.LastIndexByte(rest, ' ')+1:]
	return mount.Spec{Backend: strings.TrimSuffix(rest, " "+bucket), Bucket: bucket, Prefix: prefix}
}

func TestWhichMountsDrainFirst(t *testing.T) {
	group := uint32(4001)
	type change = func(p *parts.Parts, m *state.Mount)
	ending := func(more change) change {
		return func(p *parts.Parts, m *state.Mount) {
			m.Phase = state.Ending
			if more != nil {
				more(p, m)
			}
		}
	}
	for what, tc := range map[string]struct {
		change change
		want   bool
	}{
		"ending":                      {ending(nil), true},
		"ending, and bound elsewhere": {ending(func(p *parts.Parts, m *state.Mount) { p.Show(*m) }), true},
		"ending, without a cache":     {ending(func(_ *parts.Parts, m *state.Mount) { m.Client = "mountpoint-s3" }), true},
		"ending, read-only":           {ending(func(_ *parts.Parts, m *state.Mount) { m.Spec.ReadOnly = true }), false},
		"ending, elsewhere":           {ending(func(_ *parts.Parts, m *state.Mount) { m.Spec.Prefix = "other/" }), false},
		"starting":                    {func(_ *parts.Parts, m *state.Mount) { m.Phase = state.Starting }, false},
		"lingering":                   {lingers, true},
		"lingering, read-only":        {func(p *parts.Parts, m *state.Mount) { lingers(p, m); m.Spec.ReadOnly = true }, false},
		"lingering, elsewhere":        {func(p *parts.Parts, m *state.Mount) { lingers(p, m); m.Spec.Prefix = "other/" }, false},
		"in use":                      {func(p *parts.Parts, m *state.Mount) { p.Show(*m) }, false},
		"its target is unmounted":     {func(p *parts.Parts, m *state.Mount) { leaveTarget(t, p, *m) }, true},
		"it has no publication":       {func(*parts.Parts, *state.Mount) {}, true},
		"left, and pinned":            {func(p *parts.Parts, m *state.Mount) { pin(t, p, *m) }, true},
		"replaced, successor in use":  {func(p *parts.Parts, m *state.Mount) { replaced(t, p, m, true) }, false},
		"replaced, successor left":    {func(p *parts.Parts, m *state.Mount) { replaced(t, p, m, false) }, true},
		"moved away from, in use": {ending(func(p *parts.Parts, m *state.Mount) {
			m.Superseded = true
			pub := p.Show(p.Mount("c", "1", "mountpoint-s3", nil))
			pub.MovedFrom = []string{m.Name}
			p.Publish(pub)
		}), false},
	} {
		t.Run(what, func(t *testing.T) {
			s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
			m := p.Mount("a", "1", "rclone", func(m *state.Mount) { m.Spec.Prefix = "p/" })
			tc.change(p, &m)
			if err := p.Store.Write(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			w := want.Mount{Spec: mount.Spec{Backend: "default", Bucket: "b", Prefix: "p/q/", MountGroup: &group, Source: credentials.SourceDriver}}
			err := drainOrder{&s.Options}.checkDrained(t.Context(), w)
			var first *drainFirstError
			if waits := errors.As(err, &first); waits != tc.want || !waits && err != nil {
				t.Errorf("%v", err)
			} else if waits && (!fault.Is(err, fault.Busy) || first.m.Name != m.Name) {
				t.Errorf("%v, for %s", err, first.m.Name)
			}
		})
	}
}

// lingers is a change to a mount that lingers for a minute.
func lingers(p *parts.Parts, m *state.Mount) {
	m.LingerFor = time.Minute
	m.Linger = &state.Linger{Since: time.Now(), Until: time.Now().Add(time.Minute), Backend: p.Backend().Revision()}
}

// pin pins a former file system of a mount.
func pin(t *testing.T, p *parts.Parts, m state.Mount) {
	t.Helper()
	dir := p.Pins.Dir(m.Name, 4711)
	mustMkdir(t, dir)
	p.MountAt(m, dir)
}

// leaveTarget records a publication whose target is not mounted.
func leaveTarget(t *testing.T, p *parts.Parts, m state.Mount) {
	t.Helper()
	p.Publish(state.Publication{Target: t.TempDir(), Mount: m.Name})
}

// replaced gives a mount, in which files may be open, a successor of its key.
func replaced(t *testing.T, p *parts.Parts, m *state.Mount, used bool) {
	t.Helper()
	m.Phase, m.Superseded, m.Client = state.Ending, true, "mountpoint-s3"
	by := p.Mount("a", "2", "mountpoint-s3", func(by *state.Mount) {
		by.Spec.ReadOnly = true // it does not drain itself
		by.Predecessors = []string{m.Name}
	})
	if used {
		p.Show(by)
	} else {
		leaveTarget(t, p, by)
	}
}

// A publication waits without holding a lock, and stops the draining mount itself if no other call does.
func TestAwaitDrained(t *testing.T) {
	begin := func(t *testing.T) (*Supervisor, *parts.Parts, *mounttest.UIDs, state.Mount, func(context.Context) error) {
		t.Helper()
		l := &mounttest.UIDs{Live: map[uint32]bool{}}
		s, p := newSupervisor(t, l, mounttest.S3{})
		m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Phase = state.Ending })
		w := want.Mount{Spec: mount.Spec{Backend: "default", Bucket: "b", Source: credentials.SourceDriver}}
		return s, p, l, m, func(ctx context.Context) error {
			again, err := s.AwaitDrained(ctx, w, &drainFirstError{m})
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
		if err := s.Drainer.Stop(t.Context(), m, drain.Options{}); err != nil {
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
		"a service account":                     {drains: mount.Spec{Backend: "default", Bucket: "b", Source: credentials.SourceWorkload, Identity: "own"}, volume: "v"},
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
