// Package inventory shows which volumes and snapshots a controller's records and tags tell of, and which of them look orphaned. It changes
// nothing.
package inventory

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/provision/list"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/table"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Version is the version of Document. Fields may be added to a version.
const Version = "v1"

// stuck is after how long a volume or a snapshot should not be in a state any more that ends by itself.
const stuck = time.Hour

// Document is what a controller's records tell of. Nothing in it is secret.
type Document struct {
	Version string    `json:"version"`
	Owner   Owner     `json:"owner"` // whose records are this controller's
	Time    time.Time `json:"time"`
	Volumes []Volume  `json:"volumes"`
	// Snapshots are those that are not ready, or that are of no volume in Volumes. Volume.Snapshots counts the others.
	Snapshots []Snapshot `json:"snapshots,omitempty"`
	// Unread are the backends and buckets that could not be read.
	Unread []Unread `json:"unread,omitempty"`
}

// Owner identifies a driver in a cluster.
type Owner struct {
	Driver  string `json:"driver"`
	Cluster string `json:"cluster,omitempty"`
}

// Volume is a volume, by its record or its bucket's tags.
type Volume struct {
	ID            string    `json:"id,omitempty"` // "": the record cannot be read, or reserves a name
	Name          string    `json:"name,omitempty"`
	Backend       string    `json:"backend"`
	Bucket        string    `json:"bucket"`
	Prefix        string    `json:"prefix,omitempty"` // "": the volume is the bucket
	Record        string    `json:"record,omitempty"` // key of the record; "": the bucket's tags
	Owner         Owner     `json:"owner"`
	Own           bool      `json:"own"`   // it is this controller's
	State         string    `json:"state"` // active, filling, deleting, deleted, base, or unreadable
	OnDelete      string    `json:"onDelete,omitempty"`
	CapacityBytes int64     `json:"capacityBytes,omitempty"` // the size that was asked for
	Source        string    `json:"source,omitempty"`        // the volume or the snapshot that it was created from
	Created       time.Time `json:"created,omitzero"`
	Updated       time.Time `json:"updated,omitzero"`
	Snapshots     int       `json:"snapshots,omitempty"` // that are ready
	// Problem is why the volume looks orphaned or stuck; "": it does not.
	Problem string `json:"problem,omitempty"`
}

// Snapshot is a snapshot, by its record.
type Snapshot struct {
	ID      string    `json:"id,omitempty"`
	Name    string    `json:"name,omitempty"`
	Backend string    `json:"backend"`
	Bucket  string    `json:"bucket"`
	Record  string    `json:"record"`
	Owner   Owner     `json:"owner"`
	Own     bool      `json:"own"`
	State   string    `json:"state"` // cutting, copying, ready, deleting, deleted, or unreadable
	Source  string    `json:"source,omitempty"`
	Bytes   int64     `json:"bytes,omitempty"`
	Changed int64     `json:"changed,omitempty"` // objects that changed or were deleted while it was made
	Created time.Time `json:"created,omitzero"`
	Updated time.Time `json:"updated,omitzero"`
	Problem string    `json:"problem,omitempty"`
}

// Unread is what could not be read, and why.
type Unread struct {
	Backend string `json:"backend"`
	Bucket  string `json:"bucket,omitempty"` // "": all of the backend
	Error   string `json:"error"`
}

// unreadable is the state of a record that cannot be read.
const unreadable = "unreadable"

// Found is what a controller found.
type Found struct {
	Owner   records.Owner // whose records are the controller's
	Entries []list.Entry
	Unread  []list.Unread
	Time    time.Time
}

// New returns the document of what was found. Tombstones and reservations are left out unless all is set.
func New(f Found, all bool) Document {
	d := Document{Version: Version, Owner: Owner(f.Owner), Time: f.Time.UTC(), Volumes: []Volume{}}
	ready := map[string]int{}
	volumes := map[string]bool{}
	for _, e := range f.Entries {
		switch {
		case e.Kind == list.KindSnapshot && e.State == records.StateReady:
			ready[e.Source]++
		case e.Kind == list.KindVolume && e.State != records.StateDeleted && !e.Misplaced():
			volumes[e.ID] = true
		}
	}
	for _, e := range f.Entries {
		ended := e.Err == nil && (e.State == records.StateDeleted || e.Kind == list.KindReservation)
		switch {
		case ended && !all:
		case e.Kind != list.KindSnapshot:
			d.Volumes = append(d.Volumes, f.volumeOf(e, ready[e.ID]))
		case all || e.State != records.StateReady || !volumes[e.Source]:
			d.Snapshots = append(d.Snapshots, f.snapshotOf(e))
		}
	}
	for _, u := range f.Unread {
		d.Unread = append(d.Unread, Unread{u.Backend, u.Bucket, u.Err.Error()})
	}
	return d
}

func (f Found) volumeOf(e list.Entry, snapshots int) Volume {
	v := Volume{
		ID: e.ID, Name: e.Name, Backend: e.Backend, Bucket: e.Bucket, Record: e.Key, Owner: Owner(e.Owner), Own: e.Err == nil && e.Owner == f.Owner,
		State: stateOf(e), OnDelete: e.OnDelete, CapacityBytes: e.Bytes, Source: e.Source, Created: e.Created, Updated: e.Updated, Snapshots: snapshots,
		Problem: f.problemOf(e),
	}
	if id, err := volume.ParseID(e.ID); err == nil {
		v.Prefix = id.Prefix
	}
	if v.Problem == "" && e.Misplaced() {
		v.Problem = "the record names a volume that is not in its bucket: it is a copy of a record, and proves nothing"
	}
	return v
}

func (f Found) snapshotOf(e list.Entry) Snapshot {
	return Snapshot{
		ID: e.ID, Name: e.Name, Backend: e.Backend, Bucket: e.Bucket, Record: e.Key, Owner: Owner(e.Owner), Own: e.Err == nil && e.Owner == f.Owner,
		State: stateOf(e), Source: e.Source, Bytes: e.Bytes, Changed: e.Changed, Created: e.Created, Updated: e.Updated, Problem: f.problemOf(e),
	}
}

func stateOf(e list.Entry) string {
	if e.Err != nil {
		return unreadable
	}
	return string(e.State)
}

// problemOf returns why something looks orphaned or stuck.
func (f Found) problemOf(e list.Entry) string {
	if e.Err != nil {
		return e.Err.Error()
	}
	if e.Failure != "" && e.State != records.StateDeleted {
		return "it could not be made: " + e.Failure
	}
	since := cmp.Or(e.Updated, e.Created)
	if since.IsZero() || f.Time.Sub(since) < stuck { // tags have no times
		return ""
	}
	took := table.Span(f.Time.Sub(since))
	switch e.State {
	case records.StateDeleting:
		return "its deletion has not finished for " + took + ": no controller works on it, or S3 refuses it; delete its PersistentVolume or " +
			"VolumeSnapshotContent again, or read the controller's log"
	case records.StateFilling:
		return "its content has not been complete for " + took + ": it is a large copy, or a creation that failed; read the events of its claim"
	case records.StateCutting, records.StateCopying:
		return "it has not been ready for " + took + ": it is a large copy, or a creation that failed; read the events of its VolumeSnapshot"
	}
	return ""
}

// Text writes the document for people: a line for each volume, and below it what is not well.
func (d Document) Text(w io.Writer) error {
	volumes := table.New("VOLUME", "STATE", "OWNER", "SIZE", "AGE", "SNAPSHOTS", "ONDELETE")
	for _, v := range d.Volumes {
		volumes.Row(cmp.Or(v.ID, v.Backend+":"+v.Bucket+"/"+v.Record), v.State, v.Owner.text(v.Own), size(v.CapacityBytes), d.age(v.Created),
			fmt.Sprint(v.Snapshots), v.OnDelete)
		if v.Problem != "" {
			volumes.Note(v.Problem)
		}
	}
	snapshots := table.New("SNAPSHOT", "STATE", "OWNER", "SIZE", "AGE", "SOURCE")
	for _, s := range d.Snapshots {
		snapshots.Row(cmp.Or(s.ID, s.Backend+":"+s.Bucket+"/"+s.Record), s.State, s.Owner.text(s.Own), size(s.Bytes), d.age(s.Created), s.Source)
		if s.Problem != "" {
			snapshots.Note(s.Problem)
		}
		if s.Changed > 0 {
			snapshots.Note(fmt.Sprintf("objects that changed or were deleted while it was made: %d", s.Changed))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "driver %s, cluster %q, volumes: %d\n", d.Owner.Driver, d.Owner.Cluster, len(d.Volumes))
	if len(d.Volumes) > 0 {
		b.WriteString("\n" + volumes.String())
	}
	if len(d.Snapshots) > 0 {
		b.WriteString("\n" + snapshots.String())
	}
	for i, u := range d.Unread {
		if i == 0 {
			b.WriteString("\n")
		}
		what := "backend " + u.Backend
		if u.Bucket != "" {
			what += ", bucket " + u.Bucket
		}
		fmt.Fprintf(&b, "not read: %s: %s\n", what, u.Error)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (o Owner) text(own bool) string {
	switch {
	case own:
		return "this"
	case o.Cluster == "":
		return o.Driver
	}
	return o.Driver + "@" + o.Cluster
}

func (d Document) age(created time.Time) string {
	if created.IsZero() {
		return ""
	}
	return table.Span(d.Time.Sub(created))
}

func size(n int64) string {
	if n <= 0 {
		return ""
	}
	return table.Bytes(uint64(n))
}
