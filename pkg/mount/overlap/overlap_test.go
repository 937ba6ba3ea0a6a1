package overlap

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

func newOrder(t *testing.T) (Order, *parts.Parts) {
	t.Helper()
	p := parts.New(t, mounttest.S3{})
	return Order{Store: p.Store, Namespace: p.Namespace, Pins: p.Pins, Backend: p.Backends.Backend}, p
}

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
	order := Order{Backend: endpoints{byName: map[string]string{
		"default": "", "aws": "https://s3.eu-west-1.amazonaws.com", "china": "https://s3.cn-north-1.amazonaws.com.cn", "minio": "http://minio.example:9000",
		"alias": "http://MinIO.example:9000/", "other port": "http://minio.example:9001", "tls": "https://store.example", "tls too": "https://store.example:443",
		"not aws": "https://notamazonaws.com",
	}}.Backend}
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
		"lingering":                   {linger, true},
		"lingering, read-only":        {func(p *parts.Parts, m *state.Mount) { linger(p, m); m.Spec.ReadOnly = true }, false},
		"lingering, elsewhere":        {func(p *parts.Parts, m *state.Mount) { linger(p, m); m.Spec.Prefix = "other/" }, false},
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
			order, p := newOrder(t)
			m := p.Mount("a", "1", "rclone", func(m *state.Mount) { m.Spec.Prefix = "p/" })
			tc.change(p, &m)
			if err := p.Store.Write(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			w := want.Mount{Spec: mount.Spec{Backend: "default", Bucket: "b", Prefix: "p/q/", MountGroup: &group, Source: credentials.SourceDriver}}
			err := order.Check(t.Context(), w)
			var first *Error
			if waits := errors.As(err, &first); waits != tc.want || !waits && err != nil {
				t.Errorf("%v", err)
			} else if waits && (!fault.Is(err, fault.Busy) || first.First.Name != m.Name) {
				t.Errorf("%v, for %s", err, first.First.Name)
			}
		})
	}
}

// pin pins a former file system of a mount.
func pin(t *testing.T, p *parts.Parts, m state.Mount) {
	t.Helper()
	dir := p.Pins.Dir(m.Name, 4711)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
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

func TestWhichMountsALingeringOneGivesWayTo(t *testing.T) {
	order, _ := newOrder(t)
	base := mount.Spec{Backend: "default", Bucket: "b", Prefix: "p/", Source: credentials.SourceWorkload, Identity: "team/app"}
	changed := func(change func(*mount.Spec)) mount.Spec {
		spec := base
		change(&spec)
		return spec
	}
	reading := changed(func(s *mount.Spec) { s.ReadOnly = true })
	elsewhere := changed(func(s *mount.Spec) { s.Prefix = "q/" })
	for what, tc := range map[string]struct {
		lingers mount.Spec
		starts  mount.Spec
		volume  string
		want    string
	}{
		"an overlapping prefix":            {base, changed(func(s *mount.Spec) { s.Prefix = "p/q/" }), "other", tracker.EndedOverlap},
		"one that only reads":              {base, reading, "other", tracker.EndedOverlap},
		"another prefix":                   {base, elsewhere, "other", ""},
		"a writer where it only reads":     {reading, base, "other", ""},
		"the volume with an option":        {reading, changed(func(s *mount.Spec) { s.ReadOnly, s.Options = true, []string{"x"} }), "v", tracker.EndedVolume},
		"the volume with another identity": {reading, changed(func(s *mount.Spec) { s.ReadOnly, s.Identity = true, "team/other" }), "v", ""},
		"the volume at another place":      {base, elsewhere, "v", tracker.EndedVolume},
		"the volume with another secret": {
			changed(func(s *mount.Spec) { s.ReadOnly, s.Source, s.Identity = true, credentials.SourceSecret, "old" }),
			changed(func(s *mount.Spec) { s.ReadOnly, s.Source, s.Identity = true, credentials.SourceSecret, "new" }), "v", tracker.EndedVolume,
		},
	} {
		w := want.Mount{Spec: tc.starts, Publication: state.Publication{VolumeID: tc.volume}}
		if got := order.Spoils(w, state.Mount{VolumeID: "v", Spec: tc.lingers}); got != tc.want {
			t.Errorf("%s: %q, want %q", what, got, tc.want)
		}
	}
}

// linger is a change to a mount that lingers for a minute.
func linger(p *parts.Parts, m *state.Mount) {
	m.LingerFor = time.Minute
	m.Linger = &state.Linger{Since: time.Now(), Until: time.Now().Add(time.Minute), Backend: p.Backend().Revision()}
}
