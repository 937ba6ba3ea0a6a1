package controller

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// patient is a lag that no test outlasts: what has to wait for it does not end.
func patient(o *processOptions) { o.copyLag = time.Hour }

// copies are the two kinds of copies that have claims.
type copies struct {
	ask    func(p *process, name string, source volume.ID) error
	delete func(p *process, name string) error
	state  func(e *env, name string) string // the record
	data   func(name string) string
	// segment is which PutObject of a request is that of the first segment of the manifest; those before are of the record.
	segment int64
}

func eachCopy(t *testing.T, f func(t *testing.T, e *env, c copies)) {
	t.Helper()
	for what, c := range map[string]copies{
		"snapshot": {
			ask: func(p *process, name string, source volume.ID) error {
				_, err := p.askSnapshot(name, source)
				return err
			},
			delete: func(p *process, name string) error {
				return p.tryDeleteSnapshot(volume.SnapshotID{Backend: "lab", Bucket: p.e.bucket, Segment: name, Generation: 1})
			},
			state:   func(e *env, name string) string { return e.object(".s3-csi/snapshots/" + name) },
			data:    func(name string) string { return ".s3-csi/snapshots/" + name + "@1/" },
			segment: 4,
		},
		"volume": {
			ask: func(p *process, name string, source volume.ID) error {
				_, err := p.askFrom(name, volume.Content{Volume: source})
				return err
			},
			delete: func(p *process, name string) error {
				return p.tryDelete(volume.ID{Backend: "lab", Bucket: p.e.bucket, Prefix: name + "/"})
			},
			state:   (*env).record,
			data:    func(name string) string { return ".s3-csi/fills/" + name + "/" },
			segment: 3,
		},
	} {
		t.Run(what, func(t *testing.T) {
			one(t, func(t *testing.T, e *env) { f(t, e, c) })
		})
	}
}

// soon fails the test if a call takes as long as if it had to wait for another controller.
func (e *env) soon(what string, call func() error) {
	e.t.Helper()
	for late := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := call()
		switch {
		case err == nil:
			return
		case !fault.Is(err, fault.Busy) || time.Now().After(late):
			e.t.Fatalf("%s: %v", what, err)
		}
	}
}

// eventually waits until a condition holds.
func (e *env) eventually(what string, holds func() bool) {
	e.t.Helper()
	for late := time.Now().Add(30 * time.Second); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(late) {
			e.t.Fatalf("%s: not after half a minute", what)
		}
	}
}

// failsOnce lets a run of the process fail in its second copy of an object, in a way that a retry may mend.
func (p *process) failsOnce() {
	var copied atomic.Int64
	p.hooks.set(func(h *hooks) {
		h.before = func(_ int, operation string) error {
			if operation == "CopyObject" && copied.Add(1) == 2 {
				return errors.New("the test fails this one")
			}
			return nil
		}
	})
}

// No run has to wait for one that has ended, in this process or in another one.
func TestARunThatEndedIsNotWaitedFor(t *testing.T) {
	eachCopy(t, func(t *testing.T, e *env, c copies) {
		p, other := e.process(patient), e.process(patient)
		source := other.create("v")
		e.fill(source, 5)
		fail := func(name string) {
			t.Helper()
			p.failsOnce()
			if err := c.ask(p, name, source); err == nil || !strings.Contains(err.Error(), "the test fails this one") {
				t.Fatalf("%s: %v", name, err)
			}
		}
		fail("a")
		e.soon("again", func() error { return c.ask(p, "a", source) })
		fail("b")
		e.soon("by another controller", func() error { return c.ask(other, "b", source) })
		fail("c")
		e.soon("deletion", func() error { return c.delete(p, "c") })
		fail("d")
		e.soon("deletion by another controller", func() error { return c.delete(other, "d") })
		for _, name := range []string{"a", "b"} {
			e.soon("deletion of "+name, func() error { return c.delete(p, name) })
		}

		// The controller is stopped in the middle.
		reached, _ := p.holds(2, "CopyObject", true)
		stopped := make(chan error, 1)
		go func() { stopped <- c.ask(p, "e", source) }()
		<-reached
		p.stop()
		if err := <-stopped; err != nil {
			e.notFinal("stopped", err)
		}
		e.soon("after a stop", func() error { return c.ask(other, "e", source) })
		e.soon("deletion after a stop", func() error { return c.delete(other, "e") })
		other.delete(source)
		e.onlyRecords()
	})
}

// A run that another controller takes over from says when it has stopped, and is not waited for any longer.
func TestATakeOverFromARunThatStops(t *testing.T) {
	eachCopy(t, func(t *testing.T, e *env, c copies) {
		late := func(o *processOptions) { o.checkEvery = time.Nanosecond }
		p, other := e.process(patient, late), e.process(patient, late)
		source := other.create("v")
		e.fill(source, 50)
		reached, resume := p.stops("CopyObject")
		stopped := make(chan error, 1)
		go func() { stopped <- c.ask(p, "n", source) }()
		<-reached
		made := make(chan error, 1)
		go func() { made <- c.ask(other, "n", source) }()
		e.eventually("the take-over", func() bool { return len(claimsIn(c.state(e, "n"))) == 2 })
		resume()
		e.want(<-stopped, fault.Busy, "another controller")
		if err := <-made; err != nil {
			t.Error(err)
		}
		e.soon("deletion", func() error { return c.delete(p, "n") })
		other.delete(source)
		e.onlyRecords()
	})
}

// claimsIn returns the claims in a record.
func claimsIn(record string) []string {
	_, rest, _ := strings.Cut(record, `ers": [`)
	list, _, _ := strings.Cut(rest, "]")
	return strings.Fields(list)
}

// A run whose claim stays in the record is not waited for by its own process.
func TestAClaimThatCouldNotBeReleased(t *testing.T) {
	eachCopy(t, func(t *testing.T, e *env, c copies) {
		p, other := e.process(patient), e.process(patient)
		source := other.create("v")
		e.fill(source, 5)
		for _, name := range []string{"a", "b"} {
			p.failsOnce()
			fails := p.hooks.before
			var failed atomic.Bool
			p.hooks.set(func(h *hooks) {
				h.before = func(n int, operation string) error {
					if failed.Load() {
						return errors.New("the test fails all that follows")
					}
					err := fails(n, operation)
					if err != nil { // not Store(err != nil): another request may begin at the same time
						failed.Store(true)
					}
					return err
				}
			})
			if err := c.ask(p, name, source); err == nil {
				t.Fatal("the copy was made")
			}
			p.hooks.set(func(h *hooks) { h.before = nil })
		}
		if r := c.state(e, "a"); len(claimsIn(r)) != 1 {
			t.Fatalf("the claim was released: %s", r)
		}
		e.soon("again", func() error { return c.ask(p, "a", source) })
		e.soon("deletion of what is made", func() error { return c.delete(other, "a") })

		ctx, cancel := context.WithTimeout(e.ctx(), 2*time.Second)
		defer cancel()
		life := other.life
		other.life = ctx
		e.want(c.delete(other, "b"), fault.Busy, "waiting until a copy")
		other.life = life
		e.soon("deletion", func() error { return c.delete(p, "b") })
		e.soon("the other one's deletion", func() error { return c.delete(other, "b") })
		p.delete(source)
		e.onlyRecords()
	})
}

// inFlight holds up the segment of a manifest that a process sends, until resume is called. brokenOff reports whether the process broke the request
// off: the service would carry it out in spite of that.
func (p *process) inFlight(c copies) (sent <-chan struct{}, resume func(), brokenOff *atomic.Bool) {
	held, gate := make(chan struct{}), make(chan struct{})
	brokenOff = &atomic.Bool{}
	var puts atomic.Int64
	p.hooks.set(func(h *hooks) {
		h.wait = func(ctx context.Context, operation string, done bool) {
			if operation != "PutObject" || done || puts.Add(1) != c.segment {
				return
			}
			close(held)
			select {
			case <-gate:
			case <-ctx.Done():
				brokenOff.Store(true)
				<-gate
			}
		}
	})
	return held, sync.OnceFunc(func() { close(gate) }), brokenOff
}

// The segment that a deleted copy has sent is not left behind, whichever process deletes it, and whether or not the process that sent it lives on.
func TestADeletionLeavesNothingOfWhatWasInFlight(t *testing.T) {
	for what, way := range map[string]struct{ same, dies bool }{"by the same controller": {same: true}, "by another controller": {}, "of a controller that dies": {dies: true}} {
		t.Run(what, func(t *testing.T) {
			eachCopy(t, func(t *testing.T, e *env, c copies) {
				lag := patient
				if way.dies {
					lag = func(o *processOptions) { o.copyLag = 2 * time.Second }
				}
				p := e.process(lag)
				by := p
				if !way.same {
					by = e.process(lag)
				}
				source := p.create("v") // without objects
				for _, warm := range []*process{p, by} {
					e.soon("warm", func() error { return c.ask(warm, "warm", source) })
				}
				sent, resume, brokenOff := p.inFlight(c)
				defer resume()
				made := make(chan error, 1)
				go func() { made <- c.ask(p, "n", source) }()
				<-sent
				deleted := make(chan error, 1)
				began := time.Now()
				go func() { deleted <- c.delete(by, "n") }()
				if way.same {
					time.Sleep(300 * time.Millisecond)
				} else {
					e.eventually("the deletion begins", func() bool {
						return strings.Contains(c.state(e, "n"), `"state": "delet`)
					})
				}
				if way.dies {
					p.hooks.set(func(h *hooks) {
						h.before = func(_ int, operation string) error {
							if operation != "PutObject" {
								return errors.New("the process is dead")
							}
							return nil
						}
						h.after = func(int, string) error { p.kill(); return cut() }
					})
				}
				resume()
				if err := <-made; err == nil || brokenOff.Load() {
					t.Errorf("the copy: %v; its request was broken off: %t", err, brokenOff.Load())
				}
				if err := <-deleted; err != nil {
					t.Error(err)
				}
				if took := time.Since(began); way.dies && took < 2*time.Second {
					t.Errorf("deleted after %s, while a request of another controller may be under way", took)
				}
				by.hooks.set(func(h *hooks) { h.wait = nil })
				e.same("left", e.keysBelow(c.data("n")), nil)
				e.soon("deletion of warm", func() error { return c.delete(by, "warm") })
				by.delete(source)
				e.onlyRecords()
			})
		})
	}
}

// A request that ended without an answer may still be carried out. The process that sent it waits, too.
func TestADeletionWaitsForRequestsWithoutAnAnswer(t *testing.T) {
	eachCopy(t, func(t *testing.T, e *env, c copies) {
		const lag = 2 * time.Second
		p := e.process(func(o *processOptions) { o.copyLag = lag })
		source := p.create("v")
		e.fill(source, 5)
		var lost atomic.Int64
		p.hooks.set(func(h *hooks) {
			h.after = func(_ int, operation string) error {
				if operation == "CopyObject" {
					lost.Store(time.Now().UnixNano())
					return cut()
				}
				return nil
			}
		})
		made := make(chan error, 1)
		go func() { made <- c.ask(p, "n", source) }()
		e.eventually("an answer is lost", func() bool { return lost.Load() > 0 })
		if err := c.delete(p, "n"); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(time.Unix(0, lost.Load())); waited < lag {
			t.Errorf("deleted %s after the last request", waited)
		}
		if err := <-made; err == nil {
			t.Error("the copy was made")
		}
		p.hooks.set(func(h *hooks) { h.after = nil })
		p.delete(source)
		e.onlyRecords()
	})
}
