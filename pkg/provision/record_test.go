package provision

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

var testTime = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

func testRecord() record {
	return record{
		Version: 1, Driver: "d", Cluster: "c", Name: "v", VolumeID: "default:bucket/base/v/", ParametersDigest: "v1:00", OnDelete: volume.OnDeleteDelete,
		State: stateActive, Generation: 1, FirstPrefix: "base/v/", Created: testTime, Updated: testTime,
	}
}

func testReservation() record {
	return record{Version: 1, Driver: "d", Name: "base", State: stateBase, Created: testTime, Updated: testTime}
}

func later(r record) record {
	r.Generation, r.VolumeID, r.PreviousVolumeID = 2, "default:bucket/other/v@2/", "default:bucket/base/v/"
	return r
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	for name, r := range map[string]record{
		"volume": testRecord(), "later generation": later(testRecord()), "reservation": testReservation(), "tombstone": testRecord().with(stateDeleted, testTime),
	} {
		data, err := r.encode()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		back, err := decodeRecord(data)
		if err != nil || !reflect.DeepEqual(back, r) {
			t.Errorf("%s: %+v, %v; want %+v", name, back, err, r)
		}
	}
}

func TestRecordsThatMakeNoSenseAreRefused(t *testing.T) {
	good, err := testRecord().encode()
	if err != nil {
		t.Fatal(err)
	}
	text := string(good)
	for name, bad := range map[string]string{
		"empty":              "",
		"not JSON":           "x",
		"null":               "null",
		"another version":    strings.Replace(text, `"version": 1`, `"version": 2`, 1),
		"no version":         strings.Replace(text, `"version": 1,`, ``, 1),
		"unknown field":      strings.Replace(text, `"version": 1,`, `"version": 1, "x": 1,`, 1),
		"two objects":        text + text,
		"too long":           text + strings.Repeat(" ", maxRecord),
		"not UTF-8":          strings.Replace(text, `"name": "v"`, "\"name\": \"\xff\"", 1),
		"no driver":          strings.Replace(text, `"driver": "d"`, `"driver": ""`, 1),
		"unknown state":      strings.Replace(text, `"active"`, `"sleeping"`, 1),
		"unknown onDelete":   strings.Replace(text, `"onDelete": "delete"`, `"onDelete": "maybe"`, 1),
		"no onDelete":        strings.Replace(text, `"onDelete": "delete",`, ``, 1),
		"another name":       strings.Replace(text, `"name": "v"`, `"name": "w"`, 1),
		"another generation": strings.Replace(text, `"generation": 1`, `"generation": 2`, 1),
		"bad id":             strings.Replace(text, `default:bucket/base/v/`, `default:bucket/../v/`, 1),
		"a bucket":           strings.Replace(text, `default:bucket/base/v/`, `default:bucket`, 1),
		"other first prefix": strings.Replace(text, `"firstPrefix": "base/v/"`, `"firstPrefix": "v/"`, 1),
		"a predecessor":      strings.Replace(text, `"created"`, `"previousVolumeID": "default:bucket/v/", "created"`, 1),
		"reservation + id":   strings.Replace(text, `"active"`, `"base"`, 1),
		"no time":            strings.Replace(text, `"2026-01-02T03:04:05.000000006Z"`, `"0001-01-01T00:00:00Z"`, 1),
	} {
		if bad == text {
			t.Fatalf("%s: the test changes nothing", name)
		}
		if r, err := decodeRecord([]byte(bad)); err == nil {
			t.Errorf("%s: read as %+v", name, r)
		}
	}
}

func FuzzRecord(f *testing.F) {
	for _, r := range []record{testRecord(), later(testRecord()), testReservation()} {
		data, err := r.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeRecord(data)
		if err != nil {
			return
		}
		again, err := r.encode()
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		if back, err := decodeRecord(again); err != nil || !back.Created.Equal(r.Created) || !back.Updated.Equal(r.Updated) || back.VolumeID != r.VolumeID || back.State != r.State {
			t.Fatalf("%+v became %+v, %v", r, back, err)
		}
		if r.State != stateBase {
			if segment, _, ok := mustID(t, r.VolumeID).NameSegment(); !ok || segment != volume.NameSegment(r.Name) {
				t.Fatalf("the id %q is not that of the name %q", r.VolumeID, r.Name)
			}
		}
	})
}

func mustID(t *testing.T, s string) volume.ID {
	t.Helper()
	id, err := volume.ParseID(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestWhatARecordMeansForACreation(t *testing.T) {
	p := &Provisioner{owner: owner{"d", "c"}}
	change := func(f func(*record)) record {
		r := testRecord()
		f(&r)
		return r
	}
	for name, tc := range map[string]struct {
		r    record
		next bool
		kind fault.Kind // Unknown: no error
	}{
		"the volume":             {r: testRecord()},
		"tombstone":              {r: testRecord().with(stateDeleted, testTime), next: true},
		"another's tombstone":    {r: change(func(r *record) { r.State, r.Cluster = stateDeleted, "x" }), next: true},
		"the last tombstone":     {r: change(func(r *record) { r.State, r.Generation = stateDeleted, volume.MaxGeneration }), kind: fault.Exhausted},
		"reservation":            {r: testReservation(), kind: fault.Exists},
		"another driver":         {r: change(func(r *record) { r.Driver = "x" }), kind: fault.Exists},
		"another cluster":        {r: change(func(r *record) { r.Cluster = "x" }), kind: fault.Exists},
		"another's deletion":     {r: change(func(r *record) { r.Cluster, r.State = "x", stateDeleting }), kind: fault.Exists},
		"a name of that segment": {r: change(func(r *record) { r.Name = "w" }), kind: fault.Exists},
		"being deleted":          {r: testRecord().with(stateDeleting, testTime), kind: fault.Busy},
		"other parameters":       {r: change(func(r *record) { r.ParametersDigest = "v1:01" }), kind: fault.Exists},
	} {
		next, err := p.decideCreate(tc.r, "v", "v1:00")
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
	pl := place{}
	for _, tc := range []struct {
		r    record
		base string
		bad  bool
	}{
		{testRecord(), "base/v/", true},
		{testRecord(), "base/v/x/", true},
		{testRecord(), "v/", false},
		{testRecord(), "other/base/v/", false},
		{testRecord(), "base/vv/", false},
		{testRecord().with(stateDeleting, testTime), "base/v/", true},
		{testRecord().with(stateDeleted, testTime), "base/v/", true},
		{later(testRecord()), "base/v/", true},
		{later(testRecord()), "other/v/", false},
		{testReservation(), "base/v/", false},
	} {
		if err := aroundBase(tc.r, tc.base, pl); fault.Is(err, fault.Precondition) != tc.bad || (err != nil) != tc.bad {
			t.Errorf("%s %s, base %s: %v", tc.r.State, tc.r.VolumeID, tc.base, err)
		}
	}
}

func TestLateRetriesAreRecognised(t *testing.T) {
	third := later(testRecord())
	third.Generation, third.VolumeID, third.PreviousVolumeID = 3, "default:bucket/v@3/", "default:bucket/other/v@2/"
	for id, want := range map[string]bool{
		"default:bucket/base/v/": true, "default:bucket/other/v@2/": true, "default:bucket/v@3/": false, "default:bucket/v/": false, "default:bucket/v@2/": false,
	} {
		if got := third.outlived(mustID(t, id)); got != want {
			t.Errorf("%s: %t", id, got)
		}
	}
	if testRecord().outlived(mustID(t, "default:bucket/base/v/")) {
		t.Error("a first generation has outlived itself")
	}
}
