package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// change asks for a change once.
func (p *process) change(id volume.ID, c provision.Change) (int64, error) {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	return p.Modifier.Modify(ctx, provision.ModifyRequest{ID: id, Keys: p.e.keys, RoleARN: p.role, Change: c})
}

// grown expands a volume, which must succeed.
func (p *process) grown(id volume.ID, required int64) {
	p.e.t.Helper()
	if got, err := p.change(id, provision.Change{Required: required}); err != nil || got < required {
		p.e.t.Errorf("expanding %s to %d: %d, %v", id, required, got, err)
	}
}

// size is the recorded size of a prefix volume.
func (e *env) size(segment string) int64 {
	e.t.Helper()
	var r struct {
		CapacityBytes int64 `json:"capacityBytes"`
	}
	if err := json.Unmarshal([]byte(e.record(segment)), &r); err != nil {
		e.t.Fatal(err)
	}
	return r.CapacityBytes
}

func TestExpansionsAreRecorded(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		params := e.params("v")
		params.CapacityBytes = 10
		create := func(name string) (volume.ID, error) {
			return p.Create(e.ctx(), provision.CreateRequest{Name: name, Parameters: params, Keys: e.keys})
		}
		id, err := create("v")
		if err != nil {
			t.Fatal(err)
		}
		if got := e.size("v"); got != 10 {
			t.Errorf("recorded at creation: %d", got)
		}
		p.grown(id, 20)
		p.hooks.reset()
		for _, c := range []provision.Change{{Required: 15}, {Required: 20, Limit: 20}, {Limit: 25}} {
			if got, err := p.change(id, c); err != nil || got != 20 {
				t.Errorf("%+v: %d, %v", c, got, err)
			}
		}
		_, err = p.change(id, provision.Change{Limit: 19})
		e.want(err, fault.OutOfRange)
		if got := e.size("v"); got != 20 || slices.Contains(p.hooks.sent(), "PutObject") {
			t.Errorf("size %d; sent %q", got, p.hooks.sent())
		}
		if again, err := create("v"); err != nil || again != id {
			t.Errorf("a retry of the creation: %s, %v", again, err)
		}
		old := p.create("old") // without a size, as an earlier driver made it
		p.grown(old, 5)
		if got := e.size("old"); got != 5 {
			t.Errorf("old: %d", got)
		}
		p.delete(id)
		_, err = p.change(id, provision.Change{Required: 30})
		e.want(err, fault.NotFound)
		_, err = p.change(volume.ID{Backend: "lab", Bucket: e.bucket, Prefix: "none/"}, provision.Change{Required: 30})
		e.want(err, fault.NotFound)
		_, err = e.process(cluster("other")).change(old, provision.Change{Required: 30})
		e.want(err, fault.NotFound)
	})
}

func TestExpansionsOfBucketsAreTagged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		name := e.bucket + "-v"
		id := p.create(name, "bucketName", "")
		e.retag(id.Bucket, map[string]string{"cost-centre": "42"})
		p.grown(id, 20)
		p.hooks.reset()
		p.grown(id, 20)
		if tags := e.bucketTags(id.Bucket); tags["s3.csi/capacity"] != "20" || tags["cost-centre"] != "42" {
			t.Errorf("tags %v", tags)
		}
		if slices.Contains(p.hooks.sent(), "PutBucketTagging") {
			t.Errorf("sent %q", p.hooks.sent())
		}
		if again := p.create(name, "bucketName", ""); again != id {
			t.Errorf("a retry of the creation: %s", again)
		}
		_, err := e.process(cluster("other")).change(id, provision.Change{Required: 30})
		e.want(err, fault.NotFound)
		p.delete(id)
		_, err = p.change(id, provision.Change{Required: 30})
		e.want(err, fault.NotFound)
	})
}

// Requests that arrive while the record is read are written together.
func TestChangesThatMeetAreOneWrite(t *testing.T) {
	for _, kind := range []string{"prefix", "bucket"} {
		t.Run(kind, func(t *testing.T) {
			each(t, func(t *testing.T, e *env) {
				p := e.process()
				name, read, write := "v", "GetObject", "PutObject"
				pairs := []string{}
				if kind == "bucket" {
					name, read, write, pairs = e.bucket+"-v", "GetBucketTagging", "PutBucketTagging", []string{"bucketName", ""}
				}
				id := p.create(name, pairs...)
				p.grown(id, 1) // what is found out once is known from here on
				const n = 20
				began, all := make(chan struct{}), make(chan struct{})
				var once sync.Once
				p.hooks.reset()
				p.hooks.set(func(h *hooks) {
					h.wait = func(ctx context.Context, operation string, done bool) {
						if operation == read && !done {
							once.Do(func() { close(began) })
							select {
							case <-all:
							case <-ctx.Done():
							}
						}
					}
				})
				var wg sync.WaitGroup
				for i := range n {
					wg.Go(func() { p.grown(id, int64(100+i)) })
				}
				<-began
				for p.Modifier.Waiting(id) < n {
					time.Sleep(time.Millisecond)
				}
				close(all)
				wg.Wait()
				if got := count(p.hooks.sent(), write); got != 1 {
					t.Errorf("%d writes for %d requests: %q", got, n, p.hooks.sent())
				}
				if kind == "prefix" {
					if got := e.size("v"); got != 100+n-1 {
						t.Errorf("size %d", got)
					}
				}
			})
		})
	}
}

// Tags have no conditional writes: the controller whose change was overwritten repeats it.
func TestTwoControllersThatMeetKeepEachOthersTags(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		a, b := e.process(), e.process()
		id := a.create(e.bucket+"-v", "bucketName", "", "tags", "old=x")
		b.grown(id, 2) // what is found out once is known from here on
		both := &meeting{n: 2, met: make(chan struct{})}
		for _, p := range []*process{a, b} {
			var first sync.Once
			p.hooks.set(func(h *hooks) {
				h.wait = func(ctx context.Context, operation string, done bool) {
					if operation == "GetBucketTagging" && done {
						first.Do(func() { both.join(ctx) })
					}
				}
			})
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := a.set(id, volume.Mutable{Tags: map[string]string{"team": "web", "old": ""}}); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if err := b.set(id, volume.Mutable{OnDelete: volume.OnDeleteRetain, Tags: map[string]string{"stage": "prod"}}); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		tags := e.bucketTags(id.Bucket)
		if _, old := tags["old"]; old || tags["team"] != "web" || tags["stage"] != "prod" || tags["s3.csi/on-delete"] != "retain" || tags["s3.csi/capacity"] != "2" {
			t.Errorf("tags %v", tags)
		}
	})
}

// meeting lets n callers go on when all have arrived.
type meeting struct {
	mu  sync.Mutex
	n   int
	met chan struct{}
}

func (m *meeting) join(ctx context.Context) {
	m.mu.Lock()
	if m.n--; m.n == 0 {
		close(m.met)
	}
	m.mu.Unlock()
	select {
	case <-m.met:
	case <-ctx.Done():
	}
}

func (p *process) set(id volume.ID, m volume.Mutable) error {
	_, err := p.change(id, provision.Change{Set: m})
	return err
}

func TestOnDeleteCanBeChanged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		for _, kind := range []string{"prefix", "bucket"} {
			name, pairs := "v", []string{"onDelete", "delete"}
			if kind == "bucket" {
				name, pairs = e.bucket+"-v", append(pairs, "bucketName", "")
			}
			id := p.create(name, pairs...)
			in := e.in(id.Bucket)
			in.put(id.Prefix + "file")
			if err := p.set(id, volume.Mutable{OnDelete: volume.OnDeleteRequireEmpty}); err != nil {
				t.Fatal(err)
			}
			e.want(p.tryDelete(id), fault.Precondition)
			if again := p.create(name, pairs...); again != id {
				t.Errorf("a retry of the creation: %s", again)
			}
			if err := p.set(id, volume.Mutable{OnDelete: volume.OnDeleteRetain}); err != nil {
				t.Fatal(err)
			}
			p.hooks.reset()
			if err := p.set(id, volume.Mutable{OnDelete: volume.OnDeleteRetain}); err != nil || count(p.hooks.sent(), "PutObject")+count(p.hooks.sent(),
				"PutBucketTagging") > 0 {
				t.Errorf("again: %v, sent %q", err, p.hooks.sent())
			}
			p.delete(id)
			in.same("files", in.keysBelow(id.Prefix), []string{id.Prefix + "file"})
			e.want(p.set(id, volume.Mutable{OnDelete: volume.OnDeleteDelete}), fault.NotFound)
		}
	})
}

// The interval of a volume with usage can be changed. Nodes do not read the settings of the others, so those are refused.
func TestUsageCanBeChangedIfItWasSet(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		hourly := volume.Mutable{Usage: volume.Usage(time.Hour)}
		for _, kind := range []string{"prefix", "bucket"} {
			name, pairs := "v", []string{"usage", "off"}
			recorded := func(id volume.ID) string {
				var r struct {
					Usage string `json:"usage"`
				}
				if err := json.Unmarshal([]byte(e.record("v")), &r); err != nil {
					t.Fatal(err)
				}
				return r.Usage
			}
			if kind == "bucket" {
				name, pairs = e.bucket+"-v", append(pairs, "bucketName", "")
				recorded = func(id volume.ID) string { return e.bucketTags(id.Bucket)["s3.csi/usage"] }
			}
			id := p.create(name, pairs...)
			for _, step := range []struct {
				set  volume.Mutable
				want string
			}{{volume.Mutable{}, "off"}, {hourly, "1h0m0s"}, {volume.Mutable{OnDelete: volume.OnDeleteRetain},
				"1h0m0s"}, {volume.Mutable{Usage: volume.UsageOff}, "off"}} {
				if err := p.set(id, step.set); err != nil || recorded(id) != step.want {
					t.Errorf("%s, %+v: %v, recorded %q", kind, step.set, err, recorded(id))
				}
			}
			p.grown(id, 7)
			if got := recorded(id); got != "off" {
				t.Errorf("%s: after an expansion %q", kind, got)
			}
			if again := p.create(name, pairs...); again != id {
				t.Errorf("a retry of the creation: %s", again)
			}
			without := p.create(name+"-w", pairs[2:]...)
			e.want(p.set(without, hourly), fault.Invalid, "mutable_parameters.usage")
			if err := p.set(without, volume.Mutable{Usage: volume.UsageOff}); err != nil {
				t.Errorf("%s: off where it is not set: %v", kind, err)
			}
		}
	})
}

func TestPurgeIsSetOnlyWhereItDeletesWhatIsTheVolumes(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		if err := p.set(id, volume.Mutable{OnDelete: volume.OnDeletePurge}); err != nil {
			t.Errorf("without versions: %v", err)
		}
		versioned := e.in(e.bucket + "-versioned")
		versioned.makeBucket(versioned.bucket)
		e.setVersioning(versioned.bucket, types.BucketVersioningStatusEnabled)
		q := versioned.process()
		versioned.put("w/older")
		versioned.remove("w/older")
		id = q.create("w")
		versioned.want(q.set(id, volume.Mutable{OnDelete: volume.OnDeletePurge}), fault.Invalid, "mutable_parameters.onDelete")
		if r := versioned.record("w"); !strings.Contains(r, `"onDelete": "delete"`) {
			t.Errorf("the record: %s", r)
		}
	})
}

func TestTagsOfBucketsCanBeChanged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		name := e.bucket + "-v"
		id := p.create(name, "bucketName", "", "tags", "team=data,stage=test,empty=")
		wants := func(when string, want map[string]string) {
			t.Helper()
			got := map[string]string{}
			for k, v := range e.bucketTags(id.Bucket) {
				if !strings.HasPrefix(k, "s3.csi/") {
					got[k] = v
				}
			}
			if !maps.Equal(got, want) {
				t.Errorf("%s: tags %v, want %v", when, got, want)
			}
		}
		wants("created", map[string]string{"team": "data", "stage": "test"})
		e.retag(id.Bucket, map[string]string{"operator": "x"})
		if err := p.set(id, volume.Mutable{Tags: map[string]string{"team": "web", "stage": "", "new": "y"}}); err != nil {
			t.Fatal(err)
		}
		wants("changed", map[string]string{"team": "web", "new": "y", "operator": "x"})
		if again := p.create(name, "bucketName", "", "tags", "team=data,stage=test,empty="); again != id {
			t.Errorf("a retry of the creation: %s", again)
		}
		e.want(p.tryCreate(name, "bucketName", "", "tags", "team=other"), fault.Exists)
		many := map[string]string{}
		for i := range 50 {
			many[fmt.Sprint("tag", i)] = "x"
		}
		e.want(p.set(id, volume.Mutable{Tags: many}), fault.Invalid, "mutable_parameters.tags")
		wants("refused", map[string]string{"team": "web", "new": "y", "operator": "x"})
		prefix := p.create("v")
		e.want(p.set(prefix, volume.Mutable{Tags: map[string]string{"a": "b"}}), fault.Invalid, "mutable_parameters.tags")
		p.delete(id)
	})
}

// A request that is refused does not keep those that it met from being done.
func TestARefusedChangeLeavesTheOthers(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		p.grown(id, 10)
		reached, resume := p.holds(1, "GetObject", false)
		results := make([]error, 3)
		var wg sync.WaitGroup
		for i, c := range []provision.Change{
			{Required: 20}, {Limit: 5}, {Set: volume.Mutable{Tags: map[string]string{"a": "b"}}},
		} {
			wg.Go(func() { _, results[i] = p.change(id, c) })
		}
		<-reached
		for p.Modifier.Waiting(id) < 3 {
			time.Sleep(time.Millisecond)
		}
		p.hooks.reset()
		resume()
		wg.Wait()
		if results[0] != nil || e.size("v") != 20 {
			t.Errorf("the good one: %v, size %d", results[0], e.size("v"))
		}
		e.want(results[1], fault.OutOfRange)
		e.want(results[2], fault.Invalid)
		if got := count(p.hooks.sent(), "PutObject"); got != 1 {
			t.Errorf("%d writes: %q", got, p.hooks.sent())
		}
	})
}
