package helper

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// startAwaiting runs a stand-in whose session is to come, on a helper that needs no descriptor.
func (r *rig) startAwaiting(keys credentials.Keys) error {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	req := r.request("wait")
	req.Await, req.Keys = true, keys
	_, err = r.peer.Start(bounded(r.t), req, null)
	return err
}

// answer is what the client was answered.
type answer struct {
	status int
	key    string
}

// asking asks as the client does, in the background. It returns when the endpoint lets that wait, or has answered.
func (r *rig) asking() <-chan answer {
	done := make(chan answer, 1)
	go func() {
		status, key := r.has()
		done <- answer{status, key}
	}()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		r.h.endpoint.mu.Lock()
		waiting := r.h.endpoint.waiting
		r.h.endpoint.mu.Unlock()
		if waiting > 0 || len(done) > 0 || time.Now().After(end) {
			return done
		}
	}
}

// A client that was started before its session waits for it at the endpoint.
func TestEndpoint_ClientsWaitForTheirFirstSession(t *testing.T) {
	r := newRig(t)
	if err := r.startAwaiting(credentials.Keys{}); err != nil {
		t.Fatal(err)
	}
	asked := r.asking()
	if len(asked) > 0 {
		t.Fatalf("without a session it was answered %+v", <-asked)
	}
	if err := r.peer.Renew(bounded(t), testKeys, testOrder); err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got.status != 200 || got.key != testKeys.AccessKeyID {
		t.Errorf("with the session it was answered %+v", got)
	}
	if s, err := r.peer.Status(bounded(t)); err != nil || !s.Session.Has(testOrder) {
		t.Errorf("%+v, %v", s.Session, err)
	}
}

// A helper that has a session already does not let the client wait, and one that awaits none, or whose client has exited, refuses.
func TestEndpoint_RequestsWaitOnlyForAwaitedSessions(t *testing.T) {
	r := newRig(t)
	if err := r.startAwaiting(testKeys); err != nil {
		t.Fatal(err)
	}
	if got := <-r.asking(); got.status != 200 {
		t.Errorf("with keys: %+v", got)
	}
	r = newRig(t)
	if _, err := r.tryStartWithoutKeys("wait"); err != nil {
		t.Fatal(err)
	}
	if got := <-r.asking(); got.status != 503 {
		t.Errorf("without keys to come: %+v", got)
	}
	r = newRig(t)
	if err := r.startAwaiting(credentials.Keys{}); err != nil {
		t.Fatal(err)
	}
	asked := r.asking()
	if err := r.peer.Kill(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got.status != 503 {
		t.Errorf("a child of a client that was killed: %+v", got)
	}
}

// A helper that exits does not wait for the session.
func TestHelper_ExitsWhileARequestWaits(t *testing.T) {
	r := newRig(t)
	if err := r.startAwaiting(credentials.Keys{}); err != nil {
		t.Fatal(err)
	}
	asked := r.asking()
	if _, err := r.peer.Quit(bounded(t)); err != nil {
		t.Fatal(err)
	}
	<-asked
	r.mustEnd()
}

// A driver that never comes back does not let the client wait forever.
func TestEndpoint_WaitIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.h.endpoint.setAwaited(true)
		b.run()
		began := time.Now()
		if status, _ := b.has(); status != 503 || time.Since(began) != awaitedWait {
			t.Errorf("answered %d after %s", status, time.Since(began))
		}
		go func() {
			time.Sleep(time.Minute)
			_ = b.h.credentials(testKeys, credentials.Order{})
		}()
		began = time.Now()
		if status, _ := b.has(); status != 200 || time.Since(began) != time.Minute {
			t.Errorf("answered %d after %s", status, time.Since(began))
		}
		synctest.Wait()
	})
}
