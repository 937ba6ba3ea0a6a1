package mount

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// endpoints are backends with these endpoints, by name.
type endpoints struct {
	s3
	of map[string]string
}

func (e endpoints) Backend(name string) (backend.Backend, error) {
	endpoint, ok := e.of[name]
	if !ok {
		return backend.Backend{}, fault.Errorf(fault.Precondition, "there is no backend %s", name)
	}
	return backend.Backend{Name: name, Endpoint: endpoint}, nil
}

func TestOverlap(t *testing.T) {
	m := newTestManager(t, &uids{}, endpoints{of: map[string]string{
		"default": "", "aws": "https://s3.eu-west-1.amazonaws.com", "china": "https://s3.cn-north-1.amazonaws.com.cn", "minio": "http://minio.example:9000",
		"alias": "http://MinIO.example:9000/", "other port": "http://minio.example:9001", "tls": "https://store.example", "tls too": "https://store.example:443",
		"not aws": "https://notamazonaws.com",
	}})
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
		{"minio b a/", "removed b a/", true}, // nobody knows
		{"removed b a/", "removed b c/", false},
	} {
		if got := m.overlap(placeOf(tc.a), placeOf(tc.b)); got != tc.want {
			t.Errorf("%q and %q: %t", tc.a, tc.b, got)
		}
	}
}

// placeOf reads "<backend> <bucket> <prefix>".
func placeOf(s string) Spec {
	prefix := s[strings.LastIndexByte(s, ' ')+1:]
	rest := strings.TrimSuffix(s, " "+prefix)
	bucket := rest[strings.LastIndexByte(rest, ' ')+1:]
	return Spec{Backend: strings.TrimSuffix(rest, " "+bucket), Bucket: bucket, Prefix: prefix}
}

func TestWhichMountsAMountWaitsFor(t *testing.T) {
	group := uint32(4001)
	for what, tc := range map[string]struct {
		change func(t *testing.T, m *Manager, rec *record)
		want   bool
	}{
		"ending":                         {func(_ *testing.T, _ *Manager, rec *record) { rec.Phase = phaseEnding }, true},
		"ending, and bound elsewhere":    {func(t *testing.T, m *Manager, rec *record) { rec.Phase = phaseEnding; show(t, m, *rec) }, true},
		"ending, without a cache":        {func(_ *testing.T, _ *Manager, rec *record) { rec.Phase, rec.Client = phaseEnding, "mountpoint-s3" }, true},
		"ending, read-only":              {func(_ *testing.T, _ *Manager, rec *record) { rec.Phase, rec.Spec.ReadOnly = phaseEnding, true }, false},
		"ending, elsewhere":              {func(_ *testing.T, _ *Manager, rec *record) { rec.Phase, rec.Spec.Prefix = phaseEnding, "other/" }, false},
		"starting":                       {func(_ *testing.T, _ *Manager, rec *record) { rec.Phase = phaseStarting }, false},
		"in use":                         {func(t *testing.T, m *Manager, rec *record) { show(t, m, *rec) }, false},
		"its target is unmounted":        {func(t *testing.T, m *Manager, rec *record) { leaveTarget(t, m, *rec) }, true},
		"it has no publication":          {func(*testing.T, *Manager, *record) {}, true},
		"left, a former client's pinned": {func(t *testing.T, m *Manager, rec *record) { pin(t, m, *rec) }, true},
		"replaced, its successor in use": {func(t *testing.T, m *Manager, rec *record) { replaced(t, m, rec, true) }, false},
		"replaced, its successor left":   {func(t *testing.T, m *Manager, rec *record) { replaced(t, m, rec, false) }, true},
		"moved away from, in use": {func(t *testing.T, m *Manager, rec *record) {
			rec.Phase, rec.Superseded = phaseEnding, true
			by := mountOf(t, m, "c", "1", "mountpoint-s3")
			show(t, m, by)
			pubs, err := m.store.publicationsOf(by.Name)
			if err != nil || len(pubs) != 1 {
				t.Fatal(pubs, err)
			}
			pubs[0].From = []string{rec.Name}
			if err := m.store.writePublication(pubs[0]); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(what, func(t *testing.T) {
			m := newTestManager(t, &uids{}, s3{})
			rec := mountOf(t, m, "a", "1", "rclone")
			rec.Spec.Prefix = "p/"
			tc.change(t, m, &rec)
			if err := m.store.writeRecord(rec); err != nil {
				t.Fatal(err)
			}
			spec := Spec{Backend: "default", Bucket: "b", Prefix: "p/q/", MountGroup: &group, Source: credentials.SourceDriver}
			err := m.drainedFirst(t.Context(), spec)
			first := (*drainsFirstError)(nil)
			if waits := errors.As(err, &first); waits != tc.want || !waits && err != nil {
				t.Errorf("%v", err)
			} else if waits && (!fault.Is(err, fault.Busy) || first.rec.Name != rec.Name) {
				t.Errorf("%v, for %s", err, first.rec.Name)
			}
		})
	}
}

// pin has the driver keep a former file system of a mount.
func pin(t *testing.T, m *Manager, rec record) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system")
	}
	dir := m.store.pinDir(rec.Name, 4711)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	mountAt(t, rec, dir)
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// leaveTarget is a publication whose target shows nothing any more.
func leaveTarget(t *testing.T, m *Manager, rec record) {
	t.Helper()
	if err := m.store.writePublication(publication{Target: t.TempDir(), Mount: rec.Name}); err != nil {
		t.Fatal(err)
	}
}

// replaced gives a mount, in which files may be open, a successor of its key.
func replaced(t *testing.T, m *Manager, rec *record, used bool) {
	t.Helper()
	rec.Phase, rec.Superseded, rec.Client = phaseEnding, true, "mountpoint-s3"
	by := mountOf(t, m, "a", "2", "mountpoint-s3")
	by.Spec.ReadOnly = true // it is not the one that is asked about
	by.Former = []string{rec.Name}
	if err := m.store.writeRecord(by); err != nil {
		t.Fatal(err)
	}
	if used {
		show(t, m, by)
	} else {
		leaveTarget(t, m, by)
	}
}

// A publication waits without holding a lock, and what it waits for has to be ended by itself where no other call does it.
func TestAwaitDrained(t *testing.T) {
	begin := func(t *testing.T) (*Manager, *uids, record, func(context.Context) error) {
		t.Helper()
		l := &uids{alive: map[uint32]bool{}}
		m := newTestManager(t, l, s3{})
		rec := mountOf(t, m, "a", "1", "mountpoint-s3")
		rec.Phase = phaseEnding
		if err := m.store.writeRecord(rec); err != nil {
			t.Fatal(err)
		}
		return m, l, rec, func(ctx context.Context) error {
			return m.awaitDrained(ctx, Request{VolumeID: "v"}, Spec{Backend: "default", Bucket: "b", Source: credentials.SourceDriver}, &drainsFirstError{rec})
		}
	}
	t.Run("it ends it", func(t *testing.T) {
		m, _, rec, wait := begin(t)
		if err := wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !m.gone(t.Context(), rec.Name) {
			t.Error("the mount is still there")
		}
	})
	t.Run("it does not end in time", func(t *testing.T) {
		_, l, rec, wait := begin(t)
		l.alive[rec.UID] = true // without a helper: it is waited for
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if err := wait(ctx); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), rec.Name) || !strings.Contains(err.Error(), "draining") {
			t.Errorf("%v", err)
		}
	})
	t.Run("another call ends it", func(t *testing.T) {
		m, _, rec, wait := begin(t)
		unlock, err := m.keys.Lock(t.Context(), rec.Key)
		if err != nil {
			t.Fatal(err)
		}
		waited := make(chan error, 1)
		go func() { waited <- wait(t.Context()) }()
		if err := m.end(t.Context(), rec, successor{}); err != nil {
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
		m, _, rec, wait := begin(t)
		rec.Phase = phaseRunning
		if err := m.store.writeRecord(rec); err != nil {
			t.Fatal(err)
		}
		waited := make(chan error, 1)
		go func() { waited <- wait(t.Context()) }()
		show(t, m, rec)
		if err := <-waited; err != nil {
			t.Error(err)
		}
		if m.gone(t.Context(), rec.Name) {
			t.Error("a mount that is in use was ended")
		}
	})
	t.Run("what fails is never final", func(t *testing.T) {
		m, _, rec, wait := begin(t)
		if err := unix.Mount("tmpfs", m.store.mountDir(rec.Name), "tmpfs", 0, ""); err != nil { // its directory cannot be removed
			t.Fatal(err)
		}
		defer func() { _ = unix.Unmount(m.store.mountDir(rec.Name), unix.MNT_DETACH) }()
		if err := m.store.writeRecord(rec); err != nil {
			t.Fatal(err)
		}
		if err := wait(t.Context()); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), rec.Name) {
			t.Errorf("%v", err)
		}
	})
}

// What a publication brings is for mounts of its own secret or service account, and for those of its volume's former secret.
func TestWhatAPublicationBringsForADrainingMount(t *testing.T) {
	group := uint32(4001)
	own := Spec{Backend: "default", Bucket: "b", Source: credentials.SourceSecret, Identity: "own"}
	former, stranger, grouped := own, own, own
	former.Identity = "former"
	stranger.Identity, stranger.MountGroup = "stranger", &group
	grouped.MountGroup = &group
	for what, tc := range map[string]struct {
		drains Spec
		volume string
		denied bool
		brings bool
	}{
		"the same secret":                       {drains: grouped, volume: "another", brings: true},
		"the volume's former secret":            {drains: former, volume: "v", brings: true},
		"the former secret, the new one denied": {drains: former, volume: "v", denied: true},
		"another volume's secret":               {drains: former, volume: "another"},
		"another secret and group":              {drains: stranger, volume: "v"},
		"a service account":                     {drains: Spec{Backend: "default", Bucket: "b", Source: credentials.SourceWorkload, Identity: "own"}, volume: "v"},
	} {
		t.Run(what, func(t *testing.T) {
			b := s3{}
			if tc.denied {
				b.access = fault.Errorf(fault.Denied, "no")
			}
			m := newTestManager(t, &uids{}, b)
			rec := mountOf(t, m, "a", "1", "mountpoint-s3")
			rec.Spec, rec.VolumeID = tc.drains, tc.volume
			keys := credentials.Keys{AccessKeyID: "x", SecretAccessKey: "y"}
			s, err := m.supplyFor(t.Context(), Request{VolumeID: "v", Keys: keys}, own, &rec)
			if err != nil || (s != nil) != tc.brings {
				t.Fatalf("%v, %v", s, err)
			}
			if s != nil && s.order.Keys != keys {
				t.Errorf("it brings %v", s)
			}
			if now := rec.serves().Identity; tc.brings != (now == own.Identity) && tc.drains.Source == own.Source {
				t.Errorf("the mount serves %s", now)
			}
		})
	}
}
