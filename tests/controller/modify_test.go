package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
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
	return p.Modify(ctx, provision.ModifyRequest{ID: id, Keys: p.e.keys, RoleARN: p.role, Change: c})
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
