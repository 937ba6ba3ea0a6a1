package provision_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	processes = 3
	names     = 2
	// shared is the bucket of prefix volumes and their snapshots, snaps that of other snapshots.
	shared, snaps = "shared", "snapshots"
	// base is the base prefix of some volumes.
	base = "vol-0/"
	// threshold is the size from which objects are copied in parts.
	threshold = 16
)

// history is what happens to a world.
type history struct {
	Copies   conditions
	PageSize int
	Versions bool
	Steps    []step
}

// step is a command, after which some requests are carried out.
type step struct {
	Do       command
	On       int // the process
	Name     int // of the volume or snapshot that is created
	Class    int // what is created
	Of       int // which of the volumes and snapshots that were created is the object
	Requests int // how many requests are carried out afterwards
	Of1      int // 0: of all processes; otherwise of one process, while the others are suspended
	Order    int // 0: the oldest request first; otherwise the seed of an order
	Then     trouble
}

type command int

const (
	nothing command = iota
	create
	clone
	restore
	restoreDirect
	remove
	expand
	modify
	snap
	removeSnap
	list
	write
	unlink
	archive
)

type trouble int

const (
	none        trouble = iota
	loseAnswer          // a request is carried out, and the connection is cut
	loseRequest         // the connection is cut before that
	killAfter           // a process is killed after a request of it was carried out
	killNow             // a process is killed, and its requests may still be carried out
	slow                // requests take long
	slower              // and longer than their clients wait
	throttled           // a request is refused
)

var verbose = flag.Bool("model.v", false, "print each request of the model")

func debug(format string, args ...any) {
	if *verbose {
		fmt.Printf(format+"\n", args...)
	}
}

// play plays a history in a world of its own.
func play(t *testing.T, h history) (failure error) {
	synctest.Test(t, func(*testing.T) {
		w := newWorld()
		m := &model{oracle: newOracle(w), creations: map[string]*creation{}, deletions: map[string]*deletion{}, told: map[string]bool{}}
		defer func() { w.close(); failure = w.failure }()
		m.furnish(h)
		for _, s := range h.Steps {
			debug("%+v", s)
			if m.step(s); w.failure != nil {
				return
			}
		}
		m.finish()
	})
	return failure
}

// model is what an orchestrator knows.
type model struct {
	*oracle
	creations map[string]*creation // of volumes and snapshots, by what was asked for
	deletions map[string]*deletion // by id
	volumes   []volume.ID          // that calls have returned
	snapshots []volume.SnapshotID
	told      map[string]bool // their ids
	serial    int
	untouched map[string]string // the neighbours
}

// creation is a volume or snapshot that was asked for.
type creation struct {
	ask   func(*process) *call
	first int  // the change of the service before the first call
	base  bool // below the base prefix
	open  bool // the orchestrator asks again
}

type deletion struct {
	ask           func(*process) *call
	open, refused bool
}

func (m *model) furnish(h history) {
	m.s.copies, m.s.pageSize = h.Copies, h.PageSize
	for _, name := range []string{shared, snaps, "other"} {
		m.s.make(name, nil).versioned = h.Versions && name == shared
	}
	for _, key := range []string{"vol-0", "vol-0x/file", "vol-1/../file", "zz/vol-0/file", ".s3-csi", ".s3-csi-not/file"} {
		if !strings.HasPrefix(key, "vol-1/") {
			m.s.put(shared, key, "neighbour")
		}
	}
	m.s.put("other", "vol-0/file", "neighbour")
	m.untouched = map[string]string{}
	for path := range m.s.past {
		m.untouched[path] = m.etag(path, m.s.seq)
	}
}

func (m *model) step(s step) {
	m.settle()
	m.do(s)
	m.settle()
	if s.Of1 > 0 {
		m.suspend(s.Of1 - 1)
	}
	pick := uint32(s.Order)
	choose := func() *request {
		candidates := slices.DeleteFunc(m.requests(), func(r *request) bool { return s.Of1 > 0 && r.p.n != s.Of1-1 })
		if len(candidates) == 0 {
			return nil
		}
		if s.Order == 0 {
			return candidates[0]
		}
		pick = pick*1664525 + 1013904223
		return candidates[int(pick>>16)%len(candidates)]
	}
	for n := 0; n < s.Requests && m.failure == nil; {
		r := choose()
		if r == nil {
			if !m.await(slice) {
				break
			}
			continue
		}
		m.carryOut(r, nil)
		m.settle()
		n++
	}
	r := choose()
	if m.resume(); s.Then == none || m.failure != nil {
		return
	}
	cut := &smithyhttp.RequestSendError{Err: errCut}
	switch {
	case s.Then == slow:
		m.sleep(20 * time.Second)
	case s.Then == slower:
		m.sleep(time.Minute)
	case s.Then == killNow && m.processes[s.On] != nil:
		m.kill(m.processes[s.On])
	case r == nil || r.gone.Load():
	case s.Then == loseAnswer:
		m.carryOut(r, cut)
	case s.Then == loseRequest:
		m.refuse(r, cut)
	case s.Then == killAfter && m.processes[r.p.n] == r.p:
		m.carryOut(r, errKilled)
		m.kill(r.p)
	case s.Then == throttled:
		m.drop(r)
		r.answer <- reply{fails(503, "SlowDown").response(r.http), nil}
	}
	m.settle()
}

// patience is how long an orchestrator waits for an answer.
func (s step) patience() time.Duration { return []time.Duration{30, 5}[s.Class%2] * time.Second }

func (m *model) do(s step) {
	p := m.process(s.On)
	name := fmt.Sprint("vol-", s.Name)
	switch s.Do {
	case create:
		m.create(p, s, name, volume.Content{})
	case clone:
		if v, ok := at(m.volumes, s.Of); ok {
			m.create(p, s, name, volume.Content{Volume: v})
		}
	case restore, restoreDirect:
		if id, ok := at(m.snapshots, s.Of); ok {
			m.create(p, s, name, volume.Content{Snapshot: id})
		}
	case remove:
		if v, ok := at(m.volumes, s.Of); ok {
			m.remove(p, s, v)
		}
	case expand, modify:
		if v, ok := at(m.volumes, s.Of); ok {
			m.modify(p, s, v)
		}
	case snap:
		if v, ok := at(m.volumes, s.Of); ok {
			m.snap(p, s, fmt.Sprint("snap-", s.Name), v)
		}
	case removeSnap:
		if id, ok := at(m.snapshots, s.Of); ok {
			m.removeSnap(p, s, id)
		}
	case list:
		m.list(p)
	case write, unlink, archive:
		if v, ok := at(m.volumes, s.Of); ok && m.now(place(v)).is(v.String(), records.StateActive) {
			m.pod(s, v)
		}
	}
}

func at[T any](list []T, n int) (one T, ok bool) {
	if len(list) == 0 {
		return one, false
	}
	return list[len(list)-1-n%len(list)], true
}

// pod is what a pod does with a volume.
func (m *model) pod(s step, v volume.ID) {
	key := v.Prefix + []string{"a", "b", "dir/c", "d"}[s.Class%4]
	o, there := m.s.buckets[v.Bucket].get(key)
	m.serial++
	switch {
	case m.contents[m.now(place(v)).digest].Node.Snapshot != "": // it has no place of its own
	case s.Do == write:
		body := fmt.Sprint("content ", m.serial)
		if s.Name == 1 {
			body += strings.Repeat(" and more", 3)
		}
		m.s.put(v.Bucket, key, body)
	case there && s.Do == unlink:
		m.s.remove(v.Bucket, key, "")
	case there:
		o.archived, m.archived = !o.archived, true
		m.s.buckets[v.Bucket].objects[key][len(m.s.buckets[v.Bucket].objects[key])-1] = o
	}
}

// final reports whether an orchestrator does not ask again after an error.
func final(err error) bool {
	return fault.KindOf(err).Permanent() || fault.Is(err, fault.Unknown)
}

// classes is the number of kinds of volumes.
const classes = 9

// parameters are those of a class of volumes. The classes 3 to 5 and 7 have a bucket of their own. The base prefix of the last one is the name of a
// volume.
func (m *model) parameters(s step, name string, content volume.Content) (volume.Parameters, bool) {
	given := map[string]string{"backend": "lab", "onDelete": []string{"delete", "requireEmpty", "retain", "delete", "requireEmpty", "retain", "purge",
		"purge", "delete"}[s.Class]}
	if s.Class < 3 || s.Class == 6 {
		given["bucketName"] = shared
	}
	if s.Class == 8 {
		given["bucketName"], given["prefix"] = shared, base
	}
	if s.Do == restoreDirect {
		given["bucketName"], given["snapshotAccess"] = content.Snapshot.Bucket, "direct"
		if content.Snapshot.Bucket == snaps {
			return volume.Parameters{}, false
		}
	}
	p, err := volume.ParseParameters(given, name)
	if err != nil {
		panic(err)
	}
	p.Content = content
	if err := p.ApplyAccess(); err != nil {
		panic(err)
	}
	return p, content.Volume != p.ID(name, 1)
}

func (m *model) create(p *process, s step, name string, content volume.Content) {
	params, ok := m.parameters(s, name, content)
	if !ok {
		return
	}
	digest := params.Digest()
	m.contents[digest] = params
	c := m.creations[name+" "+digest]
	if c == nil {
		c = &creation{first: m.s.seq, base: s.Class == 8}
		m.creations[name+" "+digest] = c
		c.ask = func(p *process) *call { return m.ask(p, s, name, params, c) }
	}
	c.open = true
	c.ask(p)
}

func (m *model) ask(p *process, s step, name string, params volume.Parameters, of *creation) *call {
	var id volume.ID
	run := func(ctx context.Context) (err error) {
		id, err = p.Create(ctx, provision.CreateRequest{Name: name, Parameters: params})
		return err
	}
	where := place(params.ID(name, 1))
	what := fmt.Sprintf("creating %s on %s with onDelete %s and content %q", name, where, params.OnDelete, params.Content)
	return m.call(p, s.patience(), what, run, func(c *call) {
		digest := params.Digest()
		seen := m.during(where, c.from, c.to)
		m.judgeCreation(c, of, id.String(), func() bool {
			return slices.ContainsFunc(seen, func(e entry) bool { return e.is(id.String(), records.StateActive) && e.digest == digest })
		}, func() bool {
			return slices.ContainsFunc(seen, func(e entry) bool {
				return e.state == records.StateReserved || e.id != "" && (e.digest != digest && e.state != records.StateDeleted ||
					e.state == records.StateDeleted && params.BucketName == "")
			})
		}, params.Content)
		if c.killed || c.err != nil {
			return
		}
		if !m.told[id.String()] {
			m.told[id.String()] = true
			m.volumes = append(m.volumes, id)
		}
		if d := m.deletions[id.String()]; d != nil && !d.open && m.now(where).is(id.String(), records.StateActive) { // a bucket's name has no generations
			delete(m.deletions, id.String())
			delete(m.asked, id.String())
		}
	})
}

// judgeCreation checks the answer to the creation of a volume or a snapshot. made and taken report whether there was what was asked for, or
// something else of that name.
func (m *model) judgeCreation(c *call, of *creation, id string, made, taken func() bool, source volume.Content) {
	debug("%6d answer: %s by process %d: %s, %v, killed %t", m.s.seq, c.what, c.p.n, id, c.err, c.killed)
	kind := fault.KindOf(c.err)
	switch {
	case c.killed || c.err != nil && !final(c.err):
		of.open = true
		return
	case c.err == nil && !made():
		m.fail("%s: %s was returned, and was not there", c.what, id)
	case c.err == nil:
	case kind == fault.Exists && taken():
	case kind == fault.Precondition && of.base && slices.ContainsFunc(m.during(shared+"/"+records.Key(strings.Trim(base, "/")), 0, c.to),
		func(e entry) bool { return e.id != "" }):
	case kind == fault.NotFound && m.missing(source, of.first, c.to):
	case kind == fault.Precondition && m.archived && source != (volume.Content{}):
	default:
		m.fail("%s: process %d: no reason for this final error, of kind %s: %v", c.what, c.p.n, kind, c.err)
	}
	// A request of a process that was killed may create what this call did not find.
	of.open = c.err != nil && c.ghosts > 0
}

// missing reports whether a source was not there at some time.
func (m *model) missing(source volume.Content, from, to int) bool {
	at, id, state := place(source.Volume), source.Volume.String(), records.StateActive
	switch {
	case source == volume.Content{}:
		return false
	case source.Volume == volume.ID{}:
		at, id, state = snapshotPlace(source.Snapshot), source.Snapshot.String(), records.StateReady
	}
	return slices.ContainsFunc(m.during(at, from, to), func(e entry) bool { return !e.is(id, state) })
}

func (m *model) snap(p *process, s step, name string, source volume.ID) {
	given := map[string]string{"onDelete": []string{"delete", "retain"}[s.Class%2]}
	if source.Prefix == "" {
		given["bucketName"] = snaps
	} else if m.s.buckets[shared].versioned && s.Class >= 3 {
		given["consistency"] = volume.SnapshotTime
	}
	params, err := volume.ParseSnapshotParameters(given)
	if err != nil {
		panic(err)
	}
	digest := params.Digest() + " " + source.String()
	m.sources[digest] = source
	if m.contents[m.now(place(source)).digest].Node.Snapshot != "" {
		return // a volume that is a snapshot has no content of its own
	}
	key := fmt.Sprint(name, " ", digest, " ", params.ID(source, name, 1).Bucket)
	of := m.creations[key]
	if of == nil {
		of = &creation{first: m.s.seq}
		m.creations[key] = of
	}
	of.open = true
	of.ask = func(p *process) *call {
		var info provision.Snapshot
		run := func(ctx context.Context) (err error) {
			info, err = p.CreateSnapshot(ctx, provision.SnapshotRequest{Name: name, Source: source, Parameters: params})
			if err == nil && !info.Ready {
				err = fault.Errorf(fault.Busy, "not ready")
			}
			return err
		}
		where := snapshotPlace(params.ID(source, name, 1))
		return m.call(p, s.patience(), fmt.Sprintf("creating snapshot %s of %s", name, source), run, func(c *call) {
			seen := m.during(where, c.from, c.to)
			m.judgeCreation(c, of, info.ID.String(), func() bool {
				return slices.ContainsFunc(seen, func(e entry) bool { return e.is(info.ID.String(), records.StateReady) && e.digest == digest })
			}, func() bool {
				return slices.ContainsFunc(seen, func(e entry) bool { return e.id != "" && e.digest != digest && e.state != records.StateDeleted })
			}, volume.Content{Volume: source})
			if !c.killed && c.err == nil && !m.told[info.ID.String()] {
				m.told[info.ID.String()] = true
				m.snapshots = append(m.snapshots, info.ID)
			}
		})
	}
	of.ask(p)
}

func (m *model) remove(p *process, s step, v volume.ID) {
	if v.Prefix == "" {
		m.quiet() // a bucket's name has no generations
	}
	m.delete(p, s, v.String(), place(v), func(ctx context.Context, p *process) error {
		return p.Delete(ctx, provision.DeleteRequest{ID: v})
	}, func(e entry) bool { return e.onDelete == volume.OnDeleteRequireEmpty && m.wasUsed(v) })
}

// wasUsed reports whether anything but the driver's own test objects was ever in a volume.
func (m *model) wasUsed(v volume.ID) bool {
	for path := range m.s.past {
		if key, ok := strings.CutPrefix(path, v.Bucket+"/"); ok && strings.HasPrefix(key, v.Prefix) && !strings.HasPrefix(key, buckets.Probes) {
			return true
		}
	}
	return false
}

func (m *model) removeSnap(p *process, s step, id volume.SnapshotID) {
	m.delete(p, s, id.String(), snapshotPlace(id), func(ctx context.Context, p *process) error {
		return p.DeleteSnapshot(ctx, provision.DeleteSnapshotRequest{ID: id})
	}, func(entry) bool { return m.used(id) })
}

// used reports whether a volume could be the snapshot.
func (m *model) used(id volume.SnapshotID) bool {
	for _, params := range m.contents {
		if params.Node.Snapshot != "" && params.Content.Snapshot == id {
			return true
		}
	}
	return false
}

// delete deletes a volume or a snapshot. refusable reports whether the driver may refuse that.
func (m *model) delete(p *process, s step, id, where string, run func(context.Context, *process) error, refusable func(entry) bool) {
	d := m.deletions[id]
	if d == nil {
		d = &deletion{}
		m.deletions[id] = d
	}
	d.open, m.asked[id] = true, true
	d.ask = func(p *process) *call {
		return m.call(p, s.patience(), "deleting "+id, func(ctx context.Context) error { return run(ctx, p) }, func(c *call) {
			debug("%6d answer: %s by process %d: %v, killed %t", m.s.seq, c.what, c.p.n, c.err, c.killed)
			seen := m.during(where, c.from, c.to)
			switch {
			case c.killed || c.err != nil && !final(c.err):
			case c.err == nil && slices.ContainsFunc(seen, func(e entry) bool { return e.id != id || e.state == records.StateDeleted }):
				d.open = false
			case c.err == nil:
				m.fail("%s: it was there all the time", c.what)
			case fault.Is(c.err, fault.Precondition) && slices.ContainsFunc(seen, refusable):
				d.refused = true
			default:
				m.fail("%s: no reason for this final error: %v", c.what, c.err)
			}
		})
	}
	d.ask(p)
}

func (m *model) modify(p *process, s step, v volume.ID) {
	change := provision.Change{Required: int64(1+s.Class) << 30}
	if s.Do == modify {
		change = provision.Change{Set: volume.Mutable{OnDelete: []volume.OnDelete{"delete", "requireEmpty", "retain"}[s.Class%3]}}
	}
	var capacity int64
	run := func(ctx context.Context) (err error) {
		capacity, err = p.Modify(ctx, provision.ModifyRequest{ID: v, Change: change})
		return err
	}
	m.call(p, s.patience(), fmt.Sprintf("changing %s to %+v", v, change), run, func(c *call) {
		debug("%6d answer: %s by process %d: %d, %v, killed %t", m.s.seq, c.what, c.p.n, capacity, c.err, c.killed)
		seen := m.during(place(v), c.from, c.to)
		there := func(e entry) bool { return e.is(v.String(), records.StateActive) }
		switch {
		case c.killed || c.err != nil && !final(c.err):
		// Changes that meet are recorded together, so that the recorded size may be larger than the returned one.
		case c.err == nil && !slices.ContainsFunc(seen, func(e entry) bool {
			return there(e) && capacity >= change.Required && e.capacity >= capacity && (change.Set.OnDelete == "" || change.Set.OnDelete == e.onDelete)
		}):
			m.fail("%s: %d was returned, and was never recorded", c.what, capacity)
		case c.err != nil && (!fault.Is(c.err, fault.NotFound) || !slices.ContainsFunc(seen, func(e entry) bool { return !there(e) })):
			m.fail("%s: no reason for this final error: %v", c.what, c.err)
		}
	})
}

func (m *model) list(p *process) {
	var found []string
	run := func(ctx context.Context) (err error) {
		found, err = listAll(ctx, p)
		return err
	}
	m.call(p, time.Minute, "listing volumes", run, func(c *call) {
		if c.killed || c.err != nil {
			if !c.killed && final(c.err) {
				m.fail("%s: %v", c.what, c.err)
			}
			return
		}
		for _, v := range m.volumes {
			active, all := 0, m.during(place(v), c.from, c.to)
			for _, e := range all {
				if e.is(v.String(), records.StateActive) {
					active++
				}
			}
			if listed := slices.Contains(found, v.String()); listed && active == 0 || !listed && active == len(all) {
				m.fail("%s: %s is listed: %t", c.what, v, listed)
			}
		}
	})
}

func listAll(ctx context.Context, p *process) (found []string, err error) {
	for token := ""; ; {
		page, next, err := p.List(ctx, 1, token)
		if err != nil {
			return nil, err
		}
		for _, v := range page {
			found = append(found, v.ID.String())
		}
		if token = next; token == "" {
			return found, nil
		}
	}
}

// finish asks again for everything that has no final answer yet. Then there must be the volumes and snapshots that the orchestrator knows of and
// nothing else, and in the end, when they are deleted, only tombstones.
func (m *model) finish() {
	debug("finish")
	m.quiet()
	p := m.process(0)
	m.insist(p)
	if m.failure != nil {
		return
	}
	m.compare(p)
	m.tidy(p)
}

// insist asks again and again for what has no final answer, as an orchestrator does.
func (m *model) insist(p *process) {
	for n := 0; m.failure == nil; n++ {
		waits := ""
		for _, key := range slices.Sorted(maps.Keys(m.creations)) {
			if c := m.creations[key]; c.open && m.failure == nil {
				c.ask(p)
				m.quiet()
				waits = key
			}
		}
		for _, id := range slices.Sorted(maps.Keys(m.deletions)) {
			if d := m.deletions[id]; d.open && m.failure == nil {
				d.refused = false
				d.ask(p)
				m.quiet()
				if d.open && !d.refused {
					waits = id
				}
			}
		}
		if waits == "" {
			return
		}
		if n == 50 {
			m.fail("%s: no answer", waits)
		}
	}
}

// known returns the volumes and snapshots that the orchestrator knows of.
func (m *model) known() (ids []string) {
	for id := range m.told {
		if d := m.deletions[id]; d == nil || d.open {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// there returns the volumes and snapshots that are recorded.
func (m *model) there() (ids []string) {
	for at := range m.past {
		e := m.now(at)
		if d := m.deletions[e.id]; d != nil && d.refused && e.state == records.StateDeleting { // a snapshot that a volume is
			ids = append(ids, e.id)
			continue
		}
		switch e.state {
		case records.StateActive, records.StateReady:
			ids = append(ids, e.id)
		case records.StateDeleted, records.StateReserved, "":
		default:
			ids = append(ids, e.id+" "+string(e.state))
		}
	}
	slices.Sort(ids)
	return ids
}

func (m *model) compare(p *process) {
	if want, have := m.known(), m.there(); !slices.Equal(want, have) {
		m.fail("in the end there are %q, and the orchestrator knows %q", have, want)
	}
	m.list(p)
	m.quiet()
	for _, name := range slices.Sorted(maps.Keys(m.s.buckets)) {
		for _, path := range m.left(name, "") {
			if at, ok := strings.CutPrefix(path, "upload "); ok {
				if !strings.Contains(at, " of .s3-csi/probe/") {
					m.fail("in the end there is %s in %s", path, name)
				}
				continue
			}
			m.owned(name, path)
		}
	}
	for path, etag := range m.untouched {
		if m.etag(path, m.s.seq) != etag {
			m.fail("the neighbour %s was changed", path)
		}
	}
}

// owned checks that an object belongs to something.
func (m *model) owned(bucket, key string) {
	rest, reserved := strings.CutPrefix(key, volume.RecordPrefix+"/")
	kind, rest, _ := strings.Cut(rest, "/")
	rest, _, _ = strings.Cut(rest, "/")
	top := topOf(key)
	var e entry
	id := ""
	switch {
	case m.untouched[bucket+"/"+key] != "", reserved && kind == "probe", reserved && kind == "volumes", key == records.SnapshotKey(rest):
		return
	case reserved && kind == "snapshots":
		parsed, _ := volume.ParseSnapshotID("lab:" + bucket + "/" + rest)
		id, e = parsed.String(), m.now(snapshotPlace(parsed))
		if d := m.deletions[id]; e.is(id, records.StateReady) && !strings.Contains(key, "/plan/") || e.is(id, records.StateDeleting) && d != nil && d.refused {
			return
		}
	case reserved: // a manifest, which the process that filled the volume could not remove
		place := bucket + "/" + records.Key(strings.Split(rest, "@")[0])
		if m.own(bucket) {
			place = bucket
		}
		if e = m.now(place); e.state == records.StateActive && strings.HasPrefix(key, idOf(e.id).FillManifest()) {
			return
		}
	default:
		v := volume.ID{Backend: "lab", Bucket: bucket, Prefix: top + "/"}
		if m.own(bucket) {
			v.Prefix = ""
		}
		id, e = v.String(), m.now(place(v))
		if e.is(id, records.StateActive) {
			return
		}
	}
	for _, before := range m.during(m.placeOf(bucket, key), 0, m.s.seq) {
		if before.id == id && before.state == records.StateDeleted && before.onDelete == volume.OnDeleteRetain {
			return
		}
	}
	m.fail("in the end there is %s in %s, which belongs to nothing; the record says %s %s", key, bucket, e.id, e.state)
}

// placeOf returns where the record of the volume or snapshot is to which a key belongs.
func (m *model) placeOf(bucket, key string) string {
	top := path.Base(topOf(key))
	if rest, ok := strings.CutPrefix(key, volume.SnapshotsPrefix); ok {
		return bucket + "/" + records.SnapshotKey(strings.Split(rest, "@")[0])
	}
	if m.own(bucket) {
		return bucket
	}
	return bucket + "/" + records.Key(strings.Split(top, "@")[0])
}

// tidy deletes everything.
func (m *model) tidy(p *process) {
	debug("tidy")
	for _, v := range m.volumes {
		if m.now(place(v)).is(v.String(), records.StateActive) {
			b := m.s.buckets[v.Bucket]
			for _, key := range b.below(v.Prefix) {
				m.s.remove(v.Bucket, key, "")
			}
			maps.DeleteFunc(b.uploads, func(_ string, u *upload) bool { return strings.HasPrefix(u.key, v.Prefix) })
		}
	}
	for _, id := range m.known() {
		if v, err := volume.ParseID(id); err == nil && m.failure == nil {
			m.remove(p, step{}, v)
			m.quiet()
		}
	}
	m.insist(p)
	for _, id := range m.known() {
		if s, err := volume.ParseSnapshotID(id); err == nil && m.failure == nil {
			m.removeSnap(p, step{}, s)
			m.quiet()
		}
	}
	if m.insist(p); m.failure == nil {
		m.compare(p)
	}
	if known := m.known(); len(known) > 0 {
		m.fail("in the end there are still %q", known)
	}
}
