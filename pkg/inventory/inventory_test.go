package inventory

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/provision/list"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
)

const all = true

var (
	now   = time.Date(2027, 3, 1, 12, 0, 0, 0, time.UTC)
	owner = records.Owner{Driver: "s3.csi.driver", Cluster: "prod"}
)

func entry(kind list.Kind, name string, state records.State, age time.Duration) list.Entry {
	e := list.Entry{
		Kind: kind, Backend: "default", Bucket: "data", Key: ".s3-csi/volumes/" + name, ID: "default:data/" + name + "/", Name: name, Owner: owner, State: state,
		OnDelete: "delete", Bytes: 5 << 30, Created: now.Add(-age), Updated: now.Add(-age),
	}
	if kind == list.KindSnapshot {
		e.ID, e.Source = "default:data/.s3-csi/snapshots/"+name, "default:data/well/"
	}
	return e
}

func TestInventory_ShowsOrphans(t *testing.T) {
	foreign, misplaced := entry(list.KindVolume, "foreign", records.StateActive, time.Hour), entry(list.KindVolume, "copied", records.StateActive, time.Hour)
	broken := entry(list.KindVolume, "broken", "", 0)
	foreign.Owner.Cluster = "other"
	misplaced.ID = "default:elsewhere/copied/"
	broken.ID, broken.Err = "", errors.New("not a record")
	failed := entry(list.KindSnapshot, "failed", records.StateDeleting, time.Minute)
	failed.Failure = "too many objects"
	of := entry(list.KindSnapshot, "of-gone", records.StateReady, time.Minute)
	of.Source, of.Changed = "default:data/gone/", 7
	bucket := list.Entry{Kind: list.KindVolume, Backend: "default", Bucket: "own", ID: "default:own", Owner: owner, State: records.StateDeleting}
	d := New(Found{Owner: owner, Time: now, Entries: []list.Entry{
		entry(list.KindVolume, "well", records.StateActive, 48*time.Hour), foreign, misplaced, broken, bucket,
		entry(list.KindVolume, "deleting", records.StateDeleting, 59*time.Minute), entry(list.KindVolume, "stuck", records.StateDeleting, 61*time.Minute),
		entry(list.KindVolume, "filling", records.StateFilling, 59*time.Minute), entry(list.KindVolume, "unfilled", records.StateFilling, 61*time.Minute),
		entry(list.KindVolume, "gone", records.StateDeleted, 48*time.Hour), entry(list.KindReservation, "base", records.StateReserved, 0),
		entry(list.KindSnapshot, "s1", records.StateReady, time.Hour), entry(list.KindSnapshot, "s2", records.StateReady, time.Hour),
		failed, of, entry(list.KindSnapshot, "copying", records.StateCopying, 61*time.Minute),
	}, Unread: []list.Unread{{Backend: "lab", Err: errors.New("denied")}}}, !all)

	problems := map[string]bool{
		"well": false, "foreign": false, "copied": true, "broken": true, "": false, "deleting": false, "stuck": true, "filling": false, "unfilled": true,
	}
	for _, v := range d.Volumes {
		want, known := problems[v.Name]
		if !known || (v.Problem != "") != want {
			t.Errorf("%+v", v)
		}
		delete(problems, v.Name)
		if v.Own != (v.Name != "foreign" && v.Name != "broken") {
			t.Errorf("owner: %+v", v)
		}
		if v.Name == "well" && (v.Snapshots != 2 || v.Prefix != "well/" || v.CapacityBytes != 5<<30) {
			t.Errorf("%+v", v)
		}
		if v.Name == "broken" && v.State != unreadable {
			t.Errorf("%+v", v)
		}
	}
	if len(problems) > 0 {
		t.Errorf("not shown: %v", problems)
	}
	var snapshots []string
	for _, s := range d.Snapshots {
		snapshots = append(snapshots, s.Name)
		if (s.Problem == "" && s.Changed == 7) != (s.Name == "of-gone") {
			t.Errorf("%+v", s)
		}
	}
	if got := strings.Join(snapshots, " "); got != "failed of-gone copying" {
		t.Errorf("snapshots: %s", got)
	}

	var b bytes.Buffer
	if err := d.Text(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"default:data/well/", "5.0GiB", "2d00h", "s3.csi.driver@other", "too many objects", "while it was made: 7",
		"not read: backend lab: denied"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the text does not have %q:\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "default:data/gone/  deleted") {
		t.Errorf("a tombstone is shown:\n%s", b.String())
	}
}

func TestInventory_AllShowsTombstonesAndReservations(t *testing.T) {
	d := New(Found{Owner: owner, Time: now, Entries: []list.Entry{
		entry(list.KindVolume, "gone", records.StateDeleted, 48*time.Hour), entry(list.KindReservation, "base", records.StateReserved, 48*time.Hour),
		entry(list.KindVolume, "well", records.StateActive, 0), entry(list.KindSnapshot, "s1", records.StateReady, time.Hour),
	}}, all)
	if len(d.Volumes) != 3 || len(d.Snapshots) != 1 {
		t.Errorf("%+v", d)
	}
	for _, v := range d.Volumes {
		if v.Problem != "" {
			t.Errorf("%+v", v)
		}
	}
}
