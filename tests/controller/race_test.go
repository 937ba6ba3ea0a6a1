package controller

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// race does n things at once.
func race(n int, do func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = do(i) })
	}
	wg.Wait()
	return errs
}

// winner is the only one without an error. The others' errors must be of that kind.
func (e *env) winner(errs []error, kind fault.Kind, words ...string) int {
	e.t.Helper()
	won := []int{}
	for i, err := range errs {
		if err == nil {
			won = append(won, i)
		} else {
			e.want(err, kind, words...)
		}
	}
	if len(won) != 1 {
		e.t.Fatalf("%d winners: %v", len(won), errs)
	}
	return won[0]
}

func TestVolumesAreNotNested(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		outer := p.create("outer", "prefix", "a/b/")
		bases := []string{"a/b/outer/", "a/b/outer/c/d/"}
		for _, base := range bases {
			e.want(e.process().tryCreate("inner", "prefix", base), fault.Precondition, "parameters.prefix", "lies inside volume")
		}
		// The same directory name elsewhere is harmless.
		p.create("inner", "prefix", "x/outer/y/")
		for _, name := range []string{"a", "b", "x", "y"} {
			e.want(e.process().tryCreate(name), fault.Exists, "base prefix")
		}
		// A deleter of the first generation may still be at work there.
		p.delete(outer)
		p.create("outer")
		for _, base := range bases {
			e.want(e.process().tryCreate("inner2", "prefix", base), fault.Precondition, "before it was deleted")
		}
		// The second generation is called otherwise.
		p.create("inner3", "prefix", "outer/")
	})
}

func TestABasePrefixMayHoldTheVolumesOwnName(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		with := []string{"prefix", "x/${pv.name}", "csi.storage.k8s.io/pv/name", "v"}
		for _, want := range []string{"x/v/v/", "x/v/v@2/"} {
			id := p.create("v", with...)
			if id.Prefix != want {
				t.Errorf("prefix %q, want %q", id.Prefix, want)
			}
			p.create("v", with...)
			e.want(e.process().tryCreate("v"), fault.Exists, "other parameters")
			p.delete(id)
		}
		p.create("v") // x/v/ cannot lie in a later generation
		p.create("w", "prefix", "x/v/")
	})
}

func TestAServiceWithoutConditionalWritesNeedsASingleController(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		stripped := func(options ...func(*processOptions)) *process {
			p := e.process(options...)
			p.hooks.set(func(h *hooks) { h.strip = []string{"If-None-Match", "If-Match"} })
			return p
		}
		e.want(stripped().tryCreate("v"), fault.Precondition, "singleController: true")
		e.same("objects", e.keysBelow(""), nil)

		p := stripped(settings("singleController: true"))
		won := e.winner(race(8, func(i int) error {
			_, err := p.settled("v", "uid", fmt.Sprint(i))
			return err
		}), fault.Exists)
		id := p.create("v", "uid", fmt.Sprint(won))
		e.put(id.Prefix + "data")
		p.delete(id)
		e.state("v", "deleted")
		e.same("data", e.keysBelow("v"), nil)
		if id := p.create("v"); !strings.HasSuffix(id.Prefix, "@2/") {
			t.Errorf("after a tombstone comes %s", id)
		}
	})
}
