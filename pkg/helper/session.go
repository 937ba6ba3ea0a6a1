package helper

import (
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// A session is renewed at a random moment in this part of its validity: early enough to survive an outage of the service
	// of a third of it, and spread because mounts start together.
	renewFrom, renewTo = 0.50, 0.66
	// renewLeast is the shortest time between renewals, for sessions of very short validity.
	renewLeast = 100 * time.Millisecond

	// Backoff after failed attempts. A permanent error stays until the configuration changes, so its retries are rarer.
	retryFirst, retryMost     = 250 * time.Millisecond, time.Minute
	refusedFirst, refusedMost = 2 * time.Second, 5 * time.Minute
	// If the client asks and there is no session, the next attempt is due at most this long after the last one.
	retryAsked, refusedAsked = 5 * time.Second, 30 * time.Second
	// soon is how far off an attempt may be for the client's request to wait for it.
	soon = time.Second

	// maxWait bounds the time between checks of the clock: if it was set forward or the machine was suspended, sessions
	// expire earlier than a timer fires.
	maxWait = time.Minute
)

// session is the client's session and decides when the next one is made. It does no I/O.
//
// Times are compared on the monotonic clock, so setting the clock does not expire a session. A renewal is also due if only
// the wall clock says so, because the monotonic clock stops while a machine is suspended.
type session struct {
	random func() float64 // at least 0, less than 1
	salt   []byte

	keys    credentials.Keys
	made    time.Time
	ends    time.Time // zero: never
	expired bool      // its expiry was recorded

	order        credentials.Order
	digest       string
	keysVersion  int // grows when keys are set: the result of an attempt in progress is dropped then
	orderVersion int // grows when an order is set

	running       bool
	due           time.Time // of the next attempt; zero: none is planned
	tried         time.Time // when the last attempt ended
	failuresInRow int       // failed attempts since the last success or the last order
	err           error     // why there is no newer session: the first of equal errors; nil: none is needed
	since         time.Time // of err
	renewals      int
	failures      int
}

type job struct {
	order                     credentials.Order
	keysVersion, orderVersion int
}

// update uses the keys and the order of a request; see Peer.Renew.
func (s *session) update(now time.Time, keys credentials.Keys, order credentials.Order) {
	first := s.order.IsZero()
	if !keys.IsZero() {
		s.keysVersion++
		s.order, s.digest = credentials.Order{}, ""
		s.setKeys(now, keys)
	}
	if order.IsZero() {
		return
	}
	s.orderVersion++
	s.order, s.digest = order, order.Digest(s.salt)
	switch {
	case !keys.IsZero():
		s.planRenewal(now)
	case first || s.failuresInRow > 0 || s.hasExpired(now):
		s.failuresInRow, s.due = 0, now
	}
}

// forget drops the keys and the order, and the result of an attempt in progress.
func (s *session) forget() {
	s.keysVersion++
	s.orderVersion++
	s.order, s.digest = credentials.Order{}, ""
	s.setKeys(s.made, credentials.Keys{})
}

// setKeys makes keys the session. It plans no attempt.
func (s *session) setKeys(now time.Time, keys credentials.Keys) {
	s.keys, s.made, s.ends, s.expired = keys, now, time.Time{}, false
	if !keys.Expires.IsZero() {
		s.ends = now.Add(keys.Expires.Sub(now.Round(0)))
	}
	s.failuresInRow, s.err, s.since, s.due = 0, nil, time.Time{}, time.Time{}
}

// planRenewal sets when the session that was just taken is renewed.
func (s *session) planRenewal(now time.Time) {
	if s.ends.IsZero() {
		return
	}
	part := renewFrom + (renewTo-renewFrom)*s.random()
	s.due = now.Add(max(renewLeast, time.Duration(part*float64(s.ends.Sub(now)))))
}

// hasExpired reports whether the client has no valid session.
func (s *session) hasExpired(now time.Time) bool {
	return s.keys.IsZero() || !s.ends.IsZero() && !now.Before(s.ends)
}

// nextAttempt returns the attempt to start now, if one is due, and otherwise how long to wait.
func (s *session) nextAttempt(now time.Time) (j job, begin bool, wait time.Duration) {
	wait = maxWait
	if !s.ends.IsZero() && !s.expired {
		wait = min(wait, s.ends.Sub(now))
	}
	if s.running || s.order.IsZero() || s.due.IsZero() {
		return job{}, false, max(0, wait)
	}
	if now.Before(s.due) && now.Round(0).Before(s.due.Round(0)) {
		return job{}, false, max(0, min(wait, s.due.Sub(now)))
	}
	s.running = true
	return job{s.order, s.keysVersion, s.orderVersion}, true, 0
}

type outcome struct {
	taken   bool      // there is a new session
	failed  time.Time // since when renewals had failed; zero: they had not
	changed bool      // it differs from the previous outcome
}

func (s *session) recordAttempt(now time.Time, j job, keys credentials.Keys, err error) outcome {
	s.running, s.tried = false, now
	if j.keysVersion != s.keysVersion {
		return outcome{}
	}
	if err == nil {
		err = checkUsable(now, keys)
	}
	if err == nil {
		failed := s.since
		s.setKeys(now, keys)
		s.planRenewal(now)
		s.renewals++
		return outcome{taken: true, failed: failed, changed: true}
	}
	s.failures++
	if j.orderVersion != s.orderVersion {
		s.due = now // the order was replaced meanwhile
		return outcome{}
	}
	s.due = now.Add(s.pause(now, err))
	changed := s.err == nil || fault.KindOf(s.err) != fault.KindOf(err) || shape(s.err.Error()) != shape(err.Error())
	if s.since.IsZero() {
		s.since = now
	}
	s.failuresInRow++
	if changed {
		s.err = err
	}
	return outcome{changed: changed}
}

// pause returns how long to wait after a failed attempt.
func (s *session) pause(now time.Time, err error) time.Duration {
	first, most := retryFirst, retryMost
	if fault.KindOf(err).Permanent() {
		first, most = refusedFirst, refusedMost
	}
	pause := most
	if s.failuresInRow < 16 {
		pause = min(most, first<<s.failuresInRow)
	}
	// Retry often enough to use a service that recovers shortly before the session expires.
	if left := s.ends.Sub(now); left > 0 && !fault.KindOf(err).Permanent() {
		pause = min(pause, max(retryFirst, left/4))
	}
	return time.Duration((1 + s.random()) / 2 * float64(pause))
}

// shape returns a text without tokens that contain digits, such as request IDs, to compare errors.
func shape(text string) string {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || strings.ContainsRune(`"'(),;:`, r) })
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return strings.ContainsAny(w, "0123456789") }), " ")
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// checkUsable refuses incomplete and expired keys.
func checkUsable(now time.Time, keys credentials.Keys) error {
	switch {
	case keys.AccessKeyID == "" || keys.SecretAccessKey == "":
		return fault.Errorf(fault.Unknown, "the exchange program returned no keys")
	case !keys.Expires.IsZero() && !keys.Expires.After(now):
		return fault.Errorf(fault.Unavailable, "the new session already expired at %s; check the clocks of this host and of the token service", stamp(keys.Expires))
	}
	return nil
}

// noteDemand records that the client requested credentials without a valid session, and reports whether one is expected soon.
func (s *session) noteDemand(now time.Time) bool {
	if s.order.IsZero() || !s.hasExpired(now) {
		return false
	}
	if s.running {
		return true
	}
	pause := time.Duration(0)
	if s.failuresInRow > 0 {
		pause = retryAsked
		if fault.KindOf(s.err).Permanent() {
			pause = refusedAsked
		}
	}
	at := s.tried.Add(pause)
	if at.Before(now) {
		at = now
	}
	if s.due.IsZero() || at.Before(s.due) {
		s.due = at
	}
	return s.due.Sub(now) <= soon
}

// noteExpiry reports once that the session has expired.
func (s *session) noteExpiry(now time.Time) bool {
	if s.expired || s.keys.IsZero() || !s.hasExpired(now) {
		return false
	}
	s.expired = true
	if s.err == nil && s.order.IsZero() {
		s.err = fault.Errorf(fault.Unauthenticated, "the credentials expired at %s and were not replaced", stamp(s.ends))
		s.since = s.ends
	}
	return true
}

func (s *session) status(now time.Time) *SessionStatus {
	st := &SessionStatus{
		Expires: s.keys.Expires, Renewals: s.renewals, Failures: s.failures, OrderDigest: s.digest, Salt: s.salt,
		Over: s.hasExpired(now) && (!s.keys.IsZero() || !s.order.IsZero()),
	}
	if !s.keys.IsZero() {
		st.Made = s.made.Round(0)
		if s.order.IsZero() {
			st.KeysDigest = credentials.Order{Kind: credentials.AsIs, Keys: s.keys}.Digest(s.salt)
		}
	}
	if !s.order.IsZero() {
		st.Next = s.due.Round(0)
	}
	if s.err != nil {
		st.Error, st.Kind, st.FailedSince = s.err.Error(), fault.KindOf(s.err).String(), s.since.Round(0)
	}
	return st
}
