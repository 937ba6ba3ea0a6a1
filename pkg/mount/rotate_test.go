package mount

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// secretMount is a mount of a secret that shows at a target.
func secretMount(t *testing.T, m *Manager, letter, client string) (record, publication) {
	t.Helper()
	rec := mountOf(t, m, letter, "1", client)
	rec.Spec = Spec{Backend: "default", Bucket: "bucket", Client: client, Source: credentials.SourceSecret, Identity: "old"}
	if err := m.store.writeRecord(rec); err != nil {
		t.Fatal(err)
	}
	show(t, m, rec)
	pubs, err := m.store.publicationsOf(rec.Name)
	if err != nil || len(pubs) != 1 {
		t.Fatal(pubs, err)
	}
	return rec, pubs[0]
}

func newSecret(rec record) Spec {
	spec := rec.Spec
	spec.Identity = "new"
	return spec
}

// A secret that does not work is found out before anything is touched.
func TestARotationBeginsWithAProof(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{access: fault.Errorf(fault.Denied, "no")})
	rec, p := secretMount(t, m, "a", "mountpoint-s3")
	h := renewing()
	h.serve(t, m, rec.Name)
	s, err := m.planFor(t.Context(), newSecret(rec), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.order.Keys = credentials.Keys{AccessKeyID: "x", SecretAccessKey: "y"}
	err = m.rotate(t.Context(), Request{VolumeID: "v", Target: p.Target}, newSecret(rec), sight{shows: shownRotated, rec: rec, pub: p}, s)
	if !fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), "keeps the session") {
		t.Errorf("%v", err)
	}
	if after, _, err := m.store.record(rec.Name); err != nil || after.Rotated != "" || len(h.got()) > 0 {
		t.Errorf("the record says %q, %v; the helper was given %v", after.Rotated, err, h.got())
	}
}

// While it is not known whose session the mount has, nobody joins it; the next try makes it known.
func TestARotationThatIsCutShortIsDoneAgain(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	m.Sessions = (&tokens{}).wants(credentials.AssumeRole)
	rec, p := secretMount(t, m, "a", "mountpoint-s3")
	hangAt(t, rec, m.store.sourceDir(rec.Name))
	h := renewing()
	h.serve(t, m, rec.Name)
	spec := newSecret(rec)
	rotate := func(ctx context.Context) error {
		t.Helper()
		s, err := m.planFor(t.Context(), spec, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.prove(t.Context(), s, mustBackend(t, m), spec); err != nil {
			t.Fatal(err)
		}
		done, err := m.rotateInPlace(ctx, Request{VolumeID: "v", Target: p.Target}, spec, sight{shows: shownRotated, rec: rec, pub: p}, s)
		if err == nil && !done {
			t.Error("it was not done")
		}
		return err
	}
	h.mu.Lock()
	good := h.status
	h.status = nil
	h.mu.Unlock()
	if err := rotate(until(t, func() bool { return h.wasAsked("hello") })); err == nil {
		t.Fatal("a helper that does not answer was given a session")
	}
	after, _, err := m.store.record(rec.Name)
	if err != nil || !after.Rotating || after.joinable(spec) || after.joinable(rec.Spec) {
		t.Errorf("cut short: %+v, %v", after, err)
	}
	h.mu.Lock()
	h.status = good
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // for so long the client, which hangs, is asked whether it works
	defer cancel()
	if err := rotate(ctx); err != nil {
		t.Fatal(err)
	}
	after, _, err = m.store.record(rec.Name)
	if err != nil || after.Rotating || !after.joinable(spec) || after.joinable(rec.Spec) {
		t.Errorf("done: %+v, %v", after, err)
	}
	if got := h.got(); len(got) != 1 || got[0].Keys == nil || got[0].Order == nil {
		t.Errorf("the helper was given %+v", got)
	}
}

// A client that may hold back what was closed is not moved away from: its mount waits until all have come with the new secret.
func TestARotationWaitsForAllWhereTheClientHoldsBack(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec, p := secretMount(t, m, "a", "rclone")
	h := renewing()
	h.serve(t, m, rec.Name)
	other := publication{Target: "/other", VolumeID: "v", Mount: rec.Name, Created: time.Now()}
	if err := m.store.writePublication(other); err != nil {
		t.Fatal(err)
	}
	before := sight{shows: shownRotated, rec: rec, pub: p}
	if _, err := m.rotateInPlace(t.Context(), Request{VolumeID: "v", Target: p.Target}, newSecret(rec), before, &supply{}); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "/other") {
		t.Errorf("%v", err)
	}
	if now, _, err := m.store.publication(p.Target); err != nil || now.Wants != "new" || len(h.got()) > 0 {
		t.Errorf("it wants %q, %v; the helper was given %v", now.Wants, err, h.got())
	}
	// Who comes with the old secret again does not want the new one any more.
	if err := m.stayed(t.Context(), publication{Target: p.Target, VolumeID: "v", Mount: rec.Name, Wants: "new"}, &supply{}); err != nil {
		t.Fatal(err)
	}
	if now, _, err := m.store.publication(p.Target); err != nil || now.Wants != "" {
		t.Errorf("it wants %q, %v", now.Wants, err)
	}
}

// A mount that is being replaced gives its publications to its successor. One that moves away in that moment would be lost.
func TestAPublicationMovesWhileNobodyReplacesItsMount(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec, p := secretMount(t, m, "a", "mountpoint-s3")
	before := sight{shows: shownRotated, rec: rec, pub: p}
	moved := p
	moved.Mount, moved.From = mountName(strings.Repeat("b", 24), 7), []string{rec.Name}
	move := func(busy bool, mount string) {
		t.Helper()
		if err := m.reassign(t.Context(), before, moved); fault.Is(err, fault.Busy) != busy || err != nil && !busy {
			t.Errorf("busy: %t, want %t: %v", fault.Is(err, fault.Busy), busy, err)
		}
		if now, _, err := m.store.publication(p.Target); err != nil || now.Mount != mount {
			t.Errorf("the publication is %s's, not %s's; %v", now.Mount, mount, err)
		}
	}

	unlock, err := m.keys.Lock(t.Context(), rec.Key)
	if err != nil {
		t.Fatal(err)
	}
	move(true, rec.Name)
	unlock()
	fresh := record{Name: mountName(rec.Key, 2), Former: []string{rec.Name}}
	if err := m.store.succeed(fresh); err != nil {
		t.Fatal(err)
	}
	move(true, fresh.Name)
	before.pub.Mount = fresh.Name // as the next try sees it
	move(false, moved.Mount)
}

// What a rotated mount has left to store is stored before a pod with its new secret gets a mount of its own on the same prefix.
func TestARotatedMountThatEndsIsWaitedFor(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec, _ := secretMount(t, m, "a", "rclone")
	rec.Phase, rec.Rotated = phaseEnding, "new"
	if err := m.store.writeRecord(rec); err != nil {
		t.Fatal(err)
	}
	unlock, err := m.keys.Lock(t.Context(), rec.Key)
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.ensure(t.Context(), Request{VolumeID: "v"}, newSecret(rec), &supply{})
	first := (*drainsFirstError)(nil)
	if !errors.As(err, &first) || !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), rec.Name) {
		t.Fatalf("while somebody ends it: %v", err)
	}
	unlock()
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
	h.serve(t, m, rec.Name)
	ctx := until(t, func() bool { return h.wasAsked("end") })
	if err := m.awaitDrained(ctx, Request{VolumeID: "v"}, newSecret(rec), first); err == nil || !h.wasAsked("end") {
		t.Errorf("it was not ended first: %v", err)
	}
}

// A mount that everybody was moved away from is nobody's: it gets the new session, and ends without taking anything from the
// containers that it may show in.
func TestAMountThatIsLeftGetsTheNewSession(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	m.Sessions = (&tokens{}).wants(credentials.AssumeRole)
	rec, p := secretMount(t, m, "a", "mountpoint-s3")
	h := renewing()
	h.serve(t, m, rec.Name)
	s, err := m.planFor(t.Context(), newSecret(rec), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	left := func() record {
		t.Helper()
		if err := m.leave(t.Context(), rec.Name, s, false); err != nil {
			t.Fatal(err)
		}
		now, _, err := m.store.record(rec.Name)
		if err != nil {
			t.Fatal(err)
		}
		return now
	}
	if now := left(); now.Superseded || len(h.got()) > 0 {
		t.Errorf("it has a publication, and was left: %+v", now)
	}
	p.Mount, p.From = strings.Repeat("b", 24)+"-2", []string{rec.Name}
	if err := m.store.writePublication(p); err != nil {
		t.Fatal(err)
	}
	if now := left(); !now.Superseded || len(h.got()) != 1 || h.got()[0].Order == nil {
		t.Errorf("%+v; the helper was given %+v", now, h.got())
	}
	v, err := m.look(t.Context(), rec.Name)
	if err != nil || !v.left || len(v.pubs) > 0 {
		t.Errorf("it looks like %+v, %v", v, err)
	}
}
