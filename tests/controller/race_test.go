package controller

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestRacingControllersMakeOneVolume(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		processes := []*process{e.process(), e.process()}
		for round := range 12 {
			name := fmt.Sprint("v", round)
			if round%2 == 1 { // a tombstone is there: they race for generation 2
				id := processes[0].create(name)
				e.put(id.Prefix + "data")
				processes[1].delete(id)
			}
			var wg sync.WaitGroup
			ids := make([]volume.ID, 6)
			errs := make([]error, len(ids))
			for i := range ids {
				wg.Go(func() { ids[i], errs[i] = processes[i%2].settled(name) })
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			want := name + "/"
			if round%2 == 1 {
				want = name + "@2/"
			}
			for _, id := range ids {
				if id.Prefix != want {
					t.Errorf("prefix %q, want %q", id.Prefix, want)
				}
			}
		}
	})
}

func TestRacingControllersWithOtherParametersHaveOneWinner(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		processes := []*process{e.process(), e.process()}
		for round := range 12 {
			name := fmt.Sprint("v", round)
			var wg sync.WaitGroup
			errs := make([]error, 6)
			for i := range errs {
				wg.Go(func() {
					_, errs[i] = processes[i%2].settled(name, "uid", fmt.Sprint(i))
				})
			}
			wg.Wait()
			won := 0
			for _, err := range errs {
				if err == nil {
					won++
				} else {
					e.want(err, fault.Exists, "other parameters")
				}
			}
			if won != 1 {
				t.Errorf("round %d has %d winners: %v", round, won, errs)
			}
		}
	})
}

func TestAVolumeAndABasePrefixOfItsNameRace(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		processes := []*process{e.process(), e.process()}
		for round := range 12 {
			name := fmt.Sprint("n", round)
			var wg sync.WaitGroup
			var outer, inner error
			wg.Go(func() { _, outer = processes[0].settled(name) })
			wg.Go(func() {
				_, inner = processes[1].settled("inner-"+name, "prefix", name+"/deep/")
			})
			wg.Wait()
			switch {
			case outer == nil && inner == nil:
				t.Fatalf("round %d: a volume lies in another", round)
			case outer != nil && inner != nil:
				t.Errorf("round %d: nobody won: %v; %v", round, outer, inner)
			case outer != nil:
				e.want(outer, fault.Exists, "base prefix")
			default:
				e.want(inner, fault.Precondition, "lies inside volume")
			}
		}
	})
}

func TestVolumesAreNotNested(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		outer := p.create("outer", "prefix", "a/b/")
		for _, base := range []string{"a/b/outer/", "a/b/outer/c/d/"} {
			_, err := e.process().Create(e.ctx(), e.createRequest("inner", "prefix", base))
			e.want(err, fault.Precondition, "parameters.prefix", "lies inside volume")
		}
		// The same directory name elsewhere is harmless.
		p.create("inner", "prefix", "x/outer/y/")
		for _, name := range []string{"a", "b", "x", "y"} {
			_, err := e.process().Create(e.ctx(), e.createRequest(name))
			e.want(err, fault.Exists, "base prefix")
		}
		// A deleter of the first generation may still be at work there.
		p.delete(outer)
		p.create("outer")
		for _, base := range []string{"a/b/outer/", "a/b/outer/c/d/"} {
			_, err := e.process().Create(e.ctx(), e.createRequest("inner2", "prefix", base))
			e.want(err, fault.Precondition, "before it was deleted")
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
			_, err := e.process().Create(e.ctx(), e.createRequest("v"))
			e.want(err, fault.Exists, "other parameters")
			p.delete(id)
		}
		p.create("v") // x/v/ cannot lie in a later generation
		p.create("w", "prefix", "x/v/")
	})
}

func TestABucketVolumeHoldsNoPrefixVolumes(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("own", "bucketName", "", "bucketNamePrefix", e.bucket+"-")
		_, err := p.Create(e.ctx(), e.createRequest("v", "bucketName", id.Bucket))
		e.want(err, fault.Precondition, "cannot be nested")
		p.delete(id)
	})
}

func TestAServiceWithoutConditionalWritesNeedsASingleController(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		strip := func(p *process) {
			p.hooks.set(func(h *hooks) { h.strip = []string{"If-None-Match", "If-Match"} })
		}
		p := e.process()
		strip(p)
		_, err := p.Create(e.ctx(), e.createRequest("v"))
		e.want(err, fault.Precondition, "singleController: true")
		e.same("objects", e.keysBelow(""), []string{})

		p = e.process(settings("singleController: true"))
		strip(p)
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() { _, errs[i] = p.settled("v", "uid", fmt.Sprint(i)) })
		}
		wg.Wait()
		won := 0
		for i, err := range errs {
			if err != nil {
				e.want(err, fault.Exists)
				continue
			}
			won++
			id := p.create("v", "uid", fmt.Sprint(i))
			e.put(id.Prefix + "data")
			p.delete(id)
			e.state("v", "deleted")
			e.same("data", e.keysBelow("v"), []string{})
		}
		if won != 1 {
			t.Errorf("%d winners: %v", won, errs)
		}
		if id := p.create("v"); !strings.HasSuffix(id.Prefix, "@2/") {
			t.Errorf("after a tombstone comes %s", id)
		}
	})
}
