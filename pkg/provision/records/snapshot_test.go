package records

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func testSnapshot() Snapshot {
	return Snapshot{
		Version: 1, Driver: "d", Cluster: "c", Name: "s", SnapshotID: "default:bucket/s@1", Source: "default:bucket/v/", ParametersDigest: "v1:00",
		Consistency: volume.SnapshotObject,
		OnDelete:    volume.OnDeleteDelete, State: StateReady, Generation: 1, Objects: 3, Bytes: 4, Created: testTime, Finished: testTime, Updated: testTime,
	}
}

func TestSnapshotRecordsAreReadAsTheyWereWritten(t *testing.T) {
	for _, state := range []State{StateCutting, StateCopying, StateReady, StateDeleting, StateDeleted} {
		s := testSnapshot().With(state, testTime)
		if state != StateReady {
			s.Finished = Snapshot{}.Finished
		}
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decodeSnapshot(data); err != nil || !reflect.DeepEqual(back, s) {
			t.Errorf("%s: %+v, %v; want %+v", state, back, err, s)
		}
	}
}

func TestSnapshotRecordsThatMakeNoSenseAreRefused(t *testing.T) {
	good, err := json.Marshal(testSnapshot())
	if err != nil {
		t.Fatal(err)
	}
	text := string(good)
	for name, change := range map[string][2]string{
		"another version":    {`"version":1`, `"version":2`},
		"unknown field":      {`"version":1`, `"version":1,"x":1`},
		"no driver":          {`"driver":"d"`, `"driver":""`},
		"unknown state":      {`"ready"`, `"active"`},
		"unknown onDelete":   {`"onDelete":"delete"`, `"onDelete":"requireEmpty"`},
		"another name":       {`"name":"s"`, `"name":"t"`},
		"another generation": {`"generation":1`, `"generation":2`},
		"a volume's id":      {`default:bucket/s@1`, `default:bucket/s/`},
		"no source":          {`"source":"default:bucket/v/"`, `"source":""`},
		"negative":           {`"bytes":4`, `"bytes":-4`},
		"not finished":       {`"finished":"2026-01-02T03:04:05.000000006Z",`, ``},
	} {
		bad := strings.Replace(text, change[0], change[1], 1)
		if bad == text {
			t.Fatalf("%s: the test changes nothing", name)
		}
		if s, err := decodeSnapshot([]byte(bad)); err == nil {
			t.Errorf("%s: read as %+v", name, s)
		}
	}
}

func TestAVolumeWithContentIsFilledFirst(t *testing.T) {
	p := volume.Parameters{Backend: "default", BucketName: "bucket", Mutable: volume.Mutable{OnDelete: volume.OnDeleteDelete}}
	id := p.ID("v", 1)
	s := NewStore(Owner{"d", "c"}, nil, func() time.Time { return testTime })
	if r := s.New("v", id, p); r.State != StateActive || r.ContentSource != "" {
		t.Errorf("%+v", r)
	}
	p.Content.Volume = volume.ID{Backend: "default", Bucket: "bucket", Prefix: "w/"}
	r := s.New("v", id, p)
	if r.State != StateFilling || r.ContentSource != "volume default:bucket/w/" || r.check() != nil {
		t.Errorf("%+v, %v", r, r.check())
	}
	r.ContentSource = ""
	if r.check() == nil {
		t.Error("a volume is filled from nothing")
	}
	if tags := s.NewTags("v", id, p); tags[TagState] != string(StateFilling) {
		t.Errorf("%v", tags)
	}
}
