package controller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// askSnapshot asks for a snapshot once.
func (p *process) askSnapshot(name string, source volume.ID, pairs ...string) (provision.Snapshot, error) {
	p.e.t.Helper()
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	params, err := volume.ParseSnapshotParameters(m)
	if err != nil {
		p.e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	return p.CreateSnapshot(ctx, provision.SnapshotRequest{Name: name, Source: source, Parameters: params, Keys: p.e.keys, RoleARN: p.role})
}

// trySnapshot makes a snapshot, again while the answer is Busy or not ready, as a snapshotter does.
func (p *process) trySnapshot(name string, source volume.ID, pairs ...string) (provision.Snapshot, error) {
	for {
		s, err := p.askSnapshot(name, source, pairs...)
		if err == nil && s.Ready || err != nil && !fault.Is(err, fault.Busy) {
			return s, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// snapshot makes a snapshot that must come to be.
func (p *process) snapshot(name string, source volume.ID, pairs ...string) provision.Snapshot {
	p.e.t.Helper()
	s, err := p.trySnapshot(name, source, pairs...)
	if err != nil || !s.Ready {
		p.e.t.Fatalf("snapshot %s of %s %v: %+v, %v", name, source, pairs, s, err)
	}
	return s
}

func (p *process) tryDeleteSnapshot(id volume.SnapshotID) error {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	return p.DeleteSnapshot(ctx, provision.DeleteSnapshotRequest{ID: id, Keys: p.e.keys, RoleARN: p.role})
}

func (p *process) deleteSnapshot(id volume.SnapshotID) {
	p.e.t.Helper()
	if err := p.tryDeleteSnapshot(id); err != nil {
		p.e.t.Fatalf("deleting snapshot %s: %v", id, err)
	}
}

func (p *process) listSnapshots(r provision.ListSnapshotsRequest) (ids []string, next string) {
	p.e.t.Helper()
	r.Secret = provision.Secret{Keys: p.e.keys, RoleARN: p.role}
	list, next, err := p.ListSnapshots(p.e.ctx(), r)
	if err != nil {
		p.e.t.Fatal(err)
	}
	for _, s := range list {
		ids = append(ids, s.ID.String())
	}
	return ids, next
}

// fill writes some objects to a volume.
func (e *env) fill(id volume.ID, n int) {
	e.t.Helper()
	at := e.in(id.Bucket)
	for _, key := range numbered(id.Prefix, n) {
		at.write(key, "content of "+strings.TrimPrefix(key, id.Prefix))
	}
}

// holdsContent fails the test unless what is below two prefixes is the same.
func (e *env) holdsContent(bucket, prefix string, of volume.ID) {
	e.t.Helper()
	have, want := e.in(bucket).contents(prefix), e.in(of.Bucket).contents(of.Prefix)
	if fmt.Sprint(have) != fmt.Sprint(want) {
		e.t.Errorf("%s/%s: %v, want %v", bucket, prefix, have, want)
	}
}

// onlyRecords fails the test if the bucket has more than tombstones.
func (e *env) onlyRecords() {
	e.t.Helper()
	for _, key := range e.keysBelow("") {
		dir := key[:strings.LastIndexByte(key, '/')+1]
		if strings.HasPrefix(key, ".s3-csi/probe/") { // of a process that was killed
			continue
		}
		if dir != ".s3-csi/volumes/" && dir != ".s3-csi/snapshots/" {
			e.t.Errorf("left: %s", key)
		} else if text := e.object(key); !strings.Contains(text, `"state": "deleted"`) && !strings.Contains(text, `"state": "base"`) {
			e.t.Errorf("%s is no tombstone: %s", key, text)
		}
	}
	e.same("unfinished uploads", slices.DeleteFunc(e.uploads(), func(key string) bool { return strings.HasPrefix(key, ".s3-csi/probe/") }), []string{})
}

func TestASnapshotIsIndependentOfItsVolume(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v", "prefix", "base/")
		e.fill(source, 7)
		began := time.Now().Add(-2 * time.Second)
		s := p.snapshot("s", source)
		if want := (volume.SnapshotID{Backend: "lab", Bucket: e.bucket, Segment: "s", Generation: 1}); s.ID != want || s.Source != source.String() || s.Objects != 7 || s.Bytes == 0 || s.Cut.Before(began) {
			t.Errorf("%+v", s)
		}
		e.holdsContent(e.bucket, s.ID.Data(), source)
		before := e.contents(s.ID.Data())
		e.write(source.Prefix+"later", "x")
		if again := e.process().snapshot("s", source); again != s {
			t.Errorf("the same request again: %+v, want %+v", again, s)
		}
		if have := e.contents(s.ID.Data()); fmt.Sprint(have) != fmt.Sprint(before) {
			t.Errorf("the snapshot changed: %v", have)
		}
		// The name with another request.
		_, err := p.trySnapshot("s", source, "maxObjects", "9")
		e.want(err, fault.Exists, "other parameters")
		_, err = p.trySnapshot("s", p.create("w"))
		e.want(err, fault.Exists, "of volume")
		_, err = e.process(cluster("another")).trySnapshot("s", source)
		if !fault.Is(err, fault.Exists) && !fault.Is(err, fault.NotFound) {
			t.Error(err)
		}
		_, err = p.trySnapshot("t", volume.ID{Backend: "lab", Bucket: e.bucket, Prefix: "nothing/"})
		e.want(err, fault.NotFound)
		// Volumes cannot be there, and deleting the source leaves it.
		p.delete(source)
		if have := e.contents(s.ID.Data()); fmt.Sprint(have) != fmt.Sprint(before) {
			t.Errorf("the snapshot changed with its source: %v", have)
		}
		other := e.process()
		other.deleteSnapshot(s.ID)
		p.deleteSnapshot(s.ID)
		_, err = p.GetSnapshot(e.ctx(), s.ID, provision.Secret{Keys: e.keys})
		e.want(err, fault.NotFound)
		// The name again is another snapshot.
		p.delete(p.create("w"))
		next := p.create("x")
		e.fill(next, 2)
		if s2 := p.snapshot("s", next); s2.ID.Generation != 2 || s2.Objects != 2 {
			t.Errorf("the next generation: %+v", s2)
		} else {
			p.deleteSnapshot(s2.ID)
		}
		p.deleteSnapshot(s.ID) // a late retry
		p.delete(next)
		e.onlyRecords()
	})
}

func TestSnapshotsOfBucketVolumes(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v", e.own()...)
		e.fill(source, 5)
		_, err := p.askSnapshot("s", source)
		e.want(err, fault.Invalid, "parameters.bucketName")
		_, err = p.askSnapshot("s", source, "bucketName", source.Bucket)
		e.want(err, fault.Precondition, "is itself volume")
		_, err = p.askSnapshot("s", source, "bucketName", e.bucket+"-none")
		e.want(err, fault.Precondition, "must exist")
		s := p.snapshot("s", source, "bucketName", e.bucket)
		e.holdsContent(e.bucket, s.ID.Data(), source)
		p.delete(source)
		if s.Objects != 5 || len(e.contents(s.ID.Data())) != 5 {
			t.Errorf("%+v", s)
		}
		// Back to a bucket of its own.
		id := p.restored("w", volume.Content{Snapshot: s.ID}, e.own()...)
		if have := e.in(id.Bucket).contents(""); fmt.Sprint(withoutRecords(have)) != fmt.Sprint(e.contents(s.ID.Data())) {
			t.Errorf("restored: %v", have)
		}
		p.deleteSnapshot(s.ID)
		p.there(id)
		p.delete(id)
		e.gone(id.Bucket)
	})
}

// A volume that this driver did not create, and no record shows.
func TestSnapshotsOfStaticVolumes(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		source := volume.ID{Backend: "lab", Bucket: e.bucket, Prefix: "team/data/"}
		_, err := p.askSnapshot("s", source, "staticVolumes", "true")
		e.want(err, fault.NotFound, "no object")
		e.fill(source, 3)
		e.put("team/data2/x", "other/y")
		_, err = p.askSnapshot("s", source)
		e.want(err, fault.NotFound, "staticVolumes")
		s := p.snapshot("s", source, "staticVolumes", "true")
		if s.Source != source.String() || s.Objects != 3 {
			t.Errorf("%+v", s)
		}
		e.holdsContent(e.bucket, s.ID.Data(), source)
		if ids, _ := p.listSnapshots(provision.ListSnapshotsRequest{Source: source.String()}); !slices.Equal(ids, []string{s.ID.String()}) {
			t.Errorf("listed: %v", ids)
		}
		restored := p.restored("r", volume.Content{Snapshot: s.ID})
		e.holdsContent(e.bucket, restored.Prefix, source)
		// The whole bucket, without what the driver has in it.
		p.delete(restored)
		second := e.in(e.bucket + "-copies")
		e.makeBucket(second.bucket)
		_, err = p.askSnapshot("w", volume.ID{Backend: "lab", Bucket: e.bucket}, "staticVolumes", "true", "bucketName", e.bucket)
		e.want(err, fault.Invalid, "parameters.bucketName")
		whole := p.snapshot("w", volume.ID{Backend: "lab", Bucket: e.bucket}, "staticVolumes", "true", "bucketName", second.bucket)
		e.same("all of the bucket", slices.DeleteFunc(e.keysBelow(""), func(key string) bool { return strings.HasPrefix(key, ".s3-csi/") }), rebased(second.keysBelow(whole.ID.Data()), whole.ID.Data(), ""))
		// A volume that is being deleted is none, and its snapshots follow the usual rule.
		own := p.create("v")
		p.delete(own)
		_, err = p.askSnapshot("x", own, "staticVolumes", "true")
		e.want(err, fault.NotFound)
		// The rules of the operator apply to the source, too.
		q := e.process(settings("allow: [{namespaces: [shop], buckets: [" + e.bucket + "-copies]}]"))
		params, err := volume.ParseSnapshotParameters(map[string]string{"staticVolumes": "true", "bucketName": e.bucket + "-copies"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = q.CreateSnapshot(e.ctx(), provision.SnapshotRequest{Name: "a", Namespace: "shop", Source: source, Parameters: params, Keys: e.keys})
		e.want(err, fault.Denied, "bucket "+e.bucket+" ")
		p.deleteSnapshot(s.ID)
		p.deleteSnapshot(whole.ID)
		e.same("the volume", e.keysBelow(source.Prefix), numbered(source.Prefix, 3))
	})
}

func withoutRecords(m map[string]string) map[string]string {
	kept := map[string]string{}
	for key, text := range m {
		if !strings.HasPrefix(key, ".s3-csi/") {
			kept[key] = text
		}
	}
	return kept
}

func TestASnapshotKilledAnywhereIsFinishedByAnother(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		other := e.process()
		source := other.create("v")
		e.fill(source, 3)
		work := func(p *process, round string) error {
			p.hooks.set(func(h *hooks) { h.pageSize = 2 })
			_, err := p.askSnapshot(round, source)
			return err
		}
		deaths(t, e, work, func(round string, err error) {
			e.notFinal(round, err)
			s := other.snapshot(round, source)
			if s.ID.Generation != 1 || s.Objects != 3 {
				t.Errorf("%s: %+v", round, s)
			}
			e.holdsContent(e.bucket, s.ID.Data(), source)
			other.deleteSnapshot(s.ID)
		})
		other.delete(source)
		e.onlyRecords()
	})
}

func TestADeletionOfASnapshotKilledAnywhereIsFinishedByAnother(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		other := e.process()
		source := other.create("v")
		e.fill(source, 2)
		work := func(p *process, round string) error { return p.tryDeleteSnapshot(other.snapshot(round, source).ID) }
		deaths(t, e, work, func(round string, err error) {
			e.notFinal(round, err)
			other.deleteSnapshot(volume.SnapshotID{Backend: "lab", Bucket: e.bucket, Segment: round, Generation: 1})
		})
		other.delete(source)
		e.onlyRecords()
	})
}

func TestRacingControllersMakeOneSnapshot(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		processes := []*process{e.process(), e.process()}
		for _, p := range processes {
			p.hooks.set(func(h *hooks) { h.pageSize = 3 })
		}
		source := processes[0].create("v")
		e.fill(source, 20)
		for round := range 3 {
			made := make([]provision.Snapshot, 6)
			errs := race(len(made), func(i int) (err error) {
				made[i], err = processes[i%2].trySnapshot("s", source)
				return err
			})
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			for _, s := range made {
				if s != made[0] || s.ID.Generation != round+1 || s.Objects != 20 {
					t.Errorf("%+v, another process %+v", s, made[0])
				}
			}
			e.holdsContent(e.bucket, made[0].ID.Data(), source)
			errs = race(4, func(i int) error { return processes[i%2].tryDeleteSnapshot(made[0].ID) })
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
		}
		processes[0].delete(source)
		e.onlyRecords()
	})
}

func TestASourceDeletedDuringItsSnapshot(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.hooks.set(func(h *hooks) { h.pageSize = 3 })
		source := p.create("v")
		e.fill(source, 10)
		reached, resume := p.holds(2, "CopyObject", false)
		done := make(chan error, 1)
		go func() {
			_, err := p.trySnapshot("s", source)
			done <- err
		}()
		<-reached
		e.process().delete(source)
		resume()
		e.want(<-done, fault.NotFound, "was deleted")
		e.onlyRecords()
	})
}

func TestAFailedSnapshotLeavesNothing(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 10)
		_, err := p.trySnapshot("s", source, "maxObjects", "9")
		e.want(err, fault.OutOfRange, "10 objects", "requests", "9")
		_, err = p.trySnapshot("s", source, "maxBytes", "9")
		e.want(err, fault.OutOfRange, "10 objects", "maxBytes")
		denied := strings.TrimPrefix(numbered(source.Prefix, 10)[4], source.Prefix)
		p.answers(func(operation string, h http.Header) *http.Response {
			if operation == "CopyObject" && strings.HasSuffix(h.Get("X-Amz-Copy-Source"), denied) {
				return refusal(403, "AccessDenied")
			}
			return nil
		})
		_, err = p.trySnapshot("s", source)
		e.want(err, fault.Denied, denied)
		e.same("data", e.keysBelow(".s3-csi/snapshots/s@"), nil)
		p.answers(nil)
		s := p.snapshot("s", source)
		e.holdsContent(e.bucket, s.ID.Data(), source)
		p.deleteSnapshot(s.ID)
		p.delete(source)
		e.onlyRecords()
	})
}

// A slow copy answers with its progress, and a deletion ends it.
func TestADeletionEndsASnapshotInTheMaking(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 10)
		reached, resume := p.holds(2, "CopyObject", false)
		ctx, cancel := context.WithTimeout(e.ctx(), 3*time.Second)
		defer cancel()
		params, err := volume.ParseSnapshotParameters(nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.CreateSnapshot(ctx, provision.SnapshotRequest{Name: "s", Source: source, Parameters: params, Keys: e.keys})
		<-reached
		e.want(err, fault.Busy, "making snapshot", "of 10 objects", "so far")
		id := volume.SnapshotID{Backend: "lab", Bucket: e.bucket, Segment: "s", Generation: 1}
		_, err = p.GetSnapshot(e.ctx(), id, provision.Secret{Keys: e.keys})
		e.want(err, fault.NotFound)
		deleted := make(chan error, 1)
		go func() { deleted <- p.tryDeleteSnapshot(id) }()
		time.Sleep(100 * time.Millisecond) // it waits for what has been sent
		resume()
		if err := <-deleted; err != nil {
			t.Error(err)
		}
		p.delete(source)
		e.onlyRecords()
	})
}

func TestSnapshotsAreListedInPages(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		own := cluster("c-" + e.bucket)
		p := e.process(own)
		second := e.bucket + "-2"
		e.makeBucket(second)
		v, w := p.create("v"), p.create("w")
		e.fill(v, 1)
		var all, ofW []string
		for i := range 5 {
			all = append(all, p.snapshot(fmt.Sprint("s", i), v).ID.String())
		}
		for i := range 3 {
			id := p.snapshot(fmt.Sprint("t", i), w, "bucketName", second).ID.String()
			all, ofW = append(all, id), append(ofW, id)
		}
		e.process().create("x") // of another cluster
		p.deleteSnapshot(p.snapshot("gone", v).ID)
		e.write(".s3-csi/snapshots/junk", "not a record")
		q := e.process(own)
		ids, next := q.listSnapshots(provision.ListSnapshotsRequest{})
		e.same("all", ids, all)
		if next != "" {
			t.Errorf("token %q", next)
		}
		ids, _ = q.listSnapshots(provision.ListSnapshotsRequest{Source: w.String()})
		e.same("of one volume", ids, ofW)
		ids, _ = q.listSnapshots(provision.ListSnapshotsRequest{Source: "lab:none/none/"})
		e.same("of none", ids, nil)
		var paged []string
		token := ""
		for {
			ids, token = q.listSnapshots(provision.ListSnapshotsRequest{Max: 2, Token: token})
			if len(ids) > 2 {
				t.Errorf("a page of %d", len(ids))
			}
			paged = append(paged, ids...)
			if token == "" {
				break
			}
		}
		e.same("in pages", paged, all)
		_, _, err := q.ListSnapshots(e.ctx(), provision.ListSnapshotsRequest{Token: "x", Secret: provision.Secret{Keys: e.keys}})
		e.want(err, fault.Busy, "starting_token")
	})
}

// The sessions of copies reach their source and their target, and nothing else.
func TestACopyHasASessionOfItsOwn(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 3)
		e.put("neighbour/x", "v2/x")
		before := len(p.sessions.made())
		s := p.snapshot("s", source)
		made := p.sessions.made()[before:]
		if len(made) == 0 {
			t.Fatal("no session was made")
		}
		be, err := e.config("").Backend("lab")
		if err != nil {
			t.Fatal(err)
		}
		client, err := p.clients.S3(e.ctx(), be, made[0], "")
		if err != nil {
			t.Fatal(err)
		}
		put := func(key string) error {
			_, err := client.PutObject(e.ctx(), &s3.PutObjectInput{Bucket: &e.bucket, Key: &key, Body: strings.NewReader("x")})
			return err
		}
		get := func(key string) error {
			out, err := client.GetObject(e.ctx(), &s3.GetObjectInput{Bucket: &e.bucket, Key: &key})
			if err == nil {
				err = out.Body.Close()
			}
			return err
		}
		remove := func(key string) error {
			_, err := client.DeleteObject(e.ctx(), &s3.DeleteObjectInput{Bucket: &e.bucket, Key: &key})
			return err
		}
		first := numbered(source.Prefix, 1)[0]
		for what, err := range map[string]error{"reading the source": get(first), "writing the snapshot": put(s.ID.Data() + "y"), "deleting there": remove(s.ID.Data() + "y")} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		for what, err := range map[string]error{
			"writing the source": put(source.Prefix + "y"), "deleting from the source": remove(first), "reading a neighbour": get("neighbour/x"), "reading another volume": get("v2/x"),
			"writing a record": put(".s3-csi/volumes/v"), "writing its record": put(".s3-csi/snapshots/s"), "reading a record": get(".s3-csi/volumes/v"), "deleting a record": remove(".s3-csi/volumes/v"),
			"another snapshot": put(".s3-csi/snapshots/s@10/data/x"),
		} {
			if backend.ErrorCode(err) != "AccessDenied" {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
}

// askFrom asks for a volume with content once.
func (p *process) askFrom(name string, content volume.Content, pairs ...string) (volume.ID, error) {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	params := p.e.params(name, pairs...)
	params.Content = content
	return p.Create(ctx, provision.CreateRequest{Name: name, Parameters: params, Keys: p.e.keys, RoleARN: p.role})
}

func (p *process) tryFrom(name string, content volume.Content, pairs ...string) (volume.ID, error) {
	for {
		id, err := p.askFrom(name, content, pairs...)
		if !fault.Is(err, fault.Busy) {
			return id, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (p *process) restored(name string, content volume.Content, pairs ...string) volume.ID {
	p.e.t.Helper()
	id, err := p.tryFrom(name, content, pairs...)
	if err != nil {
		p.e.t.Fatalf("creating %s from %s: %v", name, content, err)
	}
	p.there(id)
	return id
}

func TestVolumesFromSnapshotsAndVolumes(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		second := e.in(e.bucket + "-2")
		e.makeBucket(second.bucket)
		source := p.create("v")
		e.fill(source, 6)
		s := p.snapshot("s", source)
		restored := p.restored("r", volume.Content{Snapshot: s.ID}, "prefix", "base/", "onDelete", "requireEmpty")
		e.holdsContent(restored.Bucket, restored.Prefix, source)
		cloned := p.restored("c", volume.Content{Volume: source}, "bucketName", second.bucket)
		e.holdsContent(cloned.Bucket, cloned.Prefix, source)
		if id := e.process().restored("c", volume.Content{Volume: source}, "bucketName", second.bucket); id != cloned {
			t.Errorf("the same request again: %s", id)
		}
		// The name with another source, or none.
		for _, content := range []volume.Content{{}, {Volume: restored}, {Volume: source}} {
			_, err := p.tryFrom("r", content, "prefix", "base/", "onDelete", "requireEmpty")
			e.want(err, fault.Exists)
		}
		// What cannot be.
		_, err := p.tryFrom("n", volume.Content{Volume: volume.ID{Backend: "lab", Bucket: e.bucket, Prefix: "none/"}})
		e.want(err, fault.NotFound)
		_, err = p.tryFrom("n", volume.Content{Snapshot: volume.SnapshotID{Backend: "lab", Bucket: e.bucket, Segment: "none", Generation: 1}})
		e.want(err, fault.NotFound)
		_, err = p.tryFrom("n", volume.Content{Volume: volume.ID{Backend: "other", Bucket: e.bucket, Prefix: "v/"}})
		e.want(err, fault.Invalid, "volume_content_source")
		_, err = p.tryFrom("n", volume.Content{Volume: source}, "maxObjects", "5")
		e.want(err, fault.OutOfRange, "6 objects")
		params := p.e.params("n")
		params.Content, params.CapacityBytes = volume.Content{Snapshot: s.ID}, s.Bytes-1
		_, err = p.Create(e.ctx(), provision.CreateRequest{Name: "n", Parameters: params, Keys: e.keys})
		e.want(err, fault.OutOfRange, "capacity_range")
		// Sources and copies go in any order, and a retry finds the volume without its source.
		p.delete(source)
		p.deleteSnapshot(s.ID)
		if id := p.restored("r", volume.Content{Snapshot: s.ID}, "prefix", "base/", "onDelete", "requireEmpty"); id != restored {
			t.Errorf("the same request again: %s", id)
		}
		if len(e.contents(restored.Prefix)) != 6 || len(second.contents(cloned.Prefix)) != 6 {
			t.Error("a copy changed with its source")
		}
		e.want(p.tryDelete(restored), fault.Precondition, "not empty")
		for _, key := range e.keysBelow(restored.Prefix) {
			e.remove(key)
		}
		p.delete(restored)
		p.delete(cloned)
		second.onlyRecords()
		for _, key := range e.keysBelow("") {
			if !strings.HasPrefix(key, ".s3-csi/volumes/") && !strings.HasPrefix(key, ".s3-csi/snapshots/") {
				t.Errorf("left: %s", key)
			}
		}
	})
}

func TestAFillingKilledAnywhereIsFinishedByAnother(t *testing.T) {
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprint("own bucket ", own), func(t *testing.T) {
			one(t, func(t *testing.T, e *env) {
				var pairs []string
				other := e.process()
				if own {
					pairs = e.own()
					other = e.process(settings("adoptUntaggedBuckets: true"))
				}
				source := other.create("v")
				e.fill(source, 3)
				s := other.snapshot("s", source)
				work := func(p *process, round string) error {
					_, err := p.askFrom(round, volume.Content{Snapshot: s.ID}, pairs...)
					return err
				}
				deaths(t, e, work, func(round string, err error) {
					e.notFinal(round, err)
					id := other.restored(round, volume.Content{Snapshot: s.ID}, pairs...)
					if have := withoutRecords(e.in(id.Bucket).contents(id.Prefix)); fmt.Sprint(have) != fmt.Sprint(e.contents(source.Prefix)) {
						t.Errorf("%s: %v", round, have)
					}
					other.delete(id)
				})
			})
		})
	}
}

// A controller is stopped in the middle of a copy, for so long that another one fills the volume. When it goes on, it copies no more: its
// objects would replace those that the volume's users have removed.
func TestAControllerThatComesBackWritesNothingIntoAFilledVolume(t *testing.T) {
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprint("own bucket ", own), func(t *testing.T) {
			each(t, func(t *testing.T, e *env) {
				var pairs []string
				late := []func(*processOptions){func(o *processOptions) { o.checkEvery = time.Nanosecond }}
				if own {
					pairs = e.own()
					late = append(late, settings("adoptUntaggedBuckets: true"))
				}
				const objects = 100
				p, other := e.process(late...), e.process(late...)
				source := other.create("v")
				e.fill(source, objects)
				stopped, resume := p.stops("CopyObject")
				done := make(chan error, 1)
				go func() {
					_, err := p.askFrom("n", volume.Content{Volume: source}, pairs...)
					done <- err
				}()
				<-stopped
				id := other.restored("n", volume.Content{Volume: source}, pairs...)
				in := e.in(id.Bucket)
				for _, key := range in.keysBelow(id.Prefix) {
					if !strings.HasPrefix(key, ".s3-csi/") {
						in.remove(key)
					}
				}
				resume()
				if err := <-done; err != nil {
					e.notFinal("late", err)
				}
				// What had been sent already cannot be taken back; the other one waits for that, see fill.Options.Lag.
				if have := withoutRecords(in.contents(id.Prefix)); len(have) > provision.DefaultCopyWorkers {
					t.Errorf("%d of %d objects are back, more than %d", len(have), objects, provision.DefaultCopyWorkers)
				}
				other.delete(id)
			})
		})
	}
}

// A controller is stopped in the middle of a snapshot and goes on when another one has copied it. It leaves the rest to that one.
func TestAControllerThatComesBackLeavesASnapshotToAnother(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		late := func(o *processOptions) { o.checkEvery = time.Nanosecond }
		p, other := e.process(late, patient), e.process(late) // p leaves the other one alone for twice its lag
		source := other.create("v")
		e.fill(source, 100)
		other.snapshot("warm", source) // the listing of uploads is tested once
		stopped, resume := p.stops("CopyObject")
		back := make(chan error, 1)
		go func() {
			_, err := p.askSnapshot("s", source)
			back <- err
		}()
		<-stopped
		copied, goOn := other.holds(1, "ListMultipartUploads", false)
		made := make(chan error, 1)
		go func() {
			_, err := other.trySnapshot("s", source)
			made <- err
		}()
		<-copied
		p.hooks.reset()
		resume()
		e.want(<-back, fault.Busy, "another controller")
		if sent := count(p.hooks.sent(), "CopyObject"); sent > 0 {
			t.Errorf("it copied %d further objects", sent)
		}
		// It leaves the other one alone when it is asked again, too.
		_, err := p.askSnapshot("s", source)
		e.want(err, fault.Busy, "another controller")
		goOn()
		if err := <-made; err != nil {
			t.Error(err)
		}
		s := p.snapshot("s", source)
		e.holdsContent(e.bucket, s.ID.Data(), source)
	})
}

// What the former controller had sent when another one took over arrives late. It is not in the snapshot when that is ready.
func TestATakeOverRemovesWhatComesLate(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p, other := e.process(), e.process()
		source := other.create("v")
		e.fill(source, 3)
		other.snapshot("warm", source) // the listing of uploads is tested once
		deleted := numbered(source.Prefix, 3)[1]
		stopped, resume := p.stops("CopyObject")
		late := make(chan error, 1)
		go func() {
			_, err := p.askSnapshot("s", source)
			late <- err
		}()
		<-stopped
		text := e.object(deleted)
		e.remove(deleted)                                               // for the listing of the other one
		compares, goOn := other.holds(2, "ListMultipartUploads", false) // the first request of each comparison
		made := make(chan provision.Snapshot, 1)
		failed := make(chan error, 1)
		go func() {
			s, err := other.trySnapshot("s", source)
			if err != nil {
				failed <- err
			}
			made <- s
		}()
		select {
		case <-compares:
		case err := <-failed:
			t.Fatal(err)
		case s := <-made:
			t.Fatalf("%s is ready, compared once", s.ID)
		}
		e.write(deleted, text)
		p.hooks.set(func(h *hooks) { // what it has sent is all that it does
			h.before = func(_ int, operation string) error {
				if operation != "CopyObject" {
					return errors.New("the process is dead")
				}
				return nil
			}
		})
		resume()
		if err := <-late; err != nil {
			e.notFinal("late", err)
		}
		id := volume.SnapshotID{Backend: "lab", Bucket: e.bucket, Segment: "s", Generation: 1}
		if n := len(e.keysBelow(id.Data())); n != 3 {
			t.Errorf("nothing came late: %d objects", n)
		}
		goOn()
		if s := <-made; s.ID != id || s.Objects != 2 {
			t.Errorf("%+v", s)
		}
		if n := len(e.keysBelow(id.Data())); n != 2 {
			t.Errorf("%d objects are there, of 2 in the snapshot", n)
		}
	})
}

// When one object cannot be copied, the requests that were sent for others go on. Otherwise the service could carry them out after the removal
// of what was copied.
func TestAFailureDoesNotBreakOffWhatWasSent(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 3)
		denied := make(chan struct{})
		var first, refused, brokenOff atomic.Bool
		p.hooks.set(func(h *hooks) {
			h.wait = func(ctx context.Context, operation string, done bool) {
				if operation != "CopyObject" || done || first.Swap(true) {
					return
				}
				<-denied
				select {
				case <-ctx.Done():
					brokenOff.Store(true)
				case <-time.After(300 * time.Millisecond):
				}
			}
			h.answer = func(operation string, _ http.Header) *http.Response {
				if operation == "CopyObject" && !refused.Swap(true) {
					close(denied)
					return refusal(403, "AccessDenied")
				}
				return nil
			}
		})
		_, err := p.askSnapshot("s", source)
		e.want(err, fault.Denied)
		if brokenOff.Load() {
			t.Error("a request was broken off")
		}
		p.delete(source)
		e.onlyRecords()
	})
}

// Two controllers that are both asked all the time would take over from each other, and each has to wait after that.
func TestControllersThatAreBothAskedFinish(t *testing.T) {
	for what, ask := range map[string]func(p *process, source volume.ID) error{
		"volume": func(p *process, source volume.ID) error {
			_, err := p.askFrom("c", volume.Content{Volume: source})
			return err
		},
		"snapshot": func(p *process, source volume.ID) error {
			_, err := p.askSnapshot("s", source)
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			one(t, func(t *testing.T, e *env) {
				lag := func(o *processOptions) { o.copyLag = 500 * time.Millisecond }
				processes := []*process{e.process(lag), e.process(lag)}
				source := processes[0].create("v")
				e.fill(source, 5)
				for _, err := range race(2, func(i int) error {
					for late := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
						if err := ask(processes[i], source); !fault.Is(err, fault.Busy) || time.Now().After(late) {
							return err
						}
					}
				}) {
					if err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
}

// A process that took over a filling and fails removes nothing before the former one's requests have ended: their objects would be left.
func TestAFailureAfterATakeOverWaitsForTheFormerController(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		const lag = time.Second
		p, other := e.process(), e.process(func(o *processOptions) { o.copyLag = lag })
		source := other.create("v")
		e.fill(source, 3)
		stopped, _ := p.stops("CopyObject")
		done := make(chan error, 1)
		go func() {
			_, err := p.askFrom("n", volume.Content{Volume: source})
			done <- err
		}()
		<-stopped
		var removed time.Time
		other.hooks.set(func(h *hooks) {
			h.answer = func(operation string, _ http.Header) *http.Response {
				switch operation {
				case "CopyObject":
					return refusal(403, "AccessDenied")
				case "PutObject": // the last one before the answer is that of the tombstone
					removed = time.Now()
				}
				return nil
			}
		})
		began := time.Now()
		for {
			_, err := other.askFrom("n", volume.Content{Volume: source})
			if !fault.Is(err, fault.Busy) {
				e.want(err, fault.Denied)
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if waited := removed.Sub(began); waited < lag {
			t.Errorf("the volume was removed after %s, before the former controller's requests had %s to end", waited, lag)
		}
		p.kill()
		t.Logf("the killed controller: %v", <-done)
		e.same("what is left", e.keysBelow("n/"), nil)
	})
}

// DeleteVolume of a volume that is not filled yet, by the same process or another one.
func TestADeletionEndsAFilling(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for i, onDelete := range []string{"delete", "requireEmpty", "retain"} {
			name := fmt.Sprint("n", i)
			p := e.process()
			source := p.create("v" + name)
			e.fill(source, 10)
			reached, resume := p.holds(4, "CopyObject", true)
			done := make(chan error, 1)
			go func() {
				_, err := p.askFrom(name, volume.Content{Volume: source}, "onDelete", onDelete)
				done <- err
			}()
			<-reached
			id := volume.ID{Backend: "lab", Bucket: e.bucket, Prefix: name + "/"}
			e.want(p.lookup(id), fault.NotFound)
			by := p
			if i == 0 {
				by = e.process()
			}
			deleted := make(chan error, 1)
			go func() { deleted <- by.tryDelete(id) }()
			time.Sleep(100 * time.Millisecond) // it waits for what has been sent
			resume()
			if err := <-deleted; err != nil {
				t.Errorf("%s: %v", onDelete, err)
			}
			if err := <-done; err != nil {
				e.notFinal(onDelete, err)
			} else {
				t.Errorf("%s: the volume was filled", onDelete)
			}
			e.same(onDelete, slices.DeleteFunc(e.keysBelow(name), func(string) bool { return false }), nil)
			p.delete(source)
		}
		e.onlyRecords()
	})
}

func TestASnapshotDeletedDuringARestore(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 10)
		s := p.snapshot("s", source)
		reached, resume := p.holds(4, "CopyObject", false)
		done := make(chan error, 1)
		go func() {
			_, err := p.tryFrom("r", volume.Content{Snapshot: s.ID})
			done <- err
		}()
		<-reached
		e.process().deleteSnapshot(s.ID)
		resume()
		e.want(<-done, fault.NotFound)
		p.delete(source)
		e.onlyRecords()
	})
}

// A real policy of a service that keeps to those of buckets for its users.
func TestABucketPolicyThatDeniesOneKey(t *testing.T) {
	on(t, scoped[:1], func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 5)
		denied := numbered(source.Prefix, 5)[3]
		_, err := e.s3.PutBucketPolicy(e.ctx(), &s3.PutBucketPolicyInput{Bucket: &e.bucket, Policy: aws.String(
			`{"Version":"2012-10-17","Statement":[{"Effect":"Deny","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::` + e.bucket + "/" + denied + `"}]}`)})
		if err != nil {
			t.Fatal(err)
		}
		for _, try := range []func() error{
			func() error { _, err := p.trySnapshot("s", source); return err },
			func() error { _, err := p.tryFrom("c", volume.Content{Volume: source}); return err },
		} {
			e.want(try(), fault.Denied, strings.TrimPrefix(denied, source.Prefix))
		}
		if _, err := e.s3.DeleteBucketPolicy(e.ctx(), &s3.DeleteBucketPolicyInput{Bucket: &e.bucket}); err != nil {
			t.Fatal(err)
		}
		p.deleteSnapshot(p.snapshot("s", source).ID)
		p.delete(p.restored("c", volume.Content{Volume: source}))
		p.delete(source)
		e.onlyRecords()
	})
}

// direct asks for a volume that is a snapshot itself.
func (p *process) direct(name string, id volume.SnapshotID) (volume.ID, error) {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	params := p.e.params(name, "snapshotAccess", "direct")
	params.Content.Snapshot = id
	if err := params.ApplyAccess(); err != nil {
		return volume.ID{}, err
	}
	if context := params.Context(); context["snapshot"] != id.Segment+"@1" || context["readOnly"] != "true" {
		p.e.t.Errorf("the volume context is %v", context)
	}
	return p.Create(ctx, provision.CreateRequest{Name: name, Parameters: params, Keys: p.e.keys, RoleARN: p.role})
}

func TestAVolumeThatIsASnapshotPinsIt(t *testing.T) {
	eachWay(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 3)
		s := p.snapshot("s", source)
		first, err := p.direct("d1", s.ID)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := e.process().direct("d1", s.ID); err != nil || again != first {
			t.Errorf("the same request again: %s, %v", again, err)
		}
		second, err := p.direct("d2", s.ID)
		if err != nil {
			t.Fatal(err)
		}
		p.there(first)
		e.same("nothing is copied", e.keysBelow("d"), nil)
		_, err = p.tryFrom("d1", volume.Content{Snapshot: s.ID})
		e.want(err, fault.Exists)
		e.want(e.process().tryDeleteSnapshot(s.ID), fault.Precondition, "snapshotAccess")
		p.delete(first)
		e.want(p.tryDeleteSnapshot(s.ID), fault.Precondition, s.ID.Users())
		e.holdsContent(e.bucket, s.ID.Data(), source)
		e.process().delete(second)
		p.deleteSnapshot(s.ID)
		_, err = p.direct("d3", s.ID)
		e.want(err, fault.NotFound)
		p.delete(source)
		e.onlyRecords()
	})
}

func TestAPinAndADeletionOfItsSnapshotRace(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		processes := []*process{e.process(), e.process()}
		source := processes[0].create("v")
		e.fill(source, 2)
		for round := range 8 {
			s := processes[0].snapshot(fmt.Sprint("s", round), source)
			name := fmt.Sprint("d", round)
			errs := race(3, func(i int) error {
				if i == 0 {
					_, err := processes[0].direct(name, s.ID)
					return err
				}
				return processes[i%2].tryDeleteSnapshot(s.ID)
			})
			if errs[0] == nil {
				for _, err := range errs[1:] {
					e.want(err, fault.Precondition, "snapshotAccess")
				}
				e.holdsContent(e.bucket, s.ID.Data(), source)
				processes[0].delete(volume.ID{Backend: "lab", Bucket: e.bucket, Prefix: name + "/"})
			} else {
				e.want(errs[0], fault.NotFound)
			}
			processes[1].deleteSnapshot(s.ID)
		}
		processes[0].delete(source)
		e.onlyRecords()
	})
}

func TestAPinKilledAnywhereIsFinishedByAnother(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		other := e.process()
		source := other.create("v")
		e.fill(source, 1)
		s := other.snapshot("s", source)
		work := func(p *process, round string) error {
			_, err := p.direct(round, s.ID)
			return err
		}
		deaths(t, e, work, func(round string, err error) {
			e.notFinal(round, err)
			id, err := other.direct(round, s.ID)
			if err != nil {
				t.Fatalf("%s: %v", round, err)
			}
			e.want(other.tryDeleteSnapshot(s.ID), fault.Precondition)
			other.delete(id)
		})
		other.deleteSnapshot(s.ID)
		other.delete(source)
		e.onlyRecords()
	})
}

// After an error that is final no caller asks for a deletion. So the process that is asked next cleans up what failed.
func TestAFailureKilledAnywhereLeavesNothing(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		other := e.process()
		source := other.create("v")
		e.fill(source, 3)
		isDenied := func(operation string, h http.Header) *http.Response {
			if operation == "CopyObject" && strings.HasSuffix(h.Get("X-Amz-Copy-Source"), "f00002") {
				return refusal(403, "AccessDenied")
			}
			return nil
		}
		other.answers(isDenied)
		for what, ask := range map[string]func(p *process, round string) error{
			"snapshot": func(p *process, round string) error {
				_, err := p.askSnapshot("s"+round, source)
				return err
			},
			"volume": func(p *process, round string) error {
				_, err := p.askFrom("c"+round, volume.Content{Volume: source})
				return err
			},
		} {
			work := func(p *process, round string) error {
				p.hooks.set(func(h *hooks) { h.answer = isDenied })
				return ask(p, round)
			}
			deaths(t, e, work, func(round string, _ error) {
				for {
					err := ask(other, round)
					if fault.Is(err, fault.Busy) {
						time.Sleep(20 * time.Millisecond)
						continue
					}
					e.want(err, fault.Denied, "f00002")
					break
				}
				e.same(what+" "+round, slices.Concat(e.keysBelow("c"+round), e.keysBelow(".s3-csi/snapshots/s"+round+"@"), e.keysBelow(".s3-csi/fills/")), nil)
			})
		}
		other.delete(source)
		e.onlyRecords()
	})
}
