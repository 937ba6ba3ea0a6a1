package helper

import (
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// A session is renewed at a random moment of this part of its life: early enough that a service that is down for
	// nearly half of it is not noticed, late enough that each is used, and spread, because mounts start together.
	renewFrom, renewTo = 0.50, 0.66
	// renewLeast keeps sessions of next to no life from being made without a pause.
	renewLeast = 100 * time.Millisecond

	// Attempts that failed are repeated, each after twice as long. One that was refused is refused again until somebody
	// changes something.
	retryFirst, retryMost     = 250 * time.Millisecond, time.Minute
	refusedFirst, refusedMost = 2 * time.Second, 5 * time.Minute
	// A client that asks and has no session makes the next attempt come sooner, so long after the last.
	retryAsked, refusedAsked = 5 * time.Second, 30 * time.Second
	// soon is how far off an attempt can be that a client which asks waits for.
	soon = time.Second

	// lookAgain bounds how long nobody looks at the clock: one that was set forward, or a machine that was suspended, makes
	// sessions end sooner than a timer tells.
	lookAgain = time.Minute
)

// session is what the client works with, and when and from what the next one is made. It decides and does nothing.
//
// Times are measured on the monotonic clock that time.Now brings along: a clock that is set back or forward ends no session.
// One that says that a session is due is believed all the same, because the monotonic clock stands still in a machine that
// is suspended.
type session struct {
	random func() float64 // at least 0, less than 1
	salt   []byte

	keys    credentials.Keys
	made    time.Time
	ends    time.Time // zero: never
	expired bool      // its end was noticed

	order  credentials.Order
	digest string
	keyed  int // grows when keys are given: what is under way then is not wanted any more
	orders int // grows with each order

	running  bool
	due      time.Time // of the next attempt; zero: there is none to come
	tried    time.Time // when the last attempt ended
	row      int       // attempts that failed since the last success or the last order
	err      error     // why there is no newer session, in the words of the first time; nil: there need not be one
	since    time.Time // since when
	renewals int
	failures int
}

// job is an attempt to make a session.
type job struct {
	order         credentials.Order
	keyed, orders int
}

// give takes what a request brings; see Peer.Renew.
func (s *session) give(now time.Time, keys credentials.Keys, order credentials.Order) {
	first := s.order.IsZero()
	if !keys.IsZero() {
		s.keyed++
		s.order, s.digest = credentials.Order{}, ""
		s.take(now, keys)
	}
	if order.IsZero() {
		return
	}
	s.orders++
	s.order, s.digest = order, order.Digest(s.salt)
	switch {
	case !keys.IsZero():
		s.plan(now)
	case first || s.row > 0 || s.over(now):
		s.row, s.due = 0, now
	}
}

// take makes keys the session. No attempt is planned with it.
func (s *session) take(now time.Time, keys credentials.Keys) {
	s.keys, s.made, s.ends, s.expired = keys, now, time.Time{}, false
	if !keys.Expires.IsZero() {
		s.ends = now.Add(keys.Expires.Sub(now.Round(0)))
	}
	s.row, s.err, s.since, s.due = 0, nil, time.Time{}, time.Time{}
}

// plan says when the session that was just taken is to be renewed.
func (s *session) plan(now time.Time) {
	if s.ends.IsZero() {
		return
	}
	part := renewFrom + (renewTo-renewFrom)*s.random()
	s.due = now.Add(max(renewLeast, time.Duration(part*float64(s.ends.Sub(now)))))
}

// over tells that the client has no session that is valid.
func (s *session) over(now time.Time) bool {
	return s.keys.IsZero() || !s.ends.IsZero() && !now.Before(s.ends)
}

// next gives the attempt to begin now, if there is one, and otherwise how long there is nothing to do.
func (s *session) next(now time.Time) (j job, begin bool, wait time.Duration) {
	wait = lookAgain
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
	return job{s.order, s.keyed, s.orders}, true, 0
}

// outcome is what an attempt led to.
type outcome struct {
	taken  bool      // there is a new session
	failed time.Time // since when there was none to be had; zero: it was made in time
	news   bool      // nobody has been told this before
}

// ended takes the outcome of an attempt.
func (s *session) ended(now time.Time, j job, keys credentials.Keys, err error) outcome {
	s.running, s.tried = false, now
	if j.keyed != s.keyed {
		return outcome{}
	}
	if err == nil {
		err = usable(now, keys)
	}
	if err == nil {
		failed := s.since
		s.take(now, keys)
		s.plan(now)
		s.renewals++
		return outcome{taken: true, failed: failed, news: true}
	}
	s.failures++
	if j.orders != s.orders {
		s.due = now // it says nothing about the order of now
		return outcome{}
	}
	s.due = now.Add(s.pause(now, err))
	news := s.err == nil || fault.KindOf(s.err) != fault.KindOf(err) || shape(s.err.Error()) != shape(err.Error())
	if s.since.IsZero() {
		s.since = now
	}
	s.row++
	if news {
		s.err = err
	}
	return outcome{news: news}
}

// pause is how long after a failed attempt the next one comes.
func (s *session) pause(now time.Time, err error) time.Duration {
	first, most := retryFirst, retryMost
	if refused(err) {
		first, most = refusedFirst, refusedMost
	}
	pause := most
	if s.row < 16 {
		pause = min(most, first<<s.row)
	}
	// A service that is back shortly before the session's end is back in time.
	if left := s.ends.Sub(now); left > 0 && !refused(err) {
		pause = min(pause, max(retryFirst, left/4))
	}
	return time.Duration((1 + s.random()) / 2 * float64(pause))
}

// shape is what a text has in common with others that say the same of another moment: words with digits in them, such as
// the number of a request, do not count.
func shape(text string) string {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || strings.ContainsRune(`"'(),;:`, r) })
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return strings.ContainsAny(w, "0123456789") }), " ")
}

// usable refuses what is no session, or over already.
func usable(now time.Time, keys credentials.Keys) error {
	switch {
	case keys.AccessKeyID == "" || keys.SecretAccessKey == "":
		return fault.Errorf(fault.Unknown, "the program that makes sessions answered without keys")
	case !keys.Expires.IsZero() && !keys.Expires.After(now):
		return fault.Errorf(fault.Unavailable, "the session that was made had ended already, at %s: look at the clocks of this machine and of the token service", keys.Expires.UTC().Format(time.RFC3339))
	}
	return nil
}

// refused tells whether an attempt failed for a reason that only somebody else can take away.
func refused(err error) bool {
	switch fault.KindOf(err) {
	case fault.Denied, fault.Unauthenticated, fault.Invalid, fault.Precondition, fault.NotFound, fault.Exists, fault.OutOfRange, fault.Unsupported:
		return true
	default:
		return false
	}
}

// asked notes that the client wants a session and there is none, and tells whether one can be expected at once.
func (s *session) asked(now time.Time) bool {
	if s.order.IsZero() || !s.over(now) {
		return false
	}
	if s.running {
		return true
	}
	pause := time.Duration(0)
	if s.row > 0 {
		pause = retryAsked
		if refused(s.err) {
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

// expire tells once that the session has ended.
func (s *session) expire(now time.Time) bool {
	if s.expired || s.keys.IsZero() || !s.over(now) {
		return false
	}
	s.expired = true
	if s.err == nil && s.order.IsZero() {
		s.err = fault.Errorf(fault.Unauthenticated, "the credentials expired at %s and nobody gave new ones", s.ends.UTC().Format(time.RFC3339))
		s.since = s.ends
	}
	return true
}

// status is what others may know.
func (s *session) status(now time.Time) *SessionStatus {
	st := &SessionStatus{
		Expires: s.keys.Expires, Renewals: s.renewals, Failures: s.failures, OrderDigest: s.digest, Salt: s.salt,
		Over: s.over(now) && (!s.keys.IsZero() || !s.order.IsZero()),
	}
	if !s.keys.IsZero() {
		st.Made = s.made.Round(0)
	}
	if s.err != nil {
		e := newWireError(s.err)
		st.Error, st.Kind, st.FailedSince = e.Text, e.Kind, s.since.Round(0)
	}
	return st
}
