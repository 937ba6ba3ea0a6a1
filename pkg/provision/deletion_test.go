//go:build !race

package provision_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// answerOf calls a process, carries out all its requests and returns the answer.
func (w *world) answerOf(run func(ctx context.Context, p *process) error) (err error) {
	p := w.process(0)
	w.call(p, time.Minute, "test", func(ctx context.Context) error { return run(ctx, p) }, func(c *call) { err = c.err })
	w.quiet()
	return err
}

func TestDelete_OwnTestObjectsAreNoUsersData(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		defer w.close()
		params, err := volume.ParseParameters(map[string]string{"backend": "lab", "onDelete": "requireEmpty"}, "v")
		if err != nil {
			t.Fatal(err)
		}
		var id volume.ID
		if err := w.answerOf(func(ctx context.Context, p *process) (err error) {
			id, err = p.Create(ctx, provision.CreateRequest{Name: "v", Parameters: params})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		remove := func() error {
			return w.answerOf(func(ctx context.Context, p *process) error { return p.Delete(ctx, provision.DeleteRequest{ID: id}) })
		}
		b := w.s.buckets[id.Bucket]
		b.versioned = true
		w.s.put(id.Bucket, buckets.Probes+"object", "test")
		w.s.remove(id.Bucket, buckets.Probes+"object", "") // its version is left
		w.s.put(id.Bucket, buckets.Probes+"other", "test")
		b.uploads["lost"] = &upload{key: buckets.Probes + "upload"}
		b.uploads["user"] = &upload{key: "data"}
		if err := remove(); !fault.Is(err, fault.Precondition) {
			t.Errorf("with an unfinished upload of a user: %v", err)
		}
		delete(b.uploads, "user")
		w.s.put(id.Bucket, "zz", "user")
		if err := remove(); !fault.Is(err, fault.Precondition) {
			t.Errorf("with an object of a user: %v", err)
		}
		delete(b.objects, "zz")
		if err := remove(); err != nil || w.s.buckets[id.Bucket] != nil {
			t.Errorf("with test objects only: %v; the bucket is there: %t", err, w.s.buckets[id.Bucket] != nil)
		}
	})
}
