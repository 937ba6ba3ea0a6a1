package provision_test

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// entry is what a record, or the tags of a bucket, said from a change of the service on.
type entry struct {
	seq      int
	id       string // of the volume or snapshot; "": there is no record
	state    records.State
	digest   string // of the parameters, and the source of a snapshot
	onDelete volume.OnDelete
	capacity int64
	claims   []string
	cut      time.Time
}

// is reports whether the entry is of that volume or snapshot, in one of the states.
func (e entry) is(id string, states ...records.State) bool {
	return e.id == id && slices.Contains(states, e.state)
}

// oracle knows what happened at the service, and what may happen there.
type oracle struct {
	*world
	past     map[string][]entry           // by place: "bucket/key of the record", or the bucket that is a volume
	contents map[string]volume.Parameters // of the volumes that were asked for, by digest
	sources  map[string]volume.ID         // of the snapshots that were asked for, by digest
	asked    map[string]bool              // volumes and snapshots whose deletion was asked for
	erased   map[string]bool              // snapshots from which something was erased
	archived bool                         // an object was archived
	owners   map[string]*process          // of claims
}

func newOracle(w *world) *oracle {
	o := &oracle{
		world: w, past: map[string][]entry{}, contents: map[string]volume.Parameters{}, sources: map[string]volume.ID{},
		asked: map[string]bool{}, erased: map[string]bool{}, owners: map[string]*process{},
	}
	w.s.object, w.s.tags = o.object, o.tags
	return o
}

// place returns where the record of the volume is.
func place(id volume.ID) string {
	if id.Prefix == "" {
		return id.Bucket
	}
	segment, _, _ := id.NameSegment()
	return id.Bucket + "/" + records.Key(segment)
}

func snapshotPlace(id volume.SnapshotID) string {
	return id.Bucket + "/" + records.SnapshotKey(id.Segment)
}

func (o *oracle) now(place string) entry {
	if list := o.past[place]; len(list) > 0 {
		return list[len(list)-1]
	}
	return entry{}
}

// during returns what was said at a place between two changes.
func (o *oracle) during(place string, from, to int) []entry {
	at := []entry{{}}
	for _, e := range o.past[place] {
		if e.seq <= from {
			at = at[:0]
		}
		if e.seq <= to {
			at = append(at, e)
		}
	}
	return at
}

func (o *oracle) tags(bucket string) {
	if !o.own(bucket) {
		return
	}
	e := entry{seq: o.s.seq}
	if b := o.s.buckets[bucket]; b != nil {
		t := records.Tags(b.tags)
		e = entry{
			seq: o.s.seq, id: t[records.TagVolume], state: records.State(t[records.TagState]), digest: t[records.TagParameters],
			onDelete: volume.OnDelete(t[records.TagOnDelete]), capacity: t.Capacity(), claims: t.Fillers(),
		}
	}
	o.add(bucket, e)
}

// object is called for each change of a key.
func (o *oracle) object(bucket, key string) {
	current, there := o.s.buckets[bucket].get(key)
	segment, volumes := strings.CutPrefix(key, records.Key(""))
	if snapshot, ok := strings.CutPrefix(key, volume.SnapshotsPrefix); ok && !volumes {
		segment = snapshot
	}
	switch {
	case segment == key || strings.Contains(segment, "/"):
		if o.s.by != nil {
			o.touched(bucket, key, there)
		}
	case !there:
		o.fail("the record %s/%s was deleted", bucket, key)
	case volumes:
		var r records.Record
		if err := json.Unmarshal([]byte(current.body), &r); err != nil {
			o.fail("the record %s/%s: %v", bucket, key, err)
		}
		o.add(bucket+"/"+key, entry{o.s.seq, r.VolumeID, r.State, r.ParametersDigest, r.OnDelete, r.CapacityBytes, r.Fillers, time.Time{}})
	default:
		var r records.Snapshot
		if err := json.Unmarshal([]byte(current.body), &r); err != nil {
			o.fail("the record %s/%s: %v", bucket, key, err)
		}
		o.add(bucket+"/"+key, entry{o.s.seq, r.SnapshotID, r.State, r.ParametersDigest + " " + r.Source, r.OnDelete, 0, r.Makers, r.Cut})
	}
}

// touched checks that a process may change a key that is no record.
func (o *oracle) touched(bucket, key string, written bool) {
	rest, reserved := strings.CutPrefix(key, volume.RecordPrefix+"/")
	element, inside, _ := strings.Cut(rest, "/")
	switch {
	case reserved && (element == "probe" || element == "fills"):
	case reserved && element == "snapshots":
		o.touchedSnapshot(bucket, key, inside, written)
	case o.own(bucket):
		o.touchedVolume(volume.ID{Backend: "lab", Bucket: bucket}, key, written)
	default:
		o.touchedVolume(volume.ID{Backend: "lab", Bucket: bucket, Prefix: topOf(key) + "/"}, key, written)
	}
}

// topOf returns the directory of the volume in which a key is.
func topOf(key string) string {
	top, _, _ := strings.Cut(key, "/")
	if inner, ok := strings.CutPrefix(key, base+"vol-"); ok {
		inner, _, _ = strings.Cut(inner, "/")
		top += "/vol-" + inner
	}
	return top
}

func (o *oracle) touchedVolume(id volume.ID, key string, written bool) {
	e := o.now(place(id))
	_, generation, named := id.NameSegment()
	if _, current, ok := idOf(e.id).NameSegment(); ok && named && generation < current {
		return // what is left of an earlier generation, which must be gone in the end
	}
	switch {
	case e.id != id.String():
		o.fail("process %d changed %s/%s, which belongs to no volume", o.s.by.n, id.Bucket, key)
	case e.state == records.StateActive:
		o.fail("process %d changed %s/%s of a volume that is in use", o.s.by.n, id.Bucket, key)
	case !written && e.state == records.StateDeleting && (e.onDelete == volume.OnDeleteRetain || e.onDelete == volume.OnDeleteRequireEmpty):
		o.fail("process %d deleted %s/%s of a volume with onDelete %s", o.s.by.n, id.Bucket, key, e.onDelete)
	}
}

func idOf(s string) volume.ID {
	id, _ := volume.ParseID(s)
	return id
}

func (o *oracle) touchedSnapshot(bucket, key, inside string, written bool) {
	element, kind, _ := strings.Cut(inside, "/")
	id, err := volume.ParseSnapshotID("lab:" + bucket + "/" + element)
	if err != nil {
		o.fail("process %d changed %s/%s, which belongs to no snapshot: %v", o.s.by.n, bucket, key, err)
		return
	}
	kind, user, _ := strings.Cut(kind, "/")
	e := o.now(snapshotPlace(id))
	switch {
	case kind == "users":
		v := o.now(bucket + "/" + records.Key(strings.Split(user, "@")[0]))
		if !written && o.isSnapshot(v, id) && !o.asked[v.id] && strings.HasSuffix(id.User(idOf(v.id)), "/"+user) {
			o.fail("process %d removed %s, and the volume is in use", o.s.by.n, key)
		}
	case kind != "plan" && e.is(id.String(), records.StateReady):
		o.fail("process %d changed %s/%s of a snapshot that is ready", o.s.by.n, bucket, key)
	case !written && e.id == id.String() && e.state == records.StateDeleting:
		o.erased[id.String()] = true
		for at, list := range o.past {
			if v := list[len(list)-1]; strings.HasPrefix(at, bucket+"/") && o.isSnapshot(v, id) {
				o.fail("process %d deleted %s/%s of snapshot %s, which volume %s is", o.s.by.n, bucket, key, id, v.id)
			}
		}
	}
}

// isSnapshot reports whether a volume in use is the snapshot itself.
func (o *oracle) isSnapshot(v entry, id volume.SnapshotID) bool {
	p := o.contents[v.digest]
	return v.state == records.StateActive && p.Node.Snapshot != "" && p.Content.Snapshot == id
}

// add checks the step from one entry to the next.
func (o *oracle) add(at string, e entry) {
	old := o.now(at)
	o.past[at] = append(o.past[at], e)
	debug("%6d %s: %s %s %v", e.seq, at, e.id, e.state, e.claims)
	if o.s.by == nil {
		return
	}
	if n := len(e.claims); n > 0 && o.owners[e.claims[n-1]] == nil {
		o.owners[e.claims[n-1]] = o.s.by
	}
	ready := e.state == records.StateActive || e.state == records.StateReady
	inUse := old.state == records.StateActive || old.state == records.StateReady
	step := func(why string) {
		o.fail("process %d: %s: from %s %s to %s %s: %s", o.s.by.n, at, old.id, old.state, e.id, e.state, why)
	}
	switch {
	case old.state == records.StateReserved:
		step("a directory of a base prefix became a volume")
	case e.state == records.StateReserved:
	case e.id == "" && old.state != records.StateDeleting:
		step("the bucket of a volume was removed that was not being deleted")
	case e.id == "":
	case old.id != e.id:
		if old.id != "" && old.state != records.StateDeleted {
			step("it was replaced before it was deleted")
		}
	case e.capacity < old.capacity:
		step("a volume does not shrink")
	case inUse && !ready && !o.asked[e.id]:
		step("no call asked for the deletion")
	case inUse && e.state != old.state && e.state != records.StateDeleting && (e.state != records.StateDeleted || e.onDelete != volume.OnDeleteRetain):
		step("a step that there is not")
	case old.state == records.StateDeleting && e.state == records.StateActive && e.onDelete == volume.OnDeleteRequireEmpty:
	case old.state == records.StateDeleted, old.state == records.StateDeleting && e.state != records.StateDeleting && e.state != records.StateDeleted:
		step("a step that there is not")
	case ready && !inUse:
		if n := len(old.claims); n > 0 && o.owners[old.claims[n-1]] != o.s.by {
			step("another process was at work")
		}
		o.complete(at, old, e)
	}
	if e.state == records.StateDeleted && e.onDelete != volume.OnDeleteRetain {
		o.empty(at, e)
	}
	if (ready || e.state == records.StateDeleted) && len(e.claims) > 0 {
		step("claims are left")
	}
}

// empty checks that nothing is left of a volume or snapshot that is deleted.
func (o *oracle) empty(at string, e entry) {
	bucket, _, _ := strings.Cut(at, "/")
	prefixes := []string{idOf(e.id).Prefix, idOf(e.id).FillManifest()}
	if id, err := volume.ParseSnapshotID(e.id); err == nil {
		prefixes = []string{id.Prefix()}
	}
	for _, prefix := range prefixes {
		if left := o.left(bucket, prefix); len(left) > 0 {
			o.fail("%s was deleted, and there is %q", e.id, left)
		}
		for key := range o.s.buckets[bucket].objects {
			if e.onDelete == volume.OnDeletePurge && strings.HasPrefix(key, prefix) {
				o.fail("%s was purged, and there are versions of %q", e.id, key)
			}
		}
	}
}

// left returns the objects and unfinished uploads below a prefix.
func (o *oracle) left(bucket, prefix string) []string {
	b := o.s.buckets[bucket]
	left := b.below(prefix)
	for id, u := range b.uploads {
		if strings.HasPrefix(u.key, prefix) {
			left = append(left, "upload "+id+" of "+u.key)
		}
	}
	return left
}

// complete checks that the content of a volume or snapshot that becomes ready is that of its source.
func (o *oracle) complete(at string, old, e entry) {
	bucket, _, _ := strings.Cut(at, "/")
	var from, to string // "bucket/prefix"
	if id, err := volume.ParseSnapshotID(e.id); err == nil {
		source := o.sources[e.digest]
		from, to = source.Bucket+"/"+source.Prefix, bucket+"/"+id.Data()
	} else if p := o.contents[e.digest]; p.Node.Snapshot != "" {
		if o.erased[p.Content.Snapshot.String()] {
			o.fail("volume %s is snapshot %s, from which something was erased", e.id, p.Content.Snapshot)
		}
		return
	} else if id := p.Content.Snapshot; id != (volume.SnapshotID{}) {
		from, to = id.Bucket+"/"+id.Data(), bucket+"/"+idOf(e.id).Prefix
	} else if id := p.Content.Volume; id != (volume.ID{}) {
		from, to = id.Bucket+"/"+id.Prefix, bucket+"/"+idOf(e.id).Prefix
	} else {
		if old.id == e.id && old.state != records.StateActive {
			o.fail("%s: volume %s without content was %s", at, e.id, old.state)
		}
		return
	}
	since := e.seq
	for _, before := range slices.Backward(o.past[at]) {
		if before.id != e.id {
			break
		}
		since = before.seq
	}
	for path := range o.s.past {
		key, below := strings.CutPrefix(path, from)
		if !below || key == "" || strings.HasPrefix(key, volume.RecordPrefix) {
			continue
		}
		have := o.etag(to+key, e.seq)
		during := []string{o.etag(path, since)}
		for _, p := range o.s.past[path] {
			if p.seq > since && p.seq <= e.seq {
				during = append(during, p.etag)
			}
		}
		if !e.cut.IsZero() { // as of one time
			during = []string{""}
			for _, p := range o.s.past[path] {
				if !p.at.After(e.cut) {
					during[0] = p.etag
				}
			}
		}
		if !slices.Contains(during, have) {
			o.fail("%s is %s, and its %q is %q; that of the source was %q since the copy began", e.id, e.state, key, have, during)
		}
	}
	for path := range o.s.past {
		key, below := strings.CutPrefix(path, to)
		if below && key != "" && !strings.HasPrefix(key, volume.RecordPrefix) && o.etag(path, e.seq) != "" && o.s.past[from+key] == nil {
			o.fail("%s is %s, and its %q is not in the source", e.id, e.state, key)
		}
	}
	if uploads := o.left(bucket, strings.TrimPrefix(to, bucket+"/")); slices.ContainsFunc(uploads, func(s string) bool { return strings.HasPrefix(s, "upload") }) {
		o.fail("%s is %s, and there are uploads: %q", e.id, e.state, uploads)
	}
}

// etag returns the ETag of an object after a change; "": there was none.
func (o *oracle) etag(path string, seq int) (etag string) {
	for _, p := range o.s.past[path] {
		if p.seq <= seq {
			etag = p.etag
		}
	}
	return etag
}
