package controller

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// dies makes the process end at its n-th request from now: that one is done, its answer is lost, and nothing is sent after it.
func (p *process) dies(n int) {
	p.hooks.set(func(h *hooks) {
		h.log = nil
		h.before = func(i int, _ string) error {
			if i > n {
				return errors.New("the process is dead") // unlike a cut connection, this is not tried again
			}
			return nil
		}
		h.after = func(i int, _ string) error {
			if i == n {
				p.kill()
				return cut()
			}
			return nil
		}
	})
}

// deaths tries a piece of work with a process that dies after each request that it has, which is as good as before the next one,
// and calls next after each death. It ends when the work was done without a death.
func deaths(t *testing.T, e *env, work func(p *process, round string) error, next func(round string, err error)) {
	t.Helper()
	for n := 1; ; n++ {
		if n > 40 {
			t.Fatal("the work has no end")
		}
		round := fmt.Sprint("n", n)
		p := e.process()
		p.dies(n)
		err := work(p, round)
		sent := len(p.hooks.sent())
		p.stop()
		next(round, err)
		if sent < n {
			return
		}
	}
}

func TestADeletionKilledAnywhereIsFinishedByAnother(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for _, onDelete := range []string{"delete", "retain", "requireEmpty"} {
			var id volume.ID
			other := e.process()
			begin := func(round string) {
				name := onDelete + "-" + round
				id = other.create(name, "onDelete", onDelete)
				neighbour := other.create(name + "x")
				e.put(neighbour.Prefix + "data")
				if onDelete != "requireEmpty" {
					e.put(numbered(id.Prefix, 5)...)
					e.upload(id.Prefix + "unfinished")
				}
			}
			work := func(p *process, round string) error {
				begin(round)
				return p.tryDelete(id)
			}
			deaths(t, e, work, func(round string, err error) {
				name := onDelete + "-" + round
				if err != nil && slices.Contains([]fault.Kind{fault.Invalid, fault.NotFound, fault.Exists, fault.Precondition, fault.Denied}, fault.KindOf(err)) {
					t.Errorf("%s: a final error: %v", name, err)
				}
				if next, createErr := other.Create(e.ctx(), e.createRequest(name, "onDelete", onDelete)); createErr == nil && err != nil {
					// Not yet begun, or done but for the answer.
					if next != id && next.Prefix != name+"@2/" {
						t.Errorf("%s: meanwhile %s", name, next)
					}
				}
				other.delete(id)
				if onDelete == "retain" {
					if n := len(e.keysBelow(id.Prefix)); n != 5 {
						t.Errorf("%s: %d objects are left, want all 5", name, n)
					}
				} else {
					e.same(name+": data", e.keysBelow(id.Prefix), []string{})
					e.same(name+": uploads", slices.DeleteFunc(e.uploads(), func(k string) bool { return k != id.Prefix+"unfinished" }), []string{})
				}
				e.same(name+": neighbour", e.keysBelow(name+"x/"), []string{name + "x/data"})
			})
		}
	})
}

func TestAPurgeKilledAnywhereIsFinishedByAnother(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		var id volume.ID
		other := e.process()
		work := func(p *process, round string) error {
			id = other.create(round, "onDelete", "purge")
			e.put(id.Prefix+"a", id.Prefix+"b")
			e.put(id.Prefix + "a")
			e.remove(id.Prefix + "b")
			return p.tryDelete(id)
		}
		deaths(t, e, work, func(round string, _ error) {
			other.delete(id)
			e.same(round+": versions", e.versionsIn(e.bucket, id.Prefix), nil)
		})
	})
}

func TestACreationKilledAnywhereIsFinishedByAnother(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		other := e.process()
		work := func(p *process, round string) error {
			_, err := p.Create(p.life, e.createRequest(round, "prefix", "base/"+round+"-dir/"))
			return err
		}
		deaths(t, e, work, func(round string, err error) {
			if err != nil && slices.Contains([]fault.Kind{fault.Invalid, fault.NotFound, fault.Exists, fault.Precondition, fault.Denied}, fault.KindOf(err)) {
				t.Errorf("%s: a final error: %v", round, err)
			}
			other.delete(other.create(round, "prefix", "base/"+round+"-dir/"))
		})
	})
}
