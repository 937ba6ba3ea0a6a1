package controller

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// dies makes the process end at its n-th request from now: that one is done, its answer is lost, and nothing is sent after it.
func (p *process) dies(n int) {
	p.hooks.set(func(h *hooks) {
		h.log, h.awaits = nil, true
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
// and calls next after each death. It ends when the work was done without a death. Those of snapshots run on one server: that each server
// takes up a copy again is shown by the copier's own test.
func deaths(t *testing.T, e *env, work func(p *process, round string) error, next func(round string, err error)) {
	t.Helper()
	for n := 1; ; n++ {
		if n > 120 {
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
	for name, c := range map[string]struct {
		onDelete string
		own      bool // it has a bucket of its own
	}{
		"delete": {"delete", false}, "retain": {"retain", false}, "requireEmpty": {"requireEmpty", false}, "purge": {"purge", false}, "bucket": {"delete", true},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, e *env) {
				pairs := []string{"onDelete", c.onDelete}
				if c.own {
					pairs = e.own(pairs...)
				}
				if c.onDelete == "purge" {
					e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
				}
				var id volume.ID
				other := e.process()
				work := func(p *process, round string) error {
					id = other.create(round, pairs...)
					e.put(other.create(round+"x").Prefix + "data")
					if c.onDelete != "requireEmpty" {
						at := e.in(id.Bucket)
						at.put(numbered(id.Prefix, 5)...)
						at.upload(id.Prefix + "unfinished")
					}
					if c.onDelete == "purge" {
						e.put(id.Prefix+"b", numbered(id.Prefix, 1)[0])
						e.remove(id.Prefix + "b")
					}
					return p.tryDelete(id)
				}
				deaths(t, e, work, func(round string, err error) {
					e.notFinal(round, err)
					if !c.own && err != nil {
						// Not yet begun, or done but for the answer.
						if next, createErr := other.ask(round, pairs...); createErr == nil && next != id && next.Prefix != round+"@2/" {
							t.Errorf("%s: meanwhile %s", round, next)
						}
					}
					other.delete(id)
					e.same(round+": neighbour", e.keysBelow(round+"x/"), []string{round + "x/data"})
					switch {
					case c.own:
						e.gone(id.Bucket)
						return
					case c.onDelete == "retain":
						e.same(round+": data", e.keysBelow(id.Prefix), numbered(id.Prefix, 5))
						return
					case c.onDelete == "purge":
						e.same(round+": versions", e.versions(id.Prefix), nil)
					}
					e.same(round+": data", e.keysBelow(id.Prefix), nil)
					e.same(round+": uploads", slices.DeleteFunc(e.uploads(), func(k string) bool { return k != id.Prefix+"unfinished" }), nil)
				})
			})
		})
	}
}

func TestACreationKilledAnywhereIsFinishedByAnother(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		other := e.process()
		work := func(p *process, round string) error { return p.tryCreate(round, "prefix", "base/"+round+"-dir/") }
		deaths(t, e, work, func(round string, err error) {
			e.notFinal(round, err)
			other.delete(other.create(round, "prefix", "base/"+round+"-dir/"))
		})
	})
}
