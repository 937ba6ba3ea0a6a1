package mount

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// A publication that shows a client which hangs costs the clearing of leftovers nothing: one call a minute that never ends
// would take all that the driver may have.
func TestClearingPublicationsAsksNoFileSystem(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	target := t.TempDir()
	hangAt(t, rec, target)
	p := publication{Target: target, VolumeID: "v", Mount: rec.Name, Created: time.Now().Add(-2 * staleAge)}
	for _, mount := range []string{rec.Name, mountName(rec.Key, 99)} { // which is there, and which is not
		p.Mount = mount
		if err := m.store.writePublication(p); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err := m.clearPublications(ctx)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok, _ := m.store.publication(target); !ok {
			t.Error("the publication of a target that is there is forgotten")
		}
	}
}

// hangAt mounts a file system whose client never answers.
func hangAt(t *testing.T, rec record, path string) {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("needs /dev/fuse")
	}
	dir, err := host.OpenDir(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	fuse, err := host.OpenFuse()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.MountFuse(fuse, dir, host.FuseMount{Source: rec.Source, UID: rec.UID, GID: rec.UID}); err != nil {
		fuse.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		fuse.Close()
		_ = unix.Unmount(path, unix.MNT_DETACH) // some tests have it unmounted
	})
}

// A volume that is mounted again tends to get the uid that it had. While what had it before is being ended, another one is
// taken: the new client would be killed too.
func TestAUIDThatIsClearedIsNotGivenOut(t *testing.T) {
	l := &uids{alive: map[uint32]bool{}}
	m := newTestManager(t, l, s3{})
	if os.Getuid() != 0 {
		t.Skip("needs root: a mount's directories belong to its own user")
	}
	spec := Spec{Bucket: "b"}
	cl, err := m.clientOf("")
	if err != nil {
		t.Fatal(err)
	}
	usual, err := m.freeUID(spec.Key(), nil)
	if err != nil {
		t.Fatal(err)
	}
	l.alive[usual] = true
	var given record
	l.onKill = func(uint32) {
		if given, err = m.reserve(t.Context(), "v", spec, cl, nil); err != nil {
			t.Error(err)
		}
	}
	if err := m.clearUnits(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(l.killed, []uint32{usual}) || given.UID == usual || given.UID == 0 {
		t.Fatalf("killed: %v; meanwhile a mount got uid %d", l.killed, given.UID)
	}
	if err := m.store.remove(given.Name); err != nil {
		t.Fatal(err)
	}
	if again, err := m.reserve(t.Context(), "v", spec, cl, nil); err != nil || again.UID != usual {
		t.Errorf("afterwards it gets %d, %v", again.UID, err)
	}
}

// One that cannot be ended does not keep the rest from being cleared away.
func TestLeftoversAreClearedWhileAMountDrains(t *testing.T) {
	l := &uids{alive: map[uint32]bool{5000: true, 5001: true}}
	m := newTestManager(t, l, s3{})
	rec := mountOf(t, m, "a", "1", "rclone") // which has processes for ever, and no helper
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	l.onKill = func(uint32) { cancel() }
	m.tending = 100 * time.Millisecond
	go func() { defer close(done); _ = m.reconcile(ctx) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("the reconcile hangs")
		cancel()
		<-done
	}
	if !slices.Equal(l.killed, []uint32{5001}) {
		t.Errorf("cleared: %v", l.killed)
	}
	if _, ok, err := m.store.record(rec.Name); !ok || err != nil {
		t.Errorf("the mount that drains is gone: %v", err)
	}
}

// After a final answer the CO takes a target for unpublished, and it would be left as it is.
func TestAPublicationThatIsThereNeverFailsForGood(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{access: fault.Errorf(fault.Denied, "no")})
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	show(t, m, rec)
	pubs, err := m.store.allPublications()
	if err != nil || len(pubs) != 1 {
		t.Fatal(pubs, err)
	}
	r := Request{VolumeID: "v", Target: pubs[0].Target, Source: credentials.SourceDriver}
	if err := m.publish(t.Context(), r, Spec{Bucket: "b"}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("kind %d: %v", fault.KindOf(err), err)
	}
	if at, err := host.Look(r.Target); err != nil || !at.Mountpoint {
		t.Errorf("the target shows nothing any more: %v", err)
	}
	without := r
	without.Source = credentials.SourceSecret
	if err := m.Publish(t.Context(), without); !fault.Is(err, fault.Unavailable) {
		t.Errorf("without its secret: kind %d: %v", fault.KindOf(err), err)
	}
	without.Target = t.TempDir()
	if err := m.Publish(t.Context(), without); !fault.Is(err, fault.Precondition) {
		t.Errorf("without its secret, on a target that shows nothing: kind %d: %v", fault.KindOf(err), err)
	}
	r.Target = t.TempDir()
	if err := m.publish(t.Context(), r, Spec{Bucket: "b"}); !fault.Is(err, fault.Denied) {
		t.Errorf("a target that shows nothing: kind %d: %v", fault.KindOf(err), err)
	}
}

// A backend that is moved to where nothing answers does not end a client that serves.
func TestAClientIsNotEndedForABackendThatDoesNotAnswer(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{access: errors.New("nobody there")})
	rec := mountOf(t, m, "a", "1", "rclone")
	rec.Backend = "another digest"
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
	h.serve(t, m, rec.Name)
	if _, err := m.renew(t.Context(), rec, &supply{}, reasonConfig); err == nil {
		t.Error("it was renewed")
	}
	if h.wasAsked("kill") || h.wasAsked("quit") {
		t.Errorf("its helper was asked: %v", h.asked)
	}
}

// A client's command line of a driver that did not write down what backend it is for stays as it is: it may be all that tells
// the bucket's region.
func TestACommandOfAnOlderDriverIsKept(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{access: errors.New("nobody there")})
	rec := mountOf(t, m, "a", "1", "rclone")
	be, _ := m.Backends.Backend("default")
	if err := m.update(t.Context(), &rec, be, &supply{order: credentials.Order{Kind: credentials.AsIs, Keys: credentials.Keys{AccessKeyID: "a"}}}); err != nil || !slices.Equal(rec.Command.Argv, cmd("/bin/true").Argv) {
		t.Errorf("%q, %v", rec.Command.Argv, err)
	}
	rec.Command.Argv = nil
	if err := m.update(t.Context(), &rec, be, &supply{}); err != nil || len(rec.Command.Argv) == 0 {
		t.Errorf("no command becomes %q, %v", rec.Command.Argv, err)
	}
}

// What takes long to store outlasts the keys that the client was started with.
func TestAClientThatDrainsGetsNewKeys(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec := mountOf(t, m, "a", "1", "rclone")
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning, Ending: true}}
	h.serve(t, m, rec.Name)
	wait := func(ctx context.Context) {
		t.Helper()
		if how, err := m.awaitExit(ctx, rec, m.peer(rec.Name)); !fault.Is(err, fault.Busy) {
			t.Errorf("%q, %v", how, err)
		}
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	wait(short)
	if h.wasAsked("credentials") {
		t.Error("it has keys of a moment ago and gets new ones")
	}
	m.hangs.get(rec.Name).keyed = time.Now().Add(-reconcileEvery)
	wait(until(t, func() bool { return h.wasAsked("credentials") }))
	if !h.wasAsked("credentials") {
		t.Errorf("its helper was asked only: %v", h.asked)
	}
}

// A mount that was replaced gets keys as long as it shows somewhere: files are open in it.
func TestAMountThatWasReplacedKeepsItsKeys(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	rec.Superseded = true
	if err := m.store.writeRecord(rec); err != nil {
		t.Fatal(err)
	}
	show(t, m, rec)
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
	h.serve(t, m, rec.Name)
	if _, err := m.tend(t.Context(), rec.Name); err != nil {
		t.Fatal(err)
	}
	if !h.wasAsked("credentials") {
		t.Errorf("its helper was asked only: %v", h.asked)
	}
}

// A helper that does not answer does not keep its mount from ending for ever.
func TestAHelperThatDoesNotAnswerIsGivenUp(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	m.HangTimeout = 100 * time.Millisecond
	rec := mountOf(t, m, "a", "1", "rclone")
	(&helperOf{}).serve(t, m, rec.Name)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if how, err := m.awaitExit(ctx, rec, m.peer(rec.Name)); how != lostEnd || err != nil {
		t.Errorf("%q, %v", how, err)
	}
}

// A client that has lost its helper may store what it has for as long as its keys last, however long its mount has been ending.
func TestAnOrphanMayUseItsKeys(t *testing.T) {
	l := &uids{alive: map[uint32]bool{5000: true}}
	m := newTestManager(t, l, s3{})
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	rec.Phase, rec.Ending = phaseEnding, time.Now().Add(-2*orphanBound)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := m.awaitExit(ctx, rec, m.peer(rec.Name)); !fault.Is(err, fault.Busy) || len(l.killed) > 0 {
		t.Errorf("killed: %v, %v", l.killed, err)
	}
	m.hangs.get(rec.Name).orphan = time.Now().Add(-orphanBound)
	if _, err := m.awaitExit(t.Context(), rec, m.peer(rec.Name)); err != nil || len(l.killed) != 1 {
		t.Errorf("killed: %v, %v", l.killed, err)
	}
}

// The last unpublication waits for the mounts, too, that its own took over from: what was open there may still be stored.
func TestFormerMountsEndWithTheLastPublication(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	former := mountOf(t, m, "a", "1", "mountpoint-s3")
	former.Superseded = true
	if err := m.store.writeRecord(former); err != nil {
		t.Fatal(err)
	}
	rec := mountOf(t, m, "a", "2", "mountpoint-s3")
	rec.Former = []string{mountName(rec.Key, 0), former.Name}
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
	h.serve(t, m, former.Name)
	awaited := func() bool { return h.wasAsked("status") } // which is after it was told to end
	if err := m.release(until(t, awaited), rec, "/t"); !fault.Is(err, fault.Busy) {
		t.Errorf("while the former one stores: %v", err)
	}
	if !h.wasAsked("end") {
		t.Error("the former one was not told to end")
	}
}

// Whether a death was for want of memory is not worth waiting for.
func TestALauncherThatDoesNotAnswerHoldsUpNoRestart(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	began := time.Now()
	if n := m.oomKills(t.Context(), record{OOMKills: 3}); n != 3 || time.Since(began) > 2*countBound {
		t.Errorf("%d after %s", n, time.Since(began))
	}
}

// What could not be healed for a reason that passes is looked at again, though the host shows nothing of it any more.
func TestAHealThatFailedIsDoneAgain(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec := mountOf(t, m, "a", "1", "rclone")
	m.healed.first(rec.Name)
	if err := m.healOnce(t.Context(), rec, true); err == nil {
		t.Fatal("healed without a file system")
	}
	if err := m.healOnce(t.Context(), rec, false); err == nil {
		t.Error("nobody tries again")
	}
	for kind, want := range map[fault.Kind]bool{fault.NotFound: false, fault.Precondition: false, fault.Unsupported: false, fault.Timeout: true, fault.Unknown: true} {
		if got := passes(fault.Errorf(kind, "x")); got != want {
			t.Errorf("kind %d: %t", kind, got)
		}
	}
}

// A target that somebody unmounted by hand is still the CO's: a container runs on a copy of the mount.
func TestAMountIsHeldByATargetThatTheCOHas(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec := mountOf(t, m, "a", "1", "mountpoint-s3")
	h := &helperOf{status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
	h.serve(t, m, rec.Name)
	hangAt(t, rec, m.store.sourceDir(rec.Name))
	p := publication{Target: t.TempDir(), VolumeID: "v", Mount: rec.Name, Created: time.Now().Add(-2 * staleAge)}
	if err := m.store.writePublication(p); err != nil {
		t.Fatal(err)
	}
	if _, err := m.tend(t.Context(), rec.Name); err != nil {
		t.Fatal(err)
	}
	if h.wasAsked("end") {
		t.Error("it is ended")
	}
	if err := os.Remove(p.Target); err != nil {
		t.Fatal(err)
	}
	ctx := until(t, func() bool { return h.wasAsked("end") })
	if _, err := m.tend(ctx, rec.Name); err == nil || !h.wasAsked("end") {
		t.Errorf("it is not ended when the target is gone: %v", err)
	}
}

// An error that comes back each minute, only older, is logged once in a while.
func TestComplaintsAreNotRepeatedForTheirNumbers(t *testing.T) {
	var c complaints
	logged := func(text string) bool {
		before := c.said["m"]
		c.log(t.Context(), "m", errors.New(text), "x")
		return c.said["m"] != before
	}
	for _, step := range []struct {
		text string
		want bool
	}{{"draining: 3 uploads (for 61s)", true}, {"draining: 2 uploads (for 121s)", false}, {"no answer", true}} {
		if got := logged(step.text); got != step.want {
			t.Errorf("%q: %t", step.text, got)
		}
	}
}

// Who looked at a mount that has gone meanwhile leaves nothing in memory.
func TestHangsForgetWhatIsGone(t *testing.T) {
	var h hangs
	h.begin("m")
	h.forget("m")
	h.end("m", false)
	if len(h.of) > 0 {
		t.Errorf("left: %v", h.of)
	}
}
