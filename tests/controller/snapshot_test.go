package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
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
		if want := (volume.SnapshotID{Backend: "lab", Bucket: e.bucket, Segment: "s",
			Generation: 1}); s.ID != want || s.Source != source.String() || s.Objects != 7 || s.Bytes == 0 || s.Cut.Before(began) {
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
		e.same("all of the bucket", slices.DeleteFunc(e.keysBelow(""), func(key string) bool { return strings.HasPrefix(key, ".s3-csi/") }),
			rebased(second.keysBelow(whole.ID.Data()), whole.ID.Data(), ""))
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
		for what, err := range map[string]error{"reading the source": get(first), "writing the snapshot": put(s.ID.Data() + "y"),
			"deleting there": remove(s.ID.Data() + "y")} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		for what, err := range map[string]error{
			"writing the source": put(source.Prefix + "y"), "deleting from the source": remove(first), "reading a " +
				"neighbour": get("neighbour/x"), "reading another volume": get("v2/x"),
			"writing a record": put(".s3-csi/volumes/v"), "writing its record": put(".s3-csi/snapshots/s"), "reading a " +
				"record": get(".s3-csi/volumes/v"), "deleting a record": remove(".s3-csi/volumes/v"),
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
