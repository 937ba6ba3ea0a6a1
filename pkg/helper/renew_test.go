package helper

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
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
	return credentials.Keys{AccessKeyID: "AKIDMADE" + string(rune('0'+n%10)), SecretAccessKey: "canary-made-secret", SessionToken: "canary-made-token", Expires: time.Now().Add(life)}, nil
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

func (s *tokenService) options(o *options) { o.exchange = s.make }

// startSession runs a client on keys that live for a while and an order.
func (r *rig) startSession(life time.Duration, order credentials.Order, steps ...string) Status {
	r.t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		r.t.Fatal(err)
	}
	defer null.Close()
	req := r.request(steps...)
	req.Order = order
	if life != 0 {
		req.Keys = testKeys
		req.Keys.Expires = time.Now().Add(life)
	}
	s, err := r.peer.Start(bounded(r.t), req, null)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func (r *rig) url() string { return "http://" + r.h.endpoint.listener.Addr().String() + endpointPath }

// has asks as the client does.
func (r *rig) has() (status int, key string) {
	r.t.Helper()
	status, body := get(r.t, r.url(), r.h.endpoint.token)
	return status, body["AccessKeyId"]
}

func TestSessionsAreRenewedWithoutADriverAndTheClientAlwaysHasOne(t *testing.T) {
	t.Parallel()
	svc := &tokenService{life: 2 * time.Second}
	r := newRig(t, svc.options)
	r.startSession(2*time.Second, testOrder, "wait:/nowhere")
	s, err := r.peer.Hello(bounded(t))
	if err != nil || !s.Session.Has(testOrder) || s.Session.Over || s.Session.Fault() != nil {
		t.Fatalf("%+v, %v", s.Session, err)
	}
	stop := make(chan struct{})
	asked := make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-stop:
				asked <- n
				return
			default:
			}
			if status, _ := r.has(); status != 200 {
				t.Errorf("the client is answered %d", status)
			}
			n++
		}
	}()
	s = r.until("three renewals", func(s Status) bool { return s.Session.Renewals >= 3 })
	close(stop)
	if n := <-asked; n < 10 {
		t.Errorf("the client asked only %d times", n)
	}
	if s.Session.Failures != 0 || s.Session.Error != "" || time.Until(s.Session.Expires) > 2*time.Second || s.Session.Made.IsZero() {
		t.Errorf("%+v", s.Session)
	}
	if _, key := r.has(); !strings.HasPrefix(key, "AKIDMADE") {
		t.Errorf("the client has %s", key)
	}
	for _, secret := range []string{"canary", r.h.endpoint.token} {
		if strings.Contains(r.log(), secret) {
			t.Errorf("%s is in the log:\n%s", secret, r.log())
		}
	}
}

func TestAServiceThatIsDownEndsNoSessionBeforeItsTime(t *testing.T) {
	t.Parallel()
	svc := &tokenService{life: time.Hour, err: fault.Errorf(fault.Unavailable, "no route to %s with %s", testOrder.Token, testKeys.SecretAccessKey)}
	r := newRig(t, svc.options)
	r.startSession(5*time.Second, testOrder, "wait:/nowhere")
	s := r.until("a failure", func(s Status) bool { return s.Session.Failures > 0 })
	if s.Session.Over || s.Session.Kind != "unavailable" || s.Session.FailedSince.IsZero() || !fault.Is(s.Session.Fault(), fault.Unavailable) {
		t.Errorf("%+v", s.Session)
	}
	if want := "no route to [redacted] with [redacted]"; s.Session.Error != want {
		t.Errorf("the error is %q, want %q", s.Session.Error, want)
	}
	if status, key := r.has(); status != 200 || key != testKeys.AccessKeyID {
		t.Errorf("the session of before: %d %s", status, key)
	}
	s = r.until("the end of the session", func(s Status) bool { return s.Session.Over })
	failures := s.Session.Failures
	if status, _ := r.has(); status != 503 {
		t.Errorf("after its end: %d", status)
	}
	// It is told once, however often the attempts fail.
	for end := time.Now().Add(10 * time.Second); svc.count() < failures+1 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		continue
	}
	if now, err := r.peer.Hello(bounded(t)); err != nil || now.Revision != s.Revision {
		t.Errorf("revision %d, then %d (%v): nothing has changed", s.Revision, now.Revision, err)
	}
	svc.set(func() { svc.err = nil })
	_, _ = r.has() // after so many failures the next attempt is far off, unless the client asks
	s = r.until("recovery", func(s Status) bool { return s.Session.Renewals > 0 })
	if s.Session.Over || s.Session.Error != "" || s.Session.Failures < failures {
		t.Errorf("%+v", s.Session)
	}
	if status, key := r.has(); status != 200 || !strings.HasPrefix(key, "AKIDMADE") {
		t.Errorf("after recovery: %d %s", status, key)
	}
	log := r.log()
	if n := strings.Count(log, "the client's session expired at"); n != 1 || !strings.Contains(log, "it could not be renewed since") {
		t.Errorf("%d lines of its end:\n%s", n, log)
	}
	if n := strings.Count(log, "cannot be renewed, and that is tried again"); n != 1 {
		t.Errorf("%d lines of failures:\n%s", n, log)
	}
	if strings.Contains(log, "canary") {
		t.Errorf("a secret is in the log:\n%s", log)
	}
}

func TestAClientWithoutASessionWaitsForTheOneThatIsBeingMade(t *testing.T) {
	t.Parallel()
	svc := &tokenService{life: time.Hour, hold: make(chan struct{})}
	r := newRig(t, svc.options)
	r.startSession(0, testOrder, "wait:/nowhere")
	for end := time.Now().Add(10 * time.Second); svc.count() == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		continue
	}
	if s, err := r.peer.Hello(bounded(t)); err != nil || !s.Session.Over || !s.Session.Expires.IsZero() {
		t.Errorf("%+v, %v", s.Session, err)
	}
	began := time.Now()
	if status, _ := r.has(); status != 503 || time.Since(began) < renewalPatience {
		t.Errorf("%d after %s", status, time.Since(began))
	}
	go close(svc.hold)
	if status, _ := r.has(); status != 200 {
		t.Errorf("status %d", status)
	}
}

// Whoever waits is told of a failure at once, and those who ask later do not wait for nothing.
func TestAClientIsNotKeptWaitingForAFailure(t *testing.T) {
	t.Parallel()
	svc := &tokenService{err: fault.Errorf(fault.Denied, "no"), hold: make(chan struct{})}
	r := newRig(t, svc.options)
	r.startSession(0, testOrder, "wait:/nowhere")
	time.AfterFunc(50*time.Millisecond, func() { close(svc.hold) })
	for range 3 {
		began := time.Now()
		if status, _ := r.has(); status != 503 || time.Since(began) > renewalPatience {
			t.Errorf("%d after %s", status, time.Since(began))
		}
	}
}

func TestATokenThatComesEndsTheTroubleAtOnce(t *testing.T) {
	t.Parallel()
	svc := &tokenService{life: time.Hour, err: fault.Errorf(fault.Unauthenticated, "the token has expired")}
	r := newRig(t, svc.options)
	r.startSession(200*time.Millisecond, testOrder, "wait:/nowhere")
	r.until("the end of the session", func(s Status) bool { return s.Session.Over && s.Session.Kind == "unauthenticated" })
	fresh := testOrder
	fresh.Token = "canary-fresh"
	svc.set(func() { svc.err = nil })
	if err := r.peer.Renew(bounded(t), credentials.Keys{}, fresh); err != nil {
		t.Fatal(err)
	}
	s := r.until("a session", func(s Status) bool { return s.Session.Renewals == 1 })
	if !s.Session.Has(fresh) || s.Session.Has(testOrder) {
		t.Errorf("%+v", s.Session)
	}
	svc.mu.Lock()
	defer svc.mu.Unlock()
	if last := svc.orders[len(svc.orders)-1]; last != fresh {
		t.Error("it was made from the old order")
	}
}

func TestADrainingMountKeepsItsSessionUntilTheClientHasExited(t *testing.T) {
	t.Parallel()
	svc := &tokenService{life: 300 * time.Millisecond}
	r := newRig(t, svc.options, func(o *options) { o.endGrace = time.Minute })
	r.startSession(300*time.Millisecond, testOrder, "wait:"+r.dir+"/flushed")
	if err := r.peer.End(bounded(t)); err != nil {
		t.Fatal(err)
	}
	s := r.until("ending", func(s Status) bool { return s.Ending })
	renewals := s.Session.Renewals
	r.until("renewals while it drains", func(s Status) bool { return s.Session.Renewals > renewals+2 })
	if status, _ := r.has(); status != 200 {
		t.Errorf("while it drains: %d", status)
	}
	touch(t, r.dir+"/flushed")
	r.until("the exit", exited)
	count := svc.count() + 1 // one may have been under way
	time.Sleep(500 * time.Millisecond)
	if n := svc.count(); n > count {
		t.Errorf("%d sessions were made after the client's exit", n-count+1)
	}
}

// What a client that ended badly left undone is finished by another one, for which there is a session at once.
func TestARestartedClientHasASession(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]bool{"while it is mounted": false, "while it is ending": true} {
		t.Run(name, func(t *testing.T) {
			svc := &tokenService{life: 200 * time.Millisecond}
			r := newRig(t, svc.options)
			r.startSession(time.Hour, testOrder, "wait:/nowhere")
			if end {
				if err := r.peer.End(bounded(t)); err != nil {
					t.Fatal(err)
				}
			}
			if err := r.peer.Kill(bounded(t)); err != nil {
				t.Fatal(err)
			}
			s := r.until("the exit", exited)
			if !s.Session.Has(testOrder) {
				t.Errorf("%+v", s.Session)
			}
			if err := r.peer.Renew(bounded(t), credentials.Keys{AccessKeyID: "A", SecretAccessKey: "b", Expires: time.Now().Add(50 * time.Millisecond)}, testOrder); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
			s, err := r.tryStartWithoutKeys("credentials", "exit:1")
			if err != nil || !s.Session.Has(testOrder) {
				t.Fatalf("%+v, %v", s, err)
			}
			if line := r.says("credentials "); !strings.HasPrefix(line, "credentials 200 AKIDMADE") {
				t.Errorf("the client: %s", line)
			}
		})
	}
}

func TestASignalChangesNothingForTheSessionOfARunningClient(t *testing.T) {
	t.Parallel()
	svc := &tokenService{life: 300 * time.Millisecond}
	r := newRig(t, svc.options)
	r.startSession(300*time.Millisecond, testOrder, "wait:"+r.dir+"/go")
	r.cancel() // as SIGTERM
	s := r.until("a renewal", func(s Status) bool { return s.Session.Renewals > 0 })
	r.until("another one", func(now Status) bool { return now.Session.Renewals > s.Session.Renewals })
	touch(t, r.dir+"/go")
	r.mustEnd()
}

func TestKeysThatExpireAndThatNobodyRenewsAreSaid(t *testing.T) {
	t.Parallel()
	svc := &tokenService{}
	r := newRig(t, svc.options)
	r.startSession(100*time.Millisecond, credentials.Order{}, "wait:/nowhere")
	s := r.until("their end", func(s Status) bool { return s.Session.Over && s.Session.Error != "" }) // who asks may see it before it is noticed
	if s.Session.Kind != "unauthenticated" || s.Session.OrderDigest != "" || svc.count() != 0 {
		t.Errorf("%+v", s.Session)
	}
	if n := strings.Count(r.log(), "nobody gave new ones"); n != 1 {
		t.Errorf("%d lines:\n%s", n, r.log())
	}
	if err := r.peer.Credentials(bounded(t), testKeys); err != nil {
		t.Fatal(err)
	}
	if s, err := r.peer.Hello(bounded(t)); err != nil || s.Session.Over || s.Session.Error != "" {
		t.Errorf("%+v, %v", s.Session, err)
	}
}

func TestWhatCannotBeRenewedIsRefused(t *testing.T) {
	t.Parallel()
	svc := &tokenService{}
	r := newRig(t, svc.options)
	for name, order := range map[string]credentials.Order{"nothing": {}, "an order of keys as they are": {Kind: credentials.AsIs}} {
		if err := r.peer.Renew(bounded(t), credentials.Keys{}, order); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := r.peer.Renew(bounded(t), testKeys, credentials.Order{}); err != nil {
		t.Errorf("keys alone: %v", err)
	}
}

// A helper without the program is as those from before orders: it says so, takes keys and drops orders.
func TestAHelperThatMakesNoSessionsSaysSo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startSession(time.Hour, testOrder, "wait:/nowhere")
	s, err := r.peer.Hello(bounded(t))
	if err != nil || s.Session != nil || s.Session.Has(testOrder) || s.Session.Fault() != nil {
		t.Errorf("%+v, %v", s.Session, err)
	}
	if err := r.peer.Renew(bounded(t), credentials.Keys{}, testOrder); !fault.Is(err, fault.Invalid) {
		t.Errorf("an order alone: %v", err)
	}
	keys := testKeys
	keys.AccessKeyID = "AKIDNEW"
	if err := r.peer.Renew(bounded(t), keys, testOrder); err != nil {
		t.Error(err)
	}
	if status, key := r.has(); status != 200 || key != "AKIDNEW" {
		t.Errorf("%d %s", status, key)
	}
}
