package controller

import (
	"errors"
	"strings"
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
		},
		"volume": {
			ask: func(p *process, name string, source volume.ID) error {
				_, err := p.askFrom(name, volume.Content{Volume: source})
				return err
			},
			delete: func(p *process, name string) error {
				return p.tryDelete(volume.ID{Backend: "lab", Bucket: p.e.bucket, Prefix: name + "/"})
			},
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
