package fill

import (
	"errors"
	"slices"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestRunID_IsTheSameForAllGenerationsOfAName(t *testing.T) {
	for prefix, want := range map[string]string{"v/": "fill b:bucket/v/", "v@2/": "fill b:bucket/v/", "base/v@17/": "fill b:bucket/base/v/", "": "fill b:bucket"} {
		if got := RunID(volume.ID{Backend: "b", Bucket: "bucket", Prefix: prefix}); got != want {
			t.Errorf("%q: %q, want %q", prefix, got, want)
		}
	}
}

// A run that another process has outlived erases what it copied late, but not what a user has been given since.
func TestStatus_ErasedIsWhatNoUserHas(t *testing.T) {
	id := volume.ID{Backend: "b", Bucket: "bucket", Prefix: "v/"}
	v := &filling{r: Request{ID: id}}
	failed := errors.New("failed")
	for name, c := range map[string]struct {
		state    records.State
		onDelete volume.OnDelete // in the record
		asked    volume.OnDelete // in the request
		id       string
		read     error
		want     copier.Status
		err      error
	}{
		"filling":                {state: records.StateFilling, id: id.String(), want: copier.Status{State: copier.Wanted}},
		"filled":                 {state: records.StateActive, id: id.String(), want: copier.Status{State: copier.Done}},
		"being deleted":          {state: records.StateDeleting, id: id.String(), want: copier.Status{Erased: true}},
		"deleted with versions":  {state: records.StateDeleted, onDelete: volume.OnDeletePurge, id: id.String(), want: copier.Status{Erased: true, Purged: true}},
		"filled and retained":    {state: records.StateDeleted, onDelete: volume.OnDeleteRetain, id: id.String()},
		"of the next generation": {state: records.StateActive, id: "b:bucket/v@2/", want: copier.Status{Erased: true}},
		"of a next generation that is retained": {
			state: records.StateActive, onDelete: volume.OnDeleteRetain, id: "b:bucket/v@2/", want: copier.Status{Erased: true},
		},
		"retained, of the next generation": {state: records.StateActive, asked: volume.OnDeleteRetain, id: "b:bucket/v@2/"},
		"purged, of the next generation": {
			state: records.StateActive, asked: volume.OnDeletePurge, id: "b:bucket/v@2/", want: copier.Status{Erased: true, Purged: true},
		},
		"of another driver": {read: records.ErrNotOurs},
		"not read":          {read: failed, err: failed},
		"no bucket":         {read: fault.Errorf(fault.NotFound, "none"), err: fault.Errorf(fault.NotFound, "none")},
	} {
		v.r.Parameters.OnDelete = c.asked
		got, err := v.Status(records.Stored{Record: records.Record{VolumeID: c.id, State: c.state, OnDelete: c.onDelete}}, c.read)
		if got.State != c.want.State || got.Erased != c.want.Erased || got.Purged != c.want.Purged || fault.KindOf(err) != fault.KindOf(c.err) {
			t.Errorf("%s: %+v, %v, want %+v, %v", name, got, err, c.want, c.err)
		}
	}
}

// A bucket's name has no generations, so that what is in a bucket is left to the process that deletes it.
func TestCopy_SweepsContentAndManifestOfAPrefix(t *testing.T) {
	f := New(Options{})
	for prefix, want := range map[string][]string{"v@2/": {"v@2/", volume.FillsPrefix + "v@2/"}, "": nil} {
		v := &filling{f: f, r: Request{ID: volume.ID{Backend: "b", Bucket: "bucket", Prefix: prefix}}}
		if got := v.newCopy(backend.Backend{}).Leftovers; !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", prefix, got, want)
		}
	}
}
