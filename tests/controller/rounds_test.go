package controller

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// pairListings makes each listing of a process wait for another one, so that those that are sent together overlap on a busy machine, too.
// One that stays alone goes on after a while.
func (p *process) pairListings() {
	const alone = 2 * time.Second
	var mu sync.Mutex
	var first chan struct{} // closed when the second has begun; nil: none waits
	p.hooks.set(func(h *hooks) {
		h.wait = func(ctx context.Context, operation string, done bool) {
			if done || !strings.HasPrefix(operation, "List") {
				return
			}
			mu.Lock()
			if first != nil {
				close(first)
				first = nil
				mu.Unlock()
				return
			}
			mine := make(chan struct{})
			first = mine
			mu.Unlock()
			select {
			case <-mine:
			case <-ctx.Done():
			case <-time.After(alone):
				mu.Lock()
				if first == mine {
					first = nil
				}
				mu.Unlock()
			}
		}
	})
}

// deleteCounted deletes a volume and returns how many round trips that took one after the other, and the requests in order.
func (p *process) deleteCounted(id volume.ID) (rounds int, sent []string) {
	p.e.t.Helper()
	p.hooks.reset()
	p.delete(id)
	p.hooks.set(func(h *hooks) { rounds, sent = h.rounds, slices.Clone(h.log) })
	return rounds, sent
}

func TestAnEmptyVolumeIsDeletedInFewRoundTrips(t *testing.T) {
	look := []string{"ListMultipartUploads", "ListObjectsV2"}
	for name, c := range map[string]struct {
		pairs    []string
		own      bool
		rounds   int
		requests []string // those of one round trip sorted
	}{
		"delete": {rounds: 4, requests: slices.Concat([]string{"GetObject", "PutObject"}, look, []string{"PutObject"})},
		"purge":  {[]string{"onDelete", "purge"}, false, 4, []string{"GetObject", "PutObject", "ListMultipartUploads", "ListObjectVersions", "PutObject"}},
		"retain": {[]string{"onDelete", "retain"}, false, 2, []string{"GetObject", "PutObject"}},
		// It is looked at before and after the change of the state.
		"requireEmpty": {[]string{"onDelete", "requireEmpty"}, false, 5, slices.Concat([]string{"GetObject"}, look, []string{"PutObject"}, look,
			[]string{"PutObject"})},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, e *env) {
				if name == "purge" {
					e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
				}
				p := e.process()
				p.delete(p.create("warm", c.pairs...)) // what is found out once per bucket
				id := p.create("v", c.pairs...)
				p.pairListings()
				rounds, sent := p.deleteCounted(id)
				for i := range len(sent) - 1 {
					if strings.HasPrefix(sent[i], "List") && strings.HasPrefix(sent[i+1], "List") && sent[i] > sent[i+1] {
						sent[i], sent[i+1] = sent[i+1], sent[i]
					}
				}
				e.same("requests", sent, c.requests)
				if rounds > c.rounds {
					t.Errorf("%d round trips, want %d", rounds, c.rounds)
				}
				e.state("v", "deleted")
			})
		})
	}
}

func TestAnEmptyBucketIsDeletedInFewRoundTrips(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v", e.own()...)
		p.pairListings()
		rounds, sent := p.deleteCounted(id)
		// Upload listings are tested in every bucket.
		test := 1 + slices.Index(sent, "AbortMultipartUpload") - slices.Index(sent, "CreateMultipartUpload")
		if rounds > 7+test {
			t.Errorf("%d round trips for %v, want at most 7 and %d of the test", rounds, sent, test)
		}
		e.gone(id.Bucket)
	})
}
