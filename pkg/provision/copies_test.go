//go:build !race

package provision_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// snap makes a snapshot in the shared bucket.
func (l lab) snap(name string, of volume.ID, pairs ...string) (s provision.Snapshot, err error) {
	l.Helper()
	given := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		given[pairs[i]] = pairs[i+1]
	}
	params, err := volume.ParseSnapshotParameters(given)
	if err != nil {
		l.Fatal(err)
	}
	err = l.do(func(ctx context.Context, p *process) (err error) {
		s, err = p.CreateSnapshot(ctx, provision.SnapshotRequest{Name: name, Source: of, Parameters: params})
		return err
	})
	return s, err
}

// restore creates a volume with content.
func (l lab) restore(name string, content volume.Content, change func(*volume.Parameters)) (id volume.ID, err error) {
	params := parameters(l.T, name, "bucketName", shared)
	params.Content = content
	change(&params)
	err = l.do(func(ctx context.Context, p *process) (err error) {
		id, err = p.Create(ctx, provision.CreateRequest{Name: name, Parameters: params})
		return err
	})
	return id, err
}

func TestListSnapshots_PagesHaveEachSnapshotOnce(t *testing.T) {
	inLab(t, func(l lab) {
		l.w.s.make("others", nil)
		l.w.s.pageSize = 2
		v, w := l.create("v", "bucketName", shared), l.create("w", "bucketName", shared)
		l.w.s.put(shared, v.Prefix+"a", "content")
		l.w.s.put(shared, volume.SnapshotsPrefix+"foreign", "no record")
		var want []string
		for i, source := range []volume.ID{v, w, v, w, v} {
			s, err := l.snap(fmt.Sprint("s", i), source)
			if err != nil || !s.Ready {
				t.Fatalf("%+v, %v", s, err)
			}
			want = append(want, s.ID.String())
		}
		list := func(r provision.ListSnapshotsRequest) (found []string) {
			for {
				var page []provision.Snapshot
				if err := l.do(func(ctx context.Context, p *process) (err error) {
					page, r.Token, err = p.ListSnapshots(ctx, r)
					return err
				}); err != nil {
					t.Fatal(err)
				}
				for _, s := range page {
					found = append(found, s.ID.String())
				}
				if r.Token == "" {
					return found
				}
			}
		}
		for name, c := range map[string]struct {
			request provision.ListSnapshotsRequest
			want    []string
		}{
			"all":                {provision.ListSnapshotsRequest{}, want},
			"in pages":           {provision.ListSnapshotsRequest{Max: 2}, want},
			"of a volume":        {provision.ListSnapshotsRequest{Source: w.String(), Max: 1}, []string{want[1], want[3]}},
			"of no volume":       {provision.ListSnapshotsRequest{Source: "lab:" + shared + "/none/"}, nil},
			"of no id":           {provision.ListSnapshotsRequest{Source: "?"}, nil},
			"of another backend": {provision.ListSnapshotsRequest{Source: "other:b/v/"}, nil},
			"with a secret": {provision.ListSnapshotsRequest{Secret: provision.Secret{
				Keys: credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}}}, nil},
		} {
			if got := list(c.request); !slices.Equal(got, c.want) {
				t.Errorf("%s: %q, want %q", name, got, c.want)
			}
		}
		l.want("a token that is none", l.do(func(ctx context.Context, p *process) error {
			_, _, err := p.ListSnapshots(ctx, provision.ListSnapshotsRequest{Token: "?"})
			return err
		}), fault.Busy)
		get := func(id volume.SnapshotID) error {
			return l.do(func(ctx context.Context, p *process) error {
				_, err := p.GetSnapshot(ctx, id, provision.Secret{})
				return err
			})
		}
		id, err := volume.ParseSnapshotID(want[0])
		if err != nil {
			t.Fatal(err)
		}
		l.want("a snapshot", get(id), fault.Unknown)
		id.Generation++
		l.want("another generation", get(id), fault.NotFound)
		id.Bucket = "none"
		l.want("no bucket", get(id), fault.NotFound)
	})
}

func TestCreateSnapshot_RefusesWhatItCannotMake(t *testing.T) {
	inLab(t, func(l lab) {
		v, w := l.create("v", "bucketName", shared), l.create("w", "bucketName", shared)
		b := l.create("b")
		l.w.s.put(shared, v.Prefix+"a", "content")
		l.w.s.put(shared, v.Prefix+"b", "content")
		if _, err := l.snap("used", v); err != nil {
			t.Fatal(err)
		}
		none := volume.ID{Backend: "lab", Bucket: shared, Prefix: "none/"}
		for name, c := range map[string]struct {
			name  string
			of    volume.ID
			pairs []string
			kind  fault.Kind
		}{
			"a retry":                      {"used", v, nil, fault.Unknown},
			"a used name":                  {"used", w, nil, fault.Exists},
			"other parameters":             {"used", v, []string{"onDelete", "retain"}, fault.Exists},
			"no source":                    {"s", none, nil, fault.NotFound},
			"a static volume that is none": {"s", none, []string{"staticVolumes", "true"}, fault.NotFound},
			"too many objects":             {"s", v, []string{"maxObjects", "1"}, fault.OutOfRange},
			"a bucket in itself":           {"s", b, nil, fault.Invalid},
			"a bucket that is a volume":    {"s", v, []string{"bucketName", b.Bucket}, fault.Precondition},
			"no bucket":                    {"s", v, []string{"bucketName", "none"}, fault.Precondition},
			"a time without versions":      {"s", v, []string{"consistency", "time"}, fault.Precondition},
		} {
			_, err := l.snap(c.name, c.of, c.pairs...)
			l.want(name, err, c.kind)
		}
	})
}

func TestCreateSnapshot_OfATimeIsReadyLater(t *testing.T) {
	inLab(t, func(l lab) {
		l.w.s.buckets[shared].versioned = true
		v := l.create("v", "bucketName", shared)
		l.w.s.put(shared, v.Prefix+"a", "before")
		s, err := l.snap("s", v, "consistency", "time")
		if err != nil || s.Cut.IsZero() {
			t.Fatalf("%+v, %v", s, err)
		}
		l.w.s.put(shared, v.Prefix+"a", "after")
		l.w.s.put(shared, v.Prefix+"b", "after")
		if s, err = l.snap("s", v, "consistency", "time"); err != nil || !s.Ready || s.Objects != 1 {
			t.Errorf("%+v, %v", s, err)
		}
		w, err := l.restore("w", volume.Content{Snapshot: s.ID}, func(*volume.Parameters) {})
		if o, _ := l.w.s.buckets[shared].get(w.Prefix + "a"); err != nil || o.body != "before" {
			t.Errorf("restored: %q, %v", o.body, err)
		}
	})
}

func TestCreateVolume_RefusesContentThatDoesNotFit(t *testing.T) {
	inLab(t, func(l lab) {
		v := l.create("v", "bucketName", shared)
		l.w.s.put(shared, v.Prefix+"a", "content")
		s, err := l.snap("s", v)
		if err != nil {
			t.Fatal(err)
		}
		elsewhere := s.ID
		elsewhere.Bucket = "none"
		for name, c := range map[string]struct {
			content volume.Content
			change  func(*volume.Parameters)
			kind    fault.Kind
		}{
			"too small":            {volume.Content{Snapshot: s.ID}, func(p *volume.Parameters) { p.CapacityBytes = 1 }, fault.OutOfRange},
			"too many objects":     {volume.Content{Volume: v}, func(p *volume.Parameters) { p.MaxBytes = 1 }, fault.OutOfRange},
			"no bucket":            {volume.Content{Snapshot: elsewhere}, func(*volume.Parameters) {}, fault.NotFound},
			"no volume":            {volume.Content{Volume: volume.ID{Backend: "lab", Bucket: shared, Prefix: "none/"}}, func(*volume.Parameters) {}, fault.NotFound},
			"another backend":      {volume.Content{Volume: volume.ID{Backend: "other", Bucket: shared, Prefix: "v/"}}, func(*volume.Parameters) {}, fault.Invalid},
			"content that fits":    {volume.Content{Snapshot: s.ID}, func(p *volume.Parameters) { p.CapacityBytes = 7 }, fault.Unknown},
			"a volume, if it fits": {volume.Content{Volume: v}, func(p *volume.Parameters) { p.MaxObjects = 1 }, fault.Unknown},
		} {
			_, err := l.restore("of "+name, c.content, c.change)
			l.want(name, err, c.kind)
		}
	})
}

// A process that is killed when it has filled a volume leaves the manifest of the copy. Deletion removes it, whatever onDelete says.
func TestDelete_ManifestOfAFillIsRemoved(t *testing.T) {
	for _, onDelete := range []volume.OnDelete{volume.OnDeleteDelete, volume.OnDeletePurge, volume.OnDeleteRequireEmpty} {
		t.Run(string(onDelete), func(t *testing.T) {
			inLab(t, func(l lab) {
				v := l.create("v", "bucketName", shared)
				l.w.s.put(shared, v.Prefix+"a", "content")
				w, err := l.restore("w", volume.Content{Volume: v}, func(p *volume.Parameters) { p.OnDelete = onDelete })
				if err != nil {
					t.Fatal(err)
				}
				manifest := w.FillManifest() + "00000000"
				l.w.s.put(shared, manifest, "left")
				l.w.s.remove(shared, w.Prefix+"a", "")
				l.want("deletion", l.delete(w), fault.Unknown)
				if _, there := l.w.s.buckets[shared].get(manifest); there {
					t.Error("the manifest is there")
				}
			})
		})
	}
}
