package identity

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// renewalMargin is how long before its end a session is renewed, or a fifth of its life time where that is less.
	renewalMargin = 5 * time.Minute
	// renewalPause is how long after a failed renewal the next attempt comes.
	renewalPause = 10 * time.Second
	// makeBound bounds one attempt, which may ask a pod identity agent and an STS.
	makeBound = 15 * time.Second
)

// Session returns the keys of a session, and makes the next one ahead of its end when they are asked for. It has no goroutine of
// its own. All methods may be called concurrently.
type Session struct {
	what string // for the log: what the session is for
	make func(context.Context) (credentials.Keys, error)
	now  func() time.Time

	turn  chan struct{} // holds one token, which guards the fields below; unlike a mutex, waiting for it ends with a context
	keys  credentials.Keys
	renew time.Time // when the next one is due; zero: never
}

// NewSession makes no session yet. what names its purpose in the log.
func (i *Identities) NewSession(what string, makeKeys func(context.Context) (credentials.Keys, error)) *Session {
	s := &Session{what: what, make: makeKeys, now: i.now, turn: make(chan struct{}, 1)}
	s.turn <- struct{}{}
	return s
}

// Keys returns keys that work now. If a session cannot be renewed, the old one is used until it expires.
func (s *Session) Keys(ctx context.Context) (credentials.Keys, error) {
	select {
	case <-s.turn:
		defer func() { s.turn <- struct{}{} }()
	case <-ctx.Done():
		return credentials.Keys{}, fault.Errorf(fault.Timeout, "waiting for a session: %w", ctx.Err())
	}
	now := s.now()
	if !s.keys.IsZero() && (s.renew.IsZero() || now.Before(s.renew)) {
		return s.keys, nil
	}
	making, cancel := context.WithTimeout(ctx, makeBound)
	defer cancel()
	keys, err := s.make(making)
	if err != nil {
		if !s.keys.IsZero() && now.Before(s.keys.Expires) {
			klog.FromContext(ctx).Error(err, "Session renewal failed, using the present one", "for", s.what, "until", s.keys.Expires)
			s.renew = now.Add(renewalPause)
			return s.keys, nil
		}
		s.keys = credentials.Keys{}
		return credentials.Keys{}, err
	}
	s.keys, s.renew = keys, time.Time{}
	if !keys.Expires.IsZero() {
		left := keys.Expires.Sub(s.now())
		s.renew = keys.Expires.Add(-min(renewalMargin, left/5))
	}
	return keys, nil
}

// drop forgets the session with that access key id, which the service does not accept any more.
func (s *Session) drop(accessKeyID string) {
	<-s.turn
	defer func() { s.turn <- struct{}{} }()
	if s.keys.AccessKeyID == accessKeyID {
		s.keys = credentials.Keys{}
	}
}
