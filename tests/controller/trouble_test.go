package controller

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
)

func TestAServiceWithoutMultiDelete(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				if operation == "DeleteObjects" {
					return refusal(501, "NotImplemented")
				}
				return nil
			}
		})
		id := p.create("v")
		e.put(numbered(id.Prefix, 20)...)
		p.delete(id)
		e.same("data", e.keysBelow("v/"), []string{})
	})
}

func TestASlowServiceIsWaitedFor(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(numbered(id.Prefix, 200)...)
		refusals := map[string]int{}
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				p.hooks.mu.Lock()
				defer p.hooks.mu.Unlock()
				if operation == "DeleteObjects" || operation == "ListObjectsV2" {
					if refusals[operation]++; refusals[operation] <= 3 {
						return refusal(503, "SlowDown")
					}
				}
				return nil
			}
		})
		// The first listing is the RPC's own look, before any run; it is not the throttled one.
		deadline := time.Now().Add(50 * time.Second)
		for err := p.tryDelete(id); err != nil; err = p.tryDelete(id) {
			if !fault.Is(err, fault.Busy) && !fault.Is(err, fault.Unavailable) || time.Now().After(deadline) {
				t.Fatal(err)
			}
		}
		e.same("data", e.keysBelow("v/"), []string{})
		e.state("v", "deleted")
	})
}

func TestDeletionOutlivesTheCallAndIsJoined(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(numbered(id.Prefix, 1010)...)
		gate, reached := make(chan struct{}), make(chan struct{})
		var batches atomic.Int32
		p.hooks.set(func(h *hooks) {
			h.log = nil
			h.wait = func(ctx context.Context, operation string) {
				if operation != "DeleteObjects" || batches.Add(1) != 2 {
					return
				}
				close(reached)
				select {
				case <-gate:
				case <-ctx.Done():
				}
			}
		})
		first := make(chan error, 1)
		go func() { first <- p.tryDelete(id) }()
		<-reached
		var calls sync.WaitGroup
		for range 5 {
			calls.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
				defer cancel()
				err := p.Delete(ctx, provision.DeleteRequest{ID: id, Keys: e.keys})
				if !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "deleting volume "+id.String()+": so far ") {
					t.Errorf("%v", err)
				}
			})
		}
		calls.Wait()
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Busy, "being deleted")
		_, err = e.process().Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Busy, "being deleted")
		close(gate)
		if err := <-first; err != nil {
			t.Error(err)
		}
		e.same("data", e.keysBelow("v/"), []string{})
		if n := strings.Count(strings.Join(p.hooks.sent(), " "), "CreateMultipartUpload"); n != 1 {
			t.Errorf("%d runs", n)
		}
	})
}

func TestAStoppedDriversDeletionIsResumed(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(numbered(id.Prefix, 20)...)
		reached := make(chan struct{})
		var once sync.Once
		p.hooks.set(func(h *hooks) {
			h.wait = func(ctx context.Context, operation string) {
				if operation == "DeleteObjects" {
					once.Do(func() { close(reached) })
					<-ctx.Done()
				}
			}
		})
		result := make(chan error, 1)
		go func() { result <- p.tryDelete(id) }()
		<-reached
		p.stop()
		e.want(<-result, fault.Busy, "shutting down")
		e.state("v", "deleting")
		e.process().delete(id)
		e.same("data", e.keysBelow("v/"), []string{})
		e.state("v", "deleted")
	})
}

func TestDeniedIsNotAbsent(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for i, operation := range []string{"HeadBucket", "GetObject", "ListObjectsV2", "DeleteObjects", "PutObject", "ListMultipartUploads"} {
			id := e.process().create(fmt.Sprint("v", i))
			e.put(id.Prefix + "data")
			p := e.process()
			p.hooks.set(func(h *hooks) {
				h.answer = func(_ int, o string) *http.Response {
					if o == operation || operation == "HeadBucket" && o == "ListObjectsV2" {
						return refusal(403, "AccessDenied")
					}
					return nil
				}
			})
			e.want(p.tryDelete(id), fault.Denied)
			e.same("data after "+operation, e.keysBelow(id.Prefix), []string{id.Prefix + "data"})
			e.process().delete(id)
		}
	})
}

func TestEveryErrorOfAMultiDeleteCounts(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix+"a", id.Prefix+"b")
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				if operation != "DeleteObjects" {
					return nil
				}
				r := refusal(200, "")
				body := `<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>v/a</Key><Code>AccessDenied</Code><Message>no</Message></Error><Error><Key>v/b</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>`
				r.Body, r.ContentLength = readCloser(body), int64(len(body))
				return r
			}
		})
		e.want(p.tryDelete(id), fault.Denied, "2 objects of", `"v/a"`, "AccessDenied")
		e.state("v", "deleting")
		p.hooks.set(func(h *hooks) { h.answer = nil })
		p.delete(id)
	})
}

func TestAListingThatGoesAstrayDeletesNothing(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("vol-1")
		e.put(id.Prefix+"data", "vol-10/data")
		p.hooks.set(func(h *hooks) {
			h.answer = func(_ int, operation string) *http.Response {
				if operation != "ListObjectsV2" {
					return nil
				}
				r := refusal(200, "")
				r.Body = readCloser(`<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Contents><Key>vol-1/data</Key></Contents><Contents><Key>vol-10/data</Key></Contents></ListBucketResult>`)
				r.ContentLength = -1
				return r
			}
		})
		e.want(p.tryDelete(id), fault.Unavailable, "vol-10/data", "nothing more is deleted")
		e.same("data", e.keysBelow("vol-"), []string{"vol-1/data", "vol-10/data"})
	})
}
