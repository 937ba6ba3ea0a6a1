package controller

import (
	"sync/atomic"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// moving is a config that a test replaces, between deletions.
type moving struct{ atomic.Pointer[backend.Config] }

func (m *moving) Config() *backend.Config { return m.Load() }

func (*moving) Changed() <-chan struct{} { return nil }

// An operator moves a backend to another endpoint while the controller runs. What the controller knows of a bucket at the old
// one is wrong for its namesake at the new one.
func TestABackendThatMovesIsUsedWhereItIsNow(t *testing.T) {
	each(t, func(t *testing.T, old *env) {
		moved := newLab(t, everything).in(old.bucket)
		moved.makeBucket(moved.bucket)
		config := &moving{}
		p := old.process(func(o *processOptions) { o.config = config; config.Store(old.config("")) })
		id := p.create("v", "prefix", "base")
		old.put(id.Prefix + "data")

		config.Store(moved.config(""))
		p.e = moved
		moved.want(p.lookup(id), fault.NotFound)
		if again := p.create("v", "prefix", "base"); again != id {
			t.Fatalf("%s, then %s", id, again)
		}
		moved.put(id.Prefix + "data")
		p.delete(id)
		if left := moved.keysBelow(id.Prefix); len(left) > 0 {
			t.Errorf("left at the new place: %q", left)
		}
		if left := old.keysBelow(id.Prefix); len(left) != 1 {
			t.Errorf("at the old place there is %q", left)
		}

		// Back again, the volume is what it was.
		config.Store(old.config(""))
		p.e = old
		p.there(id)
		p.delete(id)
	})
}
