package controller

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
)

func TestASlowServiceIsWaitedFor(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(numbered(id.Prefix, 200)...)
		p.refuseFirst(3, 503, "SlowDown", "DeleteObjects", "ListObjectsV2")
		// The first listing is the RPC's own look, before any run; it is not the throttled one.
		deadline := time.Now().Add(50 * time.Second)
		for err := p.tryDelete(id); err != nil; err = p.tryDelete(id) {
			if !fault.Is(err, fault.Busy) && !fault.Is(err, fault.Unavailable) || time.Now().After(deadline) {
				t.Fatal(err)
			}
		}
		e.same("data", e.keysBelow("v/"), nil)
		e.state("v", "deleted")
	})
}

func TestDeletionOutlivesTheCallAndIsJoined(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(numbered(id.Prefix, 1010)...)
		p.hooks.reset()
		reached, resume := p.holds(2, "DeleteObjects", false)
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
		for _, creator := range []*process{p, e.process()} {
			e.want(creator.tryCreate("v"), fault.Busy, "being deleted")
		}
		resume()
		if err := <-first; err != nil {
			t.Error(err)
		}
		e.same("data", e.keysBelow("v/"), nil)
		if n := strings.Count(strings.Join(p.hooks.sent(), " "), "CreateMultipartUpload"); n != 1 {
			t.Errorf("%d runs", n)
		}
	})
}

func TestDeniedIsNotAbsent(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for i, operation := range []string{"HeadBucket", "GetObject", "ListObjectsV2", "DeleteObjects", "PutObject", "ListMultipartUploads"} {
			id := e.process().create(fmt.Sprint("v", i))
			e.put(id.Prefix + "data")
			p := e.process()
			operations := []string{operation}
			if operation == "HeadBucket" {
				operations = append(operations, "ListObjectsV2")
			}
			p.refuse(403, "AccessDenied", operations...)
			e.want(p.tryDelete(id), fault.Denied)
			e.same("data after "+operation, e.keysBelow(id.Prefix), []string{id.Prefix + "data"})
			e.process().delete(id)
		}
	})
}
