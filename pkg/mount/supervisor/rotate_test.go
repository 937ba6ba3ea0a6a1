package supervisor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/overlap"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// renewing is a helper that makes sessions, from an order that no publication has any more.
func renewing() *mounttest.Helper {
	h := running()
	h.Status.Session = &helper.SessionStatus{Salt: []byte("salt"), OrderDigest: "another", Expires: time.Now().Add(time.Hour)}
	return h
}

// rotationOf is the rotation of a publication to the identity "new".
func rotationOf(t *testing.T, s *Supervisor, p *parts.Parts, m state.Mount, pub state.Publication) rotation {
	t.Helper()
	w := want.Mount{Publication: state.Publication{Target: pub.Target, VolumeID: pub.VolumeID}, Spec: m.Spec}
	w.Spec.Identity = "new"
	w.Plan = func(ctx context.Context, spec mount.Spec) (*creds.Grant, error) {
		return p.Creds.Plan(ctx, mount.Request{Keys: credentials.Keys{AccessKeyID: "x", SecretAccessKey: "y"}}, spec)
	}
	var err error
	if w.Grant, err = w.Plan(t.Context(), w.Spec); err != nil {
		t.Fatal(err)
	}
	return rotation{s, w, m, pub}
}

// New credentials are tried before anything is changed.
func TestRotation_BeginsWithAProof(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{Access: fault.Errorf(fault.Denied, "no")})
	m, pub := p.Secret("a", "mountpoint-s3")
	h := renewing()
	h.Serve(t, p.Store.Socket(m.Name))
	r := rotationOf(t, s, p, m, pub)
	if err := s.Rotate(t.Context(), r.w, m, pub); !fault.Is(err, fault.Denied) {
		t.Errorf("%v", err)
	}
	if after := p.Record(m.Name); after.Rotated != "" || len(h.Given()) > 0 {
		t.Errorf("the record has identity %q; the helper was given %v", after.Rotated, h.Given())
	}
}

// While it is unknown whose session the mount has, no publication joins it. The next try makes it known.
func TestRotation_IsRepeatedAfterAnInterruption(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	p.Tokens.Kind = credentials.AssumeRole
	m, pub := p.Secret("a", "mountpoint-s3")
	p.MountAt(m, p.Store.SourceDir(m.Name))
	h := renewing()
	h.Serve(t, p.Store.Socket(m.Name))
	rotate := func(ctx context.Context) (rotation, error) {
		t.Helper()
		r := rotationOf(t, s, p, m, pub)
		if err := p.Creds.Prove(t.Context(), r.w.Grant, p.Backend(), r.w.Spec); err != nil {
			t.Fatal(err)
		}
		done, err := r.inPlace(ctx)
		if err == nil && !done {
			t.Error("it was not done")
		}
		return r, err
	}
	h.Mu.Lock()
	good := h.Status
	h.Status = nil
	h.Mu.Unlock()
	r, err := rotate(mounttest.Until(t, func() bool { return h.WasAsked("hello") }))
	if err == nil {
		t.Fatal("a helper that does not answer was given a session")
	}
	if after := p.Record(m.Name); !after.Rotating || after.Joinable(r.w.Spec) || after.Joinable(m.Spec) {
		t.Errorf("interrupted: %+v", after)
	}
	h.Mu.Lock()
	h.Status = good
	h.Mu.Unlock()
	if _, err := rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := p.Record(m.Name); after.Rotating || !after.Joinable(r.w.Spec) || after.Joinable(m.Spec) {
		t.Errorf("done: %+v", after)
	}
	if got := h.Given(); len(got) != 1 || got[0].Keys == nil || got[0].Order == nil {
		t.Errorf("the helper was given %+v", got)
	}
}

// A publication is not moved away from a client that may hold closed files: the mount waits for all of its publications.
func TestRotation_WaitsForAllPublications(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	m, pub := p.Secret("a", "rclone")
	h := renewing()
	h.Serve(t, p.Store.Socket(m.Name))
	p.Publish(state.Publication{Target: "/other", VolumeID: "v", Mount: m.Name, Created: time.Now()})
	pending := func(want string) {
		t.Helper()
		if now, _, err := p.Store.Pubs.Get(t.Context(), pub.Target); err != nil || now.PendingIdentity != want || len(h.Given()) > 0 {
			t.Errorf("pending: %q, %v; the helper was given %v", now.PendingIdentity, err, h.Given())
		}
	}
	if _, err := rotationOf(t, s, p, m, pub).inPlace(t.Context()); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "/other") {
		t.Errorf("%v", err)
	}
	pending("new")
	// A republish with the old secret withdraws the rotation.
	pub.PendingIdentity = "new"
	if err := s.cleanUpPrevious(t.Context(), pub, &creds.Grant{}); err != nil {
		t.Fatal(err)
	}
	pending("")
}

// A mount that is being replaced moves its publications to its successor. One that is moved away at that moment would be lost.
func TestPublicationsMoveOnlyFromUnlockedMounts(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	m, pub := p.Secret("a", "mountpoint-s3")
	moved := pub
	moved.Mount = mount.Name(parts.Key("b"), 7)
	move := func(former string, busy bool, mount string, from ...string) {
		t.Helper()
		if err := s.Reassign(t.Context(), former, moved); fault.Is(err, fault.Busy) != busy || err != nil && !busy {
			t.Errorf("busy: %t, want %t: %v", fault.Is(err, fault.Busy), busy, err)
		}
		if now, _, err := p.Store.Pubs.Get(t.Context(), pub.Target); err != nil || now.Mount != mount || !slices.Equal(now.MovedFrom, from) {
			t.Errorf("the publication is of %s, not of %s, moved from %v, not %v; %v", now.Mount, mount, now.MovedFrom, from, err)
		}
	}
	unlock, err := s.keys.Lock(t.Context(), m.Key)
	if err != nil {
		t.Fatal(err)
	}
	move(m.Name, true, m.Name)
	unlock()
	successor := state.Mount{Name: mount.Name(m.Key, 2), Predecessors: []string{m.Name}}
	if err := p.Store.Pubs.Succeed(t.Context(), successor); err != nil {
		t.Fatal(err)
	}
	move(m.Name, true, successor.Name)
	move(successor.Name, false, moved.Mount, successor.Name) // as the next try reads it
	move(successor.Name, false, moved.Mount, successor.Name) // that was interrupted after it
}

// What a rotated mount has left to store is stored before a pod with its new secret gets a mount of its own on the same prefix.
func TestDrainingRotatedMountsAreWaitedFor(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	m, pub := p.Secret("a", "rclone")
	m.Phase, m.Rotated = state.Ending, "new"
	if err := p.Store.Write(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	r := rotationOf(t, s, p, m, pub)
	_, failed := s.ensure(t.Context(), r.w)
	var first *overlap.Error
	if !errors.As(failed, &first) || !fault.Is(failed, fault.Busy) || first.First.Name != m.Name {
		t.Fatalf("%v", failed)
	}
	h := running()
	h.Serve(t, p.Store.Socket(m.Name))
	ctx := mounttest.Until(t, func() bool { return h.WasAsked("end") })
	if again, err := s.AwaitDrained(ctx, r.w, failed); again || err == nil || !h.WasAsked("end") {
		t.Errorf("it was not stopped first: %v", err)
	}
}

// A mount that all publications were moved away from gets the new session, and stops without detaching copies in containers.
func TestFormerMountsGetTheNewSession(t *testing.T) {
	s, p := newSupervisor(t, &mounttest.UIDs{}, mounttest.S3{})
	p.Tokens.Kind = credentials.AssumeRole
	m, pub := p.Secret("a", "mountpoint-s3")
	h := renewing()
	h.Serve(t, p.Store.Socket(m.Name))
	grant := rotationOf(t, s, p, m, pub).w.Grant
	left := func() state.Mount {
		t.Helper()
		if err := s.cleanUpMovedFrom(t.Context(), m.Name, grant, false); err != nil {
			t.Fatal(err)
		}
		return p.Record(m.Name)
	}
	if now := left(); now.Superseded || len(h.Given()) > 0 {
		t.Errorf("it has a publication, and was left: %+v", now)
	}
	pub.Mount, pub.MovedFrom = mount.Name(parts.Key("b"), 2), []string{m.Name}
	p.Publish(pub)
	if now := left(); !now.Superseded || len(h.Given()) != 1 || h.Given()[0].Order == nil {
		t.Errorf("%+v; the helper was given %+v", now, h.Given())
	}
	v, err := s.readView(t.Context(), m.Name)
	if err != nil || !v.movedAway || len(v.pubs) > 0 {
		t.Errorf("%+v, %v", v, err)
	}
}
