package records

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

var testTime = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

func testRecord() Record {
	return Record{
		Version: 1, Driver: "d", Cluster: "c", Name: "v", VolumeID: "default:bucket/base/v/", ParametersDigest: "v1:00", OnDelete: volume.OnDeleteDelete,
		CapacityBytes: 1 << 30, Usage: "6h0m0s", State: StateActive, Generation: 1, FirstPrefix: "base/v/", Created: testTime, Updated: testTime,
	}
}

func testReservation() Record {
	return Record{Version: 1, Driver: "d", Name: "base", State: StateReserved, Created: testTime, Updated: testTime}
}

func later(r Record) Record {
	r.Generation, r.VolumeID, r.PreviousVolumeID = 2, "default:bucket/other/v@2/", "default:bucket/base/v/"
	return r
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	for name, r := range map[string]Record{
		"volume": testRecord(), "later generation": later(testRecord()), "reservation": testReservation(), "tombstone": testRecord().With(StateDeleted,
			testTime), "of an earlier driver, without a size": func() Record { r := testRecord(); r.CapacityBytes = 0; return r }(),
	} {
		data, err := encode(r, r.check())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		back, err := decode(data)
		if err != nil || !reflect.DeepEqual(back, r) {
			t.Errorf("%s: %+v, %v; want %+v", name, back, err, r)
		}
	}
}

func TestRecordsThatMakeNoSenseAreRefused(t *testing.T) {
	good, err := encode(testRecord(), testRecord().check())
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
		"usage too often":    strings.Replace(text, `6h0m0s`, `1s`, 1),
		"negative size":      strings.Replace(text, `1073741824`, `-1`, 1),
		"a predecessor":      strings.Replace(text, `"created"`, `"previousVolumeID": "default:bucket/v/", "created"`, 1),
		"reservation + id":   strings.Replace(text, `"active"`, `"base"`, 1),
		"no time":            strings.Replace(text, `"2026-01-02T03:04:05.000000006Z"`, `"0001-01-01T00:00:00Z"`, 1),
	} {
		if bad == text {
			t.Fatalf("%s: the test changes nothing", name)
		}
		if r, err := decode([]byte(bad)); err == nil {
			t.Errorf("%s: read as %+v", name, r)
		}
	}
}

func FuzzRecord(f *testing.F) {
	for _, r := range []Record{testRecord(), later(testRecord()), testReservation()} {
		data, err := encode(r, r.check())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decode(data)
		if err != nil {
			return
		}
		again, err := encode(r, r.check())
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		if back, err := decode(again); err != nil || !back.Created.Equal(r.Created) || !back.Updated.Equal(r.Updated) ||
			back.VolumeID != r.VolumeID || back.State != r.State {
			t.Fatalf("%+v became %+v, %v", r, back, err)
		}
		if r.State != StateReserved {
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

func TestLateRetriesAreRecognised(t *testing.T) {
	third := later(testRecord())
	third.Generation, third.VolumeID, third.PreviousVolumeID = 3, "default:bucket/v@3/", "default:bucket/other/v@2/"
	for id, want := range map[string]bool{
		"default:bucket/base/v/": true, "default:bucket/other/v@2/": true, "default:bucket/v@3/": false, "default:bucket/v/": false, "default:bucket/v@2/": false,
	} {
		if got := third.Outlived(mustID(t, id)); got != want {
			t.Errorf("%s: %t", id, got)
		}
	}
	if testRecord().Outlived(mustID(t, "default:bucket/base/v/")) {
		t.Error("a first generation has outlived itself")
	}
}

func TestTagValuesFitEverywhere(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"v", "pvc-0123", "a b", "a{b}", "a|b", "größe", "grösse", strings.Repeat("x", 128), strings.Repeat("x", 200), " v", "v\n"} {
		v := tagValue(name)
		if len(v) > 128 || strings.ContainsFunc(v, func(r rune) bool { return !tagRune(r) || r == ' ' }) {
			t.Errorf("%q became %q", name, v)
		}
		if other, ok := seen[v]; ok {
			t.Errorf("%q and %q are both %q", other, name, v)
		}
		seen[v] = name
	}
}

func TestOwnersAreChecked(t *testing.T) {
	for _, o := range []Owner{{"", "c"}, {"a b", ""}, {"d", "c|d"}, {"d", "ä"}, {"d", strings.Repeat("c", 129)}} {
		if err := o.Check(); err == nil {
			t.Errorf("%q is an owner", o)
		}
	}
	if err := (Owner{"s3.csi.driver", ""}).Check(); err != nil {
		t.Error(err)
	}
}
