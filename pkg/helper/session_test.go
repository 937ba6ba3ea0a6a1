package helper

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

var testOrder = credentials.Order{Kind: credentials.WebIdentity, Token: "canary-token.eyJ.x", RoleARN: "arn:aws:iam::1:role/a", Duration: time.Hour}

// clocked is a session with a clock of its own.
type clocked struct {
	session
	t   *testing.T
	now time.Time
}

func newClocked(t *testing.T) *clocked {
	return &clocked{t: t, now: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC), session: session{random: func() float64 { return 0 }, salt: []byte("salt")}}
}

func (c *clocked) keys(name string, life time.Duration) credentials.Keys {
	return credentials.Keys{AccessKeyID: name, SecretAccessKey: "s-" + name, SessionToken: "t-" + name, Expires: c.now.Add(life)}
}

// begin sees that an attempt begins now.
func (c *clocked) begin() job {
	c.t.Helper()
	j, begin, wait := c.nextAttempt(c.now)
	if !begin {
		c.t.Fatalf("no attempt at %s, the next look in %s", c.now.Format(time.TimeOnly), wait)
	}
	return j
}

// idle checks that no attempt is due, and returns how long to wait.
func (c *clocked) idle() time.Duration {
	c.t.Helper()
	_, begin, wait := c.nextAttempt(c.now)
	if begin {
		c.t.Fatalf("an attempt at %s", c.now.Format(time.TimeOnly))
	}
	return wait
}

// untilAttempt lets the time pass, look by look, until one begins.
func (c *clocked) untilAttempt() (job, time.Duration) {
	c.t.Helper()
	from := c.now
	for range 3000 {
		c.noteExpiry(c.now)
		j, begin, wait := c.nextAttempt(c.now)
		if begin {
			return j, c.now.Sub(from)
		}
		if wait <= 0 {
			c.t.Fatal("it looks again without a pause")
		}
		c.now = c.now.Add(wait)
	}
	c.t.Fatal("there never is an attempt")
	return job{}, 0
}

func TestSession_IsRenewedInTheMiddleOfItsValidity(t *testing.T) {
	for _, life := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 15 * time.Minute, time.Hour, 36 * time.Hour} {
		for _, random := range []float64{0, 0.5, math.Nextafter(1, 0)} {
			c := newClocked(t)
			c.random = func() float64 { return random }
			c.update(c.now, c.keys("first", life), testOrder)
			for range 3 {
				j, after := c.untilAttempt()
				if part := float64(after) / float64(life); part < 0.5 || part > 0.66 {
					t.Errorf("a session of %s is renewed after %s", life, after)
				}
				if c.hasExpired(c.now) {
					t.Errorf("a session of %s is over before it is renewed", life)
				}
				if out := c.recordAttempt(c.now, j, c.keys("next", life), nil); !out.taken || !out.failed.IsZero() || c.session.keys.AccessKeyID != "next" {
					t.Errorf("outcome: %+v", out)
				}
			}
		}
	}
}

func TestKeysWithoutEndAreNotRenewed(t *testing.T) {
	c := newClocked(t)
	keys := c.keys("a", 0)
	keys.Expires = time.Time{}
	c.update(c.now, keys, testOrder)
	for range 100 {
		if wait := c.idle(); wait != maxWait {
			t.Fatalf("looks again after %s", wait)
		}
		c.now = c.now.Add(time.Hour)
	}
	if c.hasExpired(c.now) || c.noteExpiry(c.now) {
		t.Error("they ended")
	}
}

// failTimes lets n attempts fail with an error, and returns the pauses between them.
func (c *clocked) failTimes(n int, err error) (pauses []time.Duration) {
	c.t.Helper()
	for range n {
		j, after := c.untilAttempt()
		pauses = append(pauses, after)
		if out := c.recordAttempt(c.now, j, credentials.Keys{}, err); out.taken {
			c.t.Fatal("a failure is no session")
		}
	}
	return pauses
}

func TestSession_RefusalsAreRetriedMoreSlowlyThanFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		err         error
		first, most time.Duration
	}{
		"a service that is down": {fault.Errorf(fault.Unavailable, "no route"), retryFirst, retryMost},
		"an unknown failure":     {errors.New("?"), retryFirst, retryMost},
		"throttling":             {fault.Errorf(fault.Busy, "slow down"), retryFirst, retryMost},
		"a refusal":              {fault.Errorf(fault.Denied, "no"), refusedFirst, refusedMost},
		"an expired token":       {fault.Errorf(fault.Unauthenticated, "expired"), refusedFirst, refusedMost},
		"a bad configuration":    {fault.Errorf(fault.Precondition, "no"), refusedFirst, refusedMost},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClocked(t)
			c.random = func() float64 { return math.Nextafter(1, 0) }
			c.update(c.now, c.keys("a", 36*time.Hour), testOrder)
			pauses := c.failTimes(40, tc.err)[1:]
			near := func(a, b time.Duration) bool { return (a - b).Abs() < time.Millisecond }
			if !near(pauses[0], tc.first) || !near(pauses[1], 2*tc.first) || !near(pauses[len(pauses)-1], tc.most) {
				t.Errorf("pauses: %v", pauses)
			}
			c.random = func() float64 { return 0 }
			if p := c.failTimes(2, tc.err); !near(p[1], tc.most/2) {
				t.Errorf("with the most jitter: %v, want half of %s", p, tc.most)
			}
			if s := c.status(c.now); s.Failures != 42 || s.Renewals != 0 || s.Error != tc.err.Error() || s.Kind != fault.KindOf(tc.err).String() {
				t.Errorf("status: %+v", s)
			}
		})
	}
}

func TestSession_OldSessionIsServedUntilItExpires(t *testing.T) {
	c := newClocked(t)
	began := c.now
	c.update(c.now, c.keys("a", time.Hour), testOrder)
	down := fault.Errorf(fault.Unavailable, "the service is down")
	expired := 0
	for c.now.Before(began.Add(3 * time.Hour)) {
		j, _, wait := c.nextAttempt(c.now)
		switch {
		case j.order.Kind != "":
			c.recordAttempt(c.now, j, credentials.Keys{}, down)
		case c.noteExpiry(c.now):
			expired++
			if !c.now.Equal(began.Add(time.Hour)) {
				t.Errorf("the end is noticed at %s", c.now)
			}
		default:
			c.now = c.now.Add(wait)
		}
		if c.hasExpired(c.now) != !c.now.Before(began.Add(time.Hour)) {
			t.Fatalf("at %s: over %v", c.now, c.hasExpired(c.now))
		}
	}
	s := c.status(c.now)
	if expired != 1 || !s.Over || s.Kind != "unavailable" || s.FailedSince.Sub(began) < 30*time.Minute || s.FailedSince.Sub(began) > 40*time.Minute {
		t.Errorf("noticed %d times: %+v", expired, s)
	}
	// It recovers by itself, and can expire again.
	j, after := c.untilAttempt()
	if after > retryMost {
		t.Errorf("the next attempt comes after %s", after)
	}
	out := c.recordAttempt(c.now, j, c.keys("b", time.Minute), nil)
	s = c.status(c.now)
	if !out.taken || out.failed.IsZero() || s.Over || s.Error != "" || s.Kind != "" || !s.FailedSince.IsZero() || s.Renewals != 1 {
		t.Errorf("%+v, %+v", out, s)
	}
	c.now = c.now.Add(time.Minute)
	if !c.noteExpiry(c.now) || c.noteExpiry(c.now) {
		t.Error("the second end")
	}
}

func TestSession_RecoveryBeforeExpiryIsUsedInTime(t *testing.T) {
	for _, life := range []time.Duration{3 * time.Second, 15 * time.Minute, 12 * time.Hour} {
		c := newClocked(t)
		c.random = func() float64 { return math.Nextafter(1, 0) }
		end := c.now.Add(life)
		back := end.Add(-max(retryFirst, life/50))
		c.update(c.now, c.keys("a", life), testOrder)
		attempts := 0
		for j, _ := c.untilAttempt(); c.now.Before(back); j, _ = c.untilAttempt() {
			c.recordAttempt(c.now, j, credentials.Keys{}, fault.Errorf(fault.Unavailable, "down"))
			attempts++
		}
		if c.hasExpired(c.now) {
			t.Errorf("a session of %s: after %d attempts the service was back %s before the end, and no attempt was made", life, attempts, end.Sub(back))
		}
	}
}

func TestSession_NewOrderIsUsedAtOnceOnlyAfterFailures(t *testing.T) {
	other := testOrder
	other.Token = "another"
	t.Run("all is well", func(t *testing.T) {
		c := newClocked(t)
		c.update(c.now, c.keys("a", time.Hour), testOrder)
		c.update(c.now, credentials.Keys{}, other)
		if c.idle(); c.session.keys.AccessKeyID != "a" || c.status(c.now).OrderDigest != other.Digest(c.salt) {
			t.Errorf("status: %+v", c.status(c.now))
		}
		if j, after := c.untilAttempt(); after != 30*time.Minute || j.order != other {
			t.Errorf("after %s", after)
		}
	})
	t.Run("the last renewal failed", func(t *testing.T) {
		c := newClocked(t)
		c.update(c.now, c.keys("a", time.Hour), testOrder)
		c.failTimes(20, fault.Errorf(fault.Unauthenticated, "expired"))
		since := c.status(c.now).FailedSince
		c.idle()
		c.update(c.now, credentials.Keys{}, other)
		j := c.begin()
		if j.order != other {
			t.Error("the old order is tried")
		}
		// The count of failures starts again; their start time stays.
		c.recordAttempt(c.now, j, credentials.Keys{}, fault.Errorf(fault.Unauthenticated, "expired"))
		if _, after := c.untilAttempt(); after > refusedFirst {
			t.Errorf("the next attempt comes after %s", after)
		}
		if got := c.status(c.now).FailedSince; !got.Equal(since) {
			t.Errorf("failed since %s, want %s", got, since)
		}
	})
	t.Run("the session is over", func(t *testing.T) {
		c := newClocked(t)
		c.update(c.now, c.keys("a", time.Hour), credentials.Order{})
		c.now = c.now.Add(time.Hour)
		if !c.noteExpiry(c.now) || c.status(c.now).Error == "" {
			t.Errorf("status: %+v", c.status(c.now))
		}
		c.idle()
		c.update(c.now, credentials.Keys{}, other)
		j := c.begin()
		if out := c.recordAttempt(c.now, j, c.keys("b", time.Hour), nil); !out.taken || out.failed.IsZero() || c.status(c.now).Error != "" {
			t.Errorf("%+v %+v", out, c.status(c.now))
		}
	})
	t.Run("the keys were not a session", func(t *testing.T) {
		c := newClocked(t)
		keys := c.keys("a", 0)
		keys.Expires = time.Time{}
		c.update(c.now, keys, credentials.Order{})
		c.update(c.now, credentials.Keys{}, other)
		c.begin()
	})
	t.Run("while an attempt with the old one is under way", func(t *testing.T) {
		c := newClocked(t)
		c.update(c.now, c.keys("a", time.Hour), testOrder)
		j, _ := c.untilAttempt()
		c.update(c.now, credentials.Keys{}, other)
		if out := c.recordAttempt(c.now, j, credentials.Keys{}, errors.New("revoked")); out.taken || out.changed {
			t.Errorf("outcome: %+v", out)
		}
		if j := c.begin(); j.order != other {
			t.Error("the old order is tried again")
		}
	})
}

func TestSession_NewKeysReplaceAnAttemptInProgress(t *testing.T) {
	c := newClocked(t)
	c.update(c.now, c.keys("a", time.Hour), testOrder)
	j, _ := c.untilAttempt()
	c.update(c.now, c.keys("b", time.Hour), testOrder)
	if out := c.recordAttempt(c.now, j, c.keys("late", time.Hour), nil); out.taken || c.session.keys.AccessKeyID != "b" {
		t.Errorf("%+v, %s is in use", out, c.session.keys)
	}
	// Keys alone are all there is: nothing is made from what was there before.
	j, _ = c.untilAttempt()
	c.update(c.now, c.keys("c", time.Hour), credentials.Order{})
	c.recordAttempt(c.now, j, c.keys("late", time.Hour), nil)
	if s := c.status(c.now); !s.HasKeys(c.session.keys) || s.HasKeys(credentials.Keys{}) || s.HasKeys(testKeys) {
		t.Errorf("it reports other keys than its client's: %+v", s)
	}
	if s := c.status(c.now); c.session.keys.AccessKeyID != "c" || s.OrderDigest != "" || s.Has(testOrder) || s.Has(credentials.Order{}) {
		t.Errorf("%s is in use: %+v", c.session.keys, s)
	}
	for range 200 {
		c.now = c.now.Add(c.idle())
		c.noteExpiry(c.now)
	}
	if s := c.status(c.now); !s.Over || s.Kind != "unauthenticated" || s.FailedSince.IsZero() {
		t.Errorf("status: %+v", s)
	}
}

// What was being made when the credentials were forgotten is dropped.
func TestSession_ResultAfterForgetIsDropped(t *testing.T) {
	now := time.Now()
	s := session{random: func() float64 { return 0 }}
	s.update(now, credentials.Keys{}, credentials.Order{Kind: credentials.AssumeRole})
	j, begin, _ := s.nextAttempt(now)
	if !begin {
		t.Fatal("no session is made")
	}
	s.forget()
	if out := s.recordAttempt(now, j, credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}, nil); out.taken {
		t.Error("the session is taken")
	}
	if st := s.status(now); st.Over || st.Error != "" || st.OrderDigest != "" || st.KeysDigest != "" {
		t.Errorf("status %+v", st)
	}
	if _, begin, _ := s.nextAttempt(now.Add(time.Hour)); begin {
		t.Error("another session is made")
	}
}

func TestSession_DemandHastensTheNextAttempt(t *testing.T) {
	for name, tc := range map[string]struct {
		err   error
		pause time.Duration
	}{
		"down":    {fault.Errorf(fault.Unavailable, "down"), retryAsked},
		"refused": {fault.Errorf(fault.Denied, "no"), refusedAsked},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClocked(t)
			c.update(c.now, credentials.Keys{}, testOrder)
			if !c.noteDemand(c.now) {
				t.Error("the first session is due")
			}
			j := c.begin()
			if !c.noteDemand(c.now) {
				t.Error("one is being made")
			}
			c.recordAttempt(c.now, j, credentials.Keys{}, tc.err)
			c.failTimes(20, tc.err)
			if c.noteDemand(c.now) {
				t.Error("right after a failure")
			}
			if _, after := c.untilAttempt(); after != tc.pause {
				t.Errorf("the next attempt comes after %s, want %s", after, tc.pause)
			}
		})
	}
	c := newClocked(t)
	c.update(c.now, c.keys("a", time.Hour), testOrder)
	if c.noteDemand(c.now) {
		t.Error("there is a valid session")
	}
	c.idle()
	if c = newClocked(t); c.noteDemand(c.now) {
		t.Error("there is nothing to make one from")
	}
}

func TestSession_EqualFailuresAreReportedOnce(t *testing.T) {
	c := newClocked(t)
	c.update(c.now, c.keys("a", time.Hour), testOrder)
	attempt := func(err error) bool {
		j, _ := c.untilAttempt()
		return c.recordAttempt(c.now, j, c.keys("b", time.Hour), err).changed
	}
	down, denied := fault.Errorf(fault.Unavailable, "down"), fault.Errorf(fault.Denied, "no")
	for i, tc := range []struct {
		err     error
		changed bool
	}{
		{fault.Errorf(fault.Denied, "the service answered 403 (request 0a1b-2c)"), true},
		{fault.Errorf(fault.Denied, "the service answered 403 (request 99fe-00)"), false},
		{down, true}, {down, false}, {down, false}, {denied, true}, {denied, false}, {fault.Errorf(fault.Busy, "no"), true},
		{nil, true}, {nil, true}, {down, true},
	} {
		if got := attempt(tc.err); got != tc.changed {
			t.Errorf("attempt %d (%v): changed %v", i, tc.err, got)
		}
	}
}

func TestSession_UnusableKeysAreAFailure(t *testing.T) {
	c := newClocked(t)
	c.update(c.now, credentials.Keys{}, testOrder)
	for _, keys := range []credentials.Keys{{}, {AccessKeyID: "a"}, c.keys("late", 0), c.keys("late", -time.Second)} {
		j, _ := c.untilAttempt()
		if out := c.recordAttempt(c.now, j, keys, nil); out.taken || c.err == nil {
			t.Errorf("%+v was taken", keys)
		}
	}
}

// Setting the clock neither expires a session early nor extends it.
func TestSession_ExpiryUsesTheMonotonicClock(t *testing.T) {
	start := time.Now()
	s := session{random: func() float64 { return 0 }}
	s.update(start, credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b", Expires: start.Round(0).Add(time.Hour)}, testOrder)
	at := func(monotonic time.Duration) time.Time { return start.Add(monotonic) }
	if s.hasExpired(at(59*time.Minute)) || !s.hasExpired(at(time.Hour)) {
		t.Error("the end is not where the lifetime says")
	}
	if _, begin, wait := s.nextAttempt(at(29 * time.Minute)); begin || wait != time.Minute {
		t.Errorf("begins %v, waits %s", begin, wait)
	}
	if _, begin, _ := s.nextAttempt(at(30 * time.Minute)); !begin {
		t.Error("it is due")
	}
}
