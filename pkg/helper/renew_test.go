package helper

import (
	"context"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// tokenService stands in for what makes sessions.
type tokenService struct {
	mu     sync.Mutex
	err    error
	life   time.Duration
	orders []credentials.Order // that came
	hold   chan struct{}       // an attempt waits for it
}

func (s *tokenService) make(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	s.mu.Lock()
	s.orders = append(s.orders, o)
	n, hold, err, life := len(s.orders), s.hold, s.err, s.life
	s.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return credentials.Keys{}, ctx.Err()
		}
	}
	if err != nil {
		return credentials.Keys{}, err
	}
	return credentials.Keys{
		AccessKeyID: "AKIDMADE" + string(rune('0'+n%10)), SecretAccessKey: "canary-made-secret", SessionToken: "canary-made-token", Expires: time.Now().Add(life),
	}, nil
}

func (s *tokenService) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *tokenService) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.orders)
}

// startSession runs a client on keys that live for a while and an order.
func (r *rig) startSession(life time.Duration, order credentials.Order, steps ...string) Status {
	r.t.Helper()
	req := r.request(steps...)
	req.Order = order
	if life != 0 {
		req.Keys = testKeys
		req.Keys.Expires = time.Now().Add(life)
	}
	s, err := r.startWith(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// startWith runs a stand-in whose descriptor is not of FUSE.
func (r *rig) startWith(req StartRequest) (Status, error) {
	r.t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		r.t.Fatal(err)
	}
	defer null.Close()
	return r.peer.Start(bounded(r.t), req, null)
}

func (r *rig) url() string { return "http://" + r.h.endpoint.listener.Addr().String() + endpointPath }

// has asks as the client does.
func (r *rig) has() (status int, key string) {
	r.t.Helper()
	status, body := get(r.t, r.url(), r.h.endpoint.token)
	return status, body["AccessKeyId"]
}

func TestSessionsAreRenewedBeforeTheyExpire(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.start(time.Hour, testOrder)
		if s := b.status().Session; !s.Has(testOrder) || s.Over || s.Fault() != nil {
			t.Fatalf("%+v", s)
		}
		for range 12 * 60 {
			time.Sleep(time.Minute)
			if status, _ := b.has(); status != 200 {
				t.Errorf("the client is answered %d", status)
			}
		}
		s := b.status().Session
		if s.Renewals < 12 || s.Failures != 0 || s.Error != "" || time.Until(s.Expires) > time.Hour || s.Made.IsZero() {
			t.Errorf("%+v", s)
		}
		if _, key := b.has(); !strings.HasPrefix(key, "AKIDMADE") {
			t.Errorf("the client has %s", key)
		}
		for _, secret := range []string{"canary", b.h.endpoint.token} {
			if strings.Contains(b.logged(), secret) {
				t.Errorf("%s is in the log:\n%s", secret, b.logged())
			}
		}
	})
}

func TestAnOutageOfTheServiceExpiresNoSessionEarly(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.svc.err = fault.Errorf(fault.Unavailable, "no route to %s with %s", testOrder.Token, testKeys.SecretAccessKey)
		b.start(10*time.Minute, testOrder)
		s := b.until("a failure", func(s Status) bool { return s.Session.Failures > 0 })
		if s.Session.Over || s.Session.Kind != "unavailable" || s.Session.FailedSince.IsZero() || !fault.Is(s.Session.Fault(), fault.Unavailable) {
			t.Errorf("%+v", s.Session)
		}
		if want := "no route to [redacted] with [redacted]"; s.Session.Error != want {
			t.Errorf("the error is %q, want %q", s.Session.Error, want)
		}
		if status, key := b.has(); status != 200 || key != testKeys.AccessKeyID {
			t.Errorf("the old session: %d %s", status, key)
		}
		s = b.until("expiry", func(s Status) bool { return s.Session.Over })
		if status, _ := b.has(); status != 503 {
			t.Errorf("after the expiry: %d", status)
		}
		// Equal failures change the revision once.
		failures := b.svc.count()
		time.Sleep(time.Hour)
		if now := b.status(); now.Revision != s.Revision || b.svc.count() <= failures {
			t.Errorf("revision %d, then %d; %d attempts, then %d", s.Revision, now.Revision, failures, b.svc.count())
		}
		b.svc.set(func() { b.svc.err = nil })
		_, _ = b.has()
		s = b.until("recovery", func(s Status) bool { return s.Session.Renewals > 0 })
		if s.Session.Over || s.Session.Error != "" || s.Session.Failures < failures {
			t.Errorf("%+v", s.Session)
		}
		if status, key := b.has(); status != 200 || !strings.HasPrefix(key, "AKIDMADE") {
			t.Errorf("after recovery: %d %s", status, key)
		}
		log := b.logged()
		if n := strings.Count(log, "session expired"); n != 1 || !strings.Contains(log, "renewal had failed since") {
			t.Errorf("%d lines of its expiry:\n%s", n, log)
		}
		if n := strings.Count(log, "session renewal failed, retrying"); n != 1 {
			t.Errorf("%d lines of failures:\n%s", n, log)
		}
		if strings.Contains(log, "canary") {
			t.Errorf("a secret is in the log:\n%s", log)
		}
	})
}

func TestRenewal_RequestWaitsForTheAttemptInProgress(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.svc.hold = make(chan struct{})
		b.start(0, testOrder)
		synctest.Wait()
		if s := b.status().Session; b.svc.count() != 1 || !s.Over || !s.Expires.IsZero() {
			t.Errorf("%d attempts, %+v", b.svc.count(), s)
		}
		began := time.Now()
		if status, _ := b.has(); status != 503 || time.Since(began) != renewalWait {
			t.Errorf("%d after %s", status, time.Since(began))
		}
		time.AfterFunc(time.Second, func() { close(b.svc.hold) })
		if status, _ := b.has(); status != 200 || time.Since(began) != renewalWait+time.Second {
			t.Errorf("%d after %s", status, time.Since(began))
		}
	})
}

func TestRenewal_FailureIsAnsweredAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.svc.err, b.svc.hold = fault.Errorf(fault.Denied, "no"), make(chan struct{})
		b.start(0, testOrder)
		time.AfterFunc(50*time.Millisecond, func() { close(b.svc.hold) })
		for i, most := range []time.Duration{50 * time.Millisecond, soon, soon} {
			began := time.Now()
			if status, _ := b.has(); status != 503 || time.Since(began) > most {
				t.Errorf("request %d: %d after %s", i, status, time.Since(began))
			}
		}
	})
}

func TestRenewal_NewTokenIsUsedAtOnceAfterAFailure(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.svc.err = fault.Errorf(fault.Unauthenticated, "the token has expired")
		b.start(time.Minute, testOrder)
		b.until("expiry", func(s Status) bool { return s.Session.Over && s.Session.Kind == "unauthenticated" })
		fresh := testOrder
		fresh.Token = "canary-fresh"
		b.svc.set(func() { b.svc.err = nil })
		began := time.Now()
		if err := b.h.credentials(credentials.Keys{}, fresh); err != nil {
			t.Fatal(err)
		}
		s := b.until("a session", func(s Status) bool { return s.Session.Renewals == 1 })
		if !s.Session.Has(fresh) || s.Session.Has(testOrder) || time.Since(began) != 0 {
			t.Errorf("after %s: %+v", time.Since(began), s.Session)
		}
		if last := b.svc.orders[len(b.svc.orders)-1]; last != fresh {
			t.Error("it was made from the old order")
		}
	})
}

func TestRenewal_ContinuesWhileTheMountDrains(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.start(time.Hour, testOrder)
		b.h.end()
		time.Sleep(12 * time.Hour)
		synctest.Wait() // a renewal is due at this very moment
		if s := b.status(); s.Session.Renewals < 12 || s.Session.Over {
			t.Errorf("%+v", s.Session)
		}
		if status, _ := b.has(); status != 200 {
			t.Errorf("while it drains: %d", status)
		}
		b.h.exited(1, "") // so that the helper stays
		count := b.svc.count()
		time.Sleep(12 * time.Hour)
		if n := b.svc.count(); n != count {
			t.Errorf("%d sessions were made after the client's exit", n-count)
		}
	})
}

// A client that continues the work of one that crashed has a session at once.
func TestRenewal_RestartedClientHasASession(t *testing.T) {
	for name, end := range map[string]bool{"while it is mounted": false, "while it is ending": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				b.start(time.Hour, testOrder)
				if end {
					b.h.end()
				}
				b.h.exited(-1, "SIGKILL")
				keys := testKeys
				keys.Expires = time.Now().Add(time.Second)
				if err := b.h.credentials(keys, testOrder); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Hour + 10*time.Minute)
				b.run()
				if status, key := b.has(); status != 200 || !strings.HasPrefix(key, "AKIDMADE") || !b.status().Session.Has(testOrder) {
					t.Errorf("the client: %d %s", status, key)
				}
			})
		})
	}
}

func TestRenewal_SignalDoesNotStopIt(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.start(time.Hour, testOrder)
		b.signals <- syscall.SIGTERM
		time.Sleep(12 * time.Hour)
		if s := b.status(); s.Session.Renewals < 12 || !b.lives() {
			t.Errorf("%+v", s.Session)
		}
		b.h.exited(0, "")
		if b.lives() {
			t.Error("the helper stays after its client")
		}
	})
}

func TestKeysWithoutAnOrderExpire(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.start(time.Minute, credentials.Order{})
		s := b.until("expiry", func(s Status) bool { return s.Session.Over && s.Session.Error != "" })
		if s.Session.Kind != "unauthenticated" || s.Session.OrderDigest != "" || b.svc.count() != 0 {
			t.Errorf("%+v", s.Session)
		}
		time.Sleep(time.Hour)
		if n := strings.Count(b.logged(), "credentials expired"); n != 1 {
			t.Errorf("%d lines:\n%s", n, b.logged())
		}
		if err := b.h.credentials(testKeys, credentials.Order{}); err != nil {
			t.Fatal(err)
		}
		if s := b.status().Session; s.Over || s.Error != "" {
			t.Errorf("%+v", s)
		}
	})
}

// Keys without an order replace both.
func TestKeysAloneEndRenewals(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.start(time.Hour, testOrder)
		if err := b.h.credentials(testKeys, credentials.Order{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(12 * time.Hour)
		if status, key := b.has(); status != 200 || key != testKeys.AccessKeyID || b.svc.count() != 0 || b.status().Session.OrderDigest != "" {
			t.Errorf("%d %s, %d sessions were made", status, key, b.svc.count())
		}
		for name, order := range map[string]credentials.Order{"nothing": {}, "an order of keys as they are": {Kind: credentials.AsIs}} {
			if err := b.h.credentials(credentials.Keys{}, order); !fault.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

func TestMissingExchangeProgramLeavesTheGivenKeys(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(o *options) { o.exchange = newExchanger("/nowhere/s3-csi-driver", options{}.restricted).make })
	r.startSession(0, testOrder, "wait:/nowhere")
	s := r.until("a failure", func(s Status) bool { return s.Session.Failures > 0 })
	if !s.Session.Over || !fault.Is(s.Session.Fault(), fault.Precondition) {
		t.Errorf("%+v", s.Session)
	}
	if err := r.peer.Renew(bounded(t), testKeys, testOrder); err != nil {
		t.Error(err)
	}
	if status, key := r.has(); status != 200 || key != testKeys.AccessKeyID {
		t.Errorf("%d %s", status, key)
	}
}
