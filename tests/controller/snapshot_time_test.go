package controller

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// eachOfTime runs a test on the servers that keep the times of versions. versitygw gives a version the time at which it was overwritten.
func eachOfTime(t *testing.T, test func(t *testing.T, e *env)) {
	on(t, slices.DeleteFunc(slices.Concat(targets, scoped), func(t target) bool { return t.name == "versitygw" }), func(t *testing.T, e *env) {
		test(t, e)
	})
}

// cut asks for a snapshot of one time and returns when it is cut.
func (p *process) cut(name string, source volume.ID, pairs ...string) provision.Snapshot {
	p.e.t.Helper()
	s, err := p.askSnapshot(name, source, append(pairs, "consistency", "time")...)
	if err != nil || s.Cut.IsZero() {
		p.e.t.Fatalf("cutting snapshot %s: %+v, %v", name, s, err)
	}
	return s
}

func (e *env) versioned() { e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled) }

// Everything is as it was when CreateSnapshot returned, whatever happens before and while the copy is made.
func TestASnapshotOfOneTime(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		other := e.process()
		source := other.create("v")
		at := func(key string) string { return source.Prefix + key }
		e.write(at("old"), "from before versioning")
		e.versioned()
		e.put("v2/neighbour", "u/neighbour")
		for _, key := range []string{"a", "again", "d/e", "gone", "ä +%20&?#"} {
			e.write(at(key), "first")
		}
		e.write(at("a"), "second")
		e.remove(at("gone"))
		e.remove(at("again"))
		e.write(at("again"), "written again")
		before := e.contents(source.Prefix)

		p := e.process(notRunning) // the copy waits until it is started
		s := p.cut("s", source)
		if s.Ready || s.ID.Generation != 1 || s.Source != source.String() {
			t.Errorf("%+v", s)
		}
		change := func(round string) {
			e.write(at("a"), round)
			for i := range 5 {
				e.write(at("again"), fmt.Sprint(round, i))
			}
			e.write(at("gone"), round)
			e.write(at("new"+round), round)
			e.write(at("old"), round)
			e.remove(at("d/e"))
			e.remove(at("d/e"))
		}
		change("after the cut")
		if again := p.cut("s", source); again != s {
			t.Errorf("the same request again: %+v, want %+v", again, s)
		}
		if got, err := other.GetSnapshot(e.ctx(), s.ID, provision.Secret{Keys: e.keys}); err != nil || got != s {
			t.Errorf("GetSnapshot: %+v, %v", got, err)
		}
		_, err := other.askFrom("early", volume.Content{Snapshot: s.ID})
		e.want(err, fault.Busy, "not ready")
		e.same("copied before the start", e.keysBelow(s.ID.Data()), nil)

		p.hooks.set(func(h *hooks) { h.pageSize = 2 })
		stopped, resume := p.stops("CopyObject")
		p.start()
		<-stopped
		change("after the plan")
		other.delete(source) // its versions stay
		resume()
		done, err := p.trySnapshot("s", source, "consistency", "time")
		if err != nil || !done.Ready || done.Cut != s.Cut || done.Objects != int64(len(before)) {
			t.Errorf("%+v, %v", done, err)
		}
		if have := e.contents(s.ID.Data()); !maps.Equal(have, before) {
			t.Errorf("the snapshot has %v, want %v", have, before)
		}
		for len(e.keysBelow(s.ID.Plan())) > 0 { // it is removed last
			time.Sleep(20 * time.Millisecond)
		}
		if manifest := strings.Join(slices.Collect(maps.Values(e.contents(s.ID.Manifest()))), ""); strings.Count(manifest, `"version":"`) != len(before) {
			t.Errorf("the manifest does not name the versions: %s", manifest)
		}
		restored := other.restored("r", volume.Content{Snapshot: s.ID})
		if have := e.contents(restored.Prefix); !maps.Equal(have, before) {
			t.Errorf("restored: %v, want %v", have, before)
		}
		other.delete(restored)
		other.deleteSnapshot(s.ID)
		e.same("left of the markers", slices.DeleteFunc(e.versions(".s3-csi/probe/"), func(v string) bool { return strings.HasPrefix(v, "null") }), nil)
	})
}

// wholeSeconds has the service of a process list times as AWS does.
func (p *process) wholeSeconds() {
	fraction := regexp.MustCompile(`\.\d+Z</LastModified>`)
	p.hooks.set(func(h *hooks) {
		h.edit = func(operation string, r *http.Response) {
			if operation != "ListObjectVersions" || r == nil {
				return
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				p.e.t.Error(err)
			}
			body = fraction.ReplaceAll(body, []byte(".000Z</LastModified>"))
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
			r.Header.Del("Content-Length")
		}
	})
}

// What was written before the request is in the snapshot, and what is written after its answer is not, although both are within a second of
// the cut and the service shows whole seconds.
func TestACutDividesASecond(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		e.versioned()
		p := e.process()
		p.wholeSeconds()
		source := p.create("v")
		for round := range 3 {
			key := source.Prefix + "file"
			e.write(key, "old")
			e.write(key, "before")
			e.write(source.Prefix+"renamed", "x")
			e.remove(source.Prefix + "renamed")
			e.write(source.Prefix+"back", "x")
			e.remove(source.Prefix + "back")
			e.write(source.Prefix+"back", "before")
			s := p.cut(fmt.Sprint("s", round), source)
			e.write(key, "after")
			e.write(source.Prefix+"renamed", "after")
			e.remove(source.Prefix + "back")
			if _, err := p.trySnapshot(fmt.Sprint("s", round), source, "consistency", "time"); err != nil {
				t.Fatal(err)
			}
			if have := e.contents(s.ID.Data()); !maps.Equal(have, map[string]string{"file": "before", "back": "before"}) {
				t.Errorf("round %d: %v", round, have)
			}
			e.remove(source.Prefix + "renamed")
		}
	})
}

// Between a write before the request and the cut, and between the cut and a write after its answer, there is the difference that clocks may have.
func TestACutAllowsForClocksThatDiffer(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		const skew = 700 * time.Millisecond
		e.versioned()
		p := e.process(func(o *processOptions) { o.clockSkew = skew })
		source := p.create("v")
		written := func(key string) time.Time {
			e.write(source.Prefix+key, "x")
			prefix := source.Prefix + key
			out, err := e.s3.ListObjectVersions(e.ctx(), &s3.ListObjectVersionsInput{Bucket: &e.bucket, Prefix: &prefix})
			if err != nil || len(out.Versions) != 1 {
				t.Fatalf("%v, %v", out, err)
			}
			return *out.Versions[0].LastModified
		}
		before := written("before")
		s := p.cut("s", source)
		after := written("after")
		if s.Cut.Sub(before) < skew || after.Sub(s.Cut) < skew {
			t.Errorf("a write at %s, the cut at %s, a write at %s; want %s between them", before, s.Cut, after, skew)
		}
	})
}

func TestASnapshotOfOneTimeNeedsVersions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("v")
		e.fill(source, 1)
		try := func() error {
			_, err := p.trySnapshot("s", source, "consistency", "time")
			return err
		}
		e.want(try(), fault.Precondition, "parameters.consistency", e.bucket, "versioning", "is off")
		e.versioned()
		for operation, words := range map[string]string{"GetBucketVersioning": "s3:GetBucketVersioning", "ListObjectVersions": "s3:ListBucketVersions",
			"DeleteObject": "s3:DeleteObjectVersion"} {
			if e.name == "versitygw" && operation == "DeleteObject" {
				continue
			}
			p.refuse(http.StatusForbidden, "AccessDenied", operation)
			e.want(try(), fault.Precondition, "cannot be tested", words)
		}
		p.answers(nil)
		if e.name == "versitygw" {
			e.want(try(), fault.Precondition, "does not keep the times of versions")
		}
		e.setVersioning(e.bucket, types.BucketVersioningStatusSuspended)
		e.want(try(), fault.Precondition, "is suspended")
		e.same("snapshots", e.keysBelow(".s3-csi/snapshots/"), nil)
		// A service that copies the current version whatever it is asked for.
		if e.name != "versitygw" {
			e.versioned()
			p.hooks.set(func(h *hooks) { h.current = true })
			e.want(try(), fault.Precondition, "copies the current version")
		}
	})
}

// Each answer of the proof is lost once. What was written then is removed, too.
func TestACutOfUnknownOutcomeLeavesNothing(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		e.versioned()
		p := e.process(notRunning)
		source := p.create("v")
		p.cut("warm", source)
		before := e.versions(".s3-csi/probe/")
		for n := 1; ; n++ {
			seen, lost := 0, ""
			p.hooks.set(func(h *hooks) {
				h.after = func(_ int, operation string) error {
					if operation == "PutObject" || operation == "CopyObject" || operation == "DeleteObject" {
						if seen++; seen == n {
							lost = operation
							return cut()
						}
					}
					return nil
				}
			})
			_, err := p.askSnapshot(fmt.Sprint("s", n), source, "consistency", "time")
			e.same(fmt.Sprint("left after the loss of a ", lost), e.versions(".s3-csi/probe/"), before)
			if err == nil {
				if n < 5 { // two markers, a copy, a deletion
					t.Errorf("the snapshot was cut although the answer of a %s was lost", lost)
				}
				break
			}
			e.notFinal(lost, err)
		}
	})
}

// What a draining pod, or a node after a reboot, completes after the snapshot began is in it as a whole or not at all. Later it does not change.
func TestAnUploadThatIsCompletedDuringASnapshot(t *testing.T) {
	begin := func(e *env, key string) (complete func()) {
		in := &s3.CreateMultipartUploadInput{Bucket: &e.bucket, Key: &key}
		up, err := e.s3.CreateMultipartUpload(e.ctx(), in)
		if err != nil {
			e.t.Fatal(err)
		}
		part, err := e.s3.UploadPart(e.ctx(), &s3.UploadPartInput{Bucket: in.Bucket, Key: in.Key, UploadId: up.UploadId, PartNumber: aws.Int32(1),
			Body: strings.NewReader("all of it")})
		if err != nil {
			e.t.Fatal(err)
		}
		return func() {
			_, err := e.s3.CompleteMultipartUpload(e.ctx(), &s3.CompleteMultipartUploadInput{
				Bucket: in.Bucket, Key: in.Key, UploadId: up.UploadId, MultipartUpload: &types.CompletedMultipartUpload{Parts: []types.CompletedPart{{PartNumber: aws.Int32(1), ETag: part.ETag}}},
			})
			if err != nil {
				e.t.Error(err)
			}
		}
	}
	check := func(e *env, p *process, source volume.ID, s provision.Snapshot, before map[string]string, err error) {
		if err != nil || !s.Ready {
			e.t.Fatal(s, err)
		}
		have := e.contents(s.ID.Data())
		for _, key := range []string{"early", "late"} {
			if text, found := have[key]; found && text != "all of it" {
				e.t.Errorf("%s is %q", key, text)
			}
			delete(have, key)
		}
		if !maps.Equal(have, before) {
			e.t.Errorf("%v, want %v", have, before)
		}
		want := e.contents(s.ID.Data())
		e.write(source.Prefix+"late", "later")
		restored := p.restored("r", volume.Content{Snapshot: s.ID})
		if have := e.contents(restored.Prefix); !maps.Equal(have, want) {
			e.t.Errorf("restored: %v, want %v", have, want)
		}
	}
	t.Run("object", func(t *testing.T) {
		each(t, func(t *testing.T, e *env) {
			p := e.process()
			source := p.create("v")
			e.fill(source, 5)
			before := e.contents(source.Prefix)
			early, late := begin(e, source.Prefix+"early"), begin(e, source.Prefix+"late")
			p.hooks.set(func(h *hooks) { h.pageSize = 2 })
			stopped, resume := p.stops("CopyObject")
			done := make(chan error, 1)
			var s provision.Snapshot
			go func() {
				var err error
				s, err = p.trySnapshot("s", source)
				done <- err
			}()
			<-stopped
			early()
			late()
			resume()
			err := <-done
			check(e, p, source, s, before, err)
		})
	})
	t.Run("time", func(t *testing.T) {
		eachOfTime(t, func(t *testing.T, e *env) {
			e.versioned()
			p := e.process(notRunning)
			source := p.create("v")
			e.fill(source, 5)
			before := e.contents(source.Prefix)
			early, late := begin(e, source.Prefix+"early"), begin(e, source.Prefix+"late")
			p.cut("s", source)
			early() // before the plan
			stopped, resume := p.stops("CopyObject")
			p.start()
			<-stopped
			late()
			resume()
			s, err := p.trySnapshot("s", source, "consistency", "time")
			check(e, p, source, s, before, err)
		})
	})
}

func TestAVersionThatIsDeletedDuringTheCopy(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		e.versioned()
		other := e.process()
		source := other.create("v")
		e.fill(source, 5)
		lost := numbered(source.Prefix, 5)[2]
		version := strings.TrimPrefix(e.versions(lost)[0], lost+" ")
		p := e.process(notRunning)
		s := p.cut("s", source)
		stopped, resume := p.stops("CopyObject")
		p.start()
		<-stopped
		if _, err := e.s3.DeleteObject(e.ctx(), &s3.DeleteObjectInput{Bucket: &e.bucket, Key: &lost, VersionId: &version}); err != nil {
			t.Fatal(err)
		}
		resume()
		_, err := p.trySnapshot("s", source, "consistency", "time")
		e.want(err, fault.Precondition, strings.TrimPrefix(lost, source.Prefix), version, "was deleted")
		// The name would otherwise become a snapshot of another time.
		for range 2 {
			_, err = other.trySnapshot("s", source, "consistency", "time")
			e.want(err, fault.Precondition, s.ID.String(), "another name", version)
		}
		e.same("what is left", e.keysBelow(s.ID.Prefix()), nil)
		other.deleteSnapshot(s.ID)
	})
}

func TestVersioningSuspendedAfterTheCut(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		for name, again := range map[string]bool{"s": false, "t": true} {
			e.versioned()
			p := e.process(notRunning)
			source := p.create("v" + name)
			e.fill(source, 2)
			p.cut(name, source)
			e.setVersioning(e.bucket, types.BucketVersioningStatusSuspended)
			e.write(numbered(source.Prefix, 2)[1], "overwritten without a version")
			if again {
				e.versioned()
			}
			p.start()
			_, err := p.trySnapshot(name, source, "consistency", "time")
			e.want(err, fault.Precondition, "suspended")
		}
	})
}

func TestASnapshotOfOneTimeAboveItsLimits(t *testing.T) {
	eachOfTime(t, func(t *testing.T, e *env) {
		e.versioned()
		p := e.process()
		source := p.create("v")
		e.fill(source, 3)
		_, err := p.trySnapshot("s", source, "consistency", "time", "maxObjects", "2")
		if err == nil || !fault.KindOf(err).Permanent() || !strings.Contains(err.Error(), "3 objects") || !strings.Contains(err.Error(), "maxObjects") {
			t.Errorf("%v", err)
		}
		e.same("data", e.keysBelow(".s3-csi/snapshots/s@"), nil)
		p.delete(source)
		e.onlyRecords()
	})
}
