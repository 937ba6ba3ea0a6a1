package create

import (
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

var testTime = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testRecord() records.Record {
	return records.Record{
		Version: 1, Driver: "d", Cluster: "c", Name: "v", VolumeID: "default:bucket/base/v/", ParametersDigest: volume.Parameters{}.Digest(),
		OnDelete: volume.OnDeleteDelete,
		State:    records.StateActive, Generation: 1, FirstPrefix: "base/v/", Created: testTime, Updated: testTime,
	}
}

func testReservation() records.Record {
	return records.Record{Version: 1, Driver: "d", Name: "base", State: records.StateReserved, Created: testTime, Updated: testTime}
}

func later(r records.Record) records.Record {
	r.Generation, r.VolumeID, r.PreviousVolumeID = 2, "default:bucket/other/v@2/", "default:bucket/base/v/"
	return r
}

func TestWhatARecordMeansForACreation(t *testing.T) {
	c := &creation{creator: &Creator{Records: records.NewStore(records.Owner{Driver: "d", Cluster: "c"}, nil, nil)}, r: Request{Name: "v"}}
	change := func(f func(*records.Record)) records.Record {
		r := testRecord()
		f(&r)
		return r
	}
	for name, tc := range map[string]struct {
		r    records.Record
		next bool
		kind fault.Kind // Unknown: no error
	}{
		"the volume":             {r: testRecord()},
		"tombstone":              {r: testRecord().With(records.StateDeleted, testTime), next: true},
		"another's tombstone":    {r: change(func(r *records.Record) { r.State, r.Cluster = records.StateDeleted, "x" }), next: true},
		"the last tombstone":     {r: change(func(r *records.Record) { r.State, r.Generation = records.StateDeleted, volume.MaxGeneration }), kind: fault.Exhausted},
		"reservation":            {r: testReservation(), kind: fault.Exists},
		"another driver":         {r: change(func(r *records.Record) { r.Driver = "x" }), kind: fault.Exists},
		"another cluster":        {r: change(func(r *records.Record) { r.Cluster = "x" }), kind: fault.Exists},
		"another's deletion":     {r: change(func(r *records.Record) { r.Cluster, r.State = "x", records.StateDeleting }), kind: fault.Exists},
		"a name of that segment": {r: change(func(r *records.Record) { r.Name = "w" }), kind: fault.Exists},
		"being deleted":          {r: testRecord().With(records.StateDeleting, testTime), kind: fault.Busy},
		"other parameters":       {r: change(func(r *records.Record) { r.ParametersDigest = "v1:01" }), kind: fault.Exists},
	} {
		next, err := c.decideCreate(tc.r)
		if next != tc.next || fault.KindOf(err) != tc.kind || (err != nil) != (tc.kind != fault.Unknown) {
			t.Errorf("%s: %t, %v", name, next, err)
		}
	}
}

func TestBasePrefixesReserveTheirDirectoryNames(t *testing.T) {
	for base, want := range map[string][]string{
		"a/":                                {"a"},
		"a/b/a/":                            {"a", "b"},
		"a/.hidden/ä/b c/":                  {"a"},
		strings.Repeat("x", 40) + "/":       {strings.Repeat("x", 40)},
		strings.Repeat("x", 41) + "/":       nil,
		"v-abcdefghijklmnopqrst/":           {"v-abcdefghijklmnopqrst"}, // some name's hashed segment
		volume.NameSegment("größe") + "/y/": {volume.NameSegment("größe"), "y"},
	} {
		if got := reservedNames(base); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %q, want %q", base, got, want)
		}
	}
}

func TestWhichRecordsLieAroundABasePrefix(t *testing.T) {
	b := buckets.Bucket{}
	for _, tc := range []struct {
		r    records.Record
		base string
		bad  bool
	}{
		{testRecord(), "base/v/", true},
		{testRecord(), "base/v/x/", true},
		{testRecord(), "v/", false},
		{testRecord(), "other/base/v/", false},
		{testRecord(), "base/vv/", false},
		{testRecord().With(records.StateDeleting, testTime), "base/v/", true},
		{testRecord().With(records.StateDeleted, testTime), "base/v/", true},
		{later(testRecord()), "base/v/", true},
		{later(testRecord()), "other/v/", false},
		{testReservation(), "base/v/", false},
	} {
		if err := aroundBase(tc.r, tc.base, b); fault.Is(err, fault.Precondition) != tc.bad || (err != nil) != tc.bad {
			t.Errorf("%s %s, base %s: %v", tc.r.State, tc.r.VolumeID, tc.base, err)
		}
	}
}

func TestWhatBucketTagsMean(t *testing.T) {
	want := records.Tags{records.TagDriver: "d", records.TagCluster: "c", records.TagVolume: "default:b", records.TagName: "v",
		records.TagParameters: "v1:0", records.TagOnDelete: "delete", records.TagState: "active"}
	with := func(k, v string) records.Tags {
		have := records.Tags{"cost-centre": "42"}
		maps.Copy(have, want)
		if have[k] = v; v == "" {
			delete(have, k)
		}
		return have
	}
	for name, tc := range map[string]struct {
		have records.Tags
		kind fault.Kind
	}{
		"ours":              {with("cost-centre", "43"), fault.Unknown},
		"none":              {records.Tags{}, fault.Exists},
		"an operator's":     {records.Tags{"team": "a"}, fault.Exists},
		"another driver":    {with(records.TagDriver, "x"), fault.Exists},
		"another cluster":   {with(records.TagCluster, "x"), fault.Exists},
		"no cluster":        {with(records.TagCluster, ""), fault.Exists},
		"another volume":    {with(records.TagVolume, "default:x"), fault.Exists},
		"another name":      {with(records.TagName, "x"), fault.Exists},
		"other parameters":  {with(records.TagParameters, "v1:1"), fault.Exists},
		"one is missing":    {with(records.TagParameters, ""), fault.Exists},
		"size was changed":  {with(records.TagCapacity, "7"), fault.Unknown},
		"onDelete was":      {with(records.TagOnDelete, "retain"), fault.Unknown},
		"one more of ours":  {with(records.TagPrefix+"more", "x"), fault.Exists},
		"being deleted":     {with(records.TagState, "deleting"), fault.Busy},
		"retained":          {with(records.TagState, "deleted"), fault.Exists},
		"another's, ending": {records.Tags{records.TagDriver: "x", records.TagVolume: "default:b", records.TagState: "deleting"}, fault.Exists},
	} {
		if err := decideBucket(tc.have, want, "b"); fault.KindOf(err) != tc.kind || (err == nil) != (tc.kind == fault.Unknown) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
