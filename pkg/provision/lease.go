package provision

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// leaseMargin is how long before its end a session is renewed, or a fifth of its life where that is less.
	leaseMargin = 5 * time.Minute
	// leasePause is how long a session that could not be renewed is used on before it is tried again.
	leasePause = 10 * time.Second
	// leaseBound bounds one attempt, which may ask a pod identity agent and an STS.
	leaseBound = 15 * time.Second
)

// lease gives the keys of a session, and makes the next one ahead of its end when they are asked for. It has no goroutine of
// its own. All methods may be called concurrently.
type lease struct {
	what string // for the log: what the session is for
	make func(context.Context) (credentials.Keys, error)
	now  func() time.Time

	turn  chan struct{} // holds one token: who has it may touch what follows
	keys  credentials.Keys
	renew time.Time // when the next one is due; zero: never
}

func newLease(what string, now func() time.Time, makeKeys func(context.Context) (credentials.Keys, error)) *lease {
	l := &lease{what: what, make: makeKeys, now: now, turn: make(chan struct{}, 1)}
	l.turn <- struct{}{}
	return l
}

// get gives keys that work now. While no new session can be had the old one is given, as long as it is valid.
func (l *lease) get(ctx context.Context) (credentials.Keys, error) {
	select {
	case <-l.turn:
		defer func() { l.turn <- struct{}{} }()
	case <-ctx.Done():
		return credentials.Keys{}, fault.Errorf(fault.Timeout, "waiting for a session: %w", ctx.Err())
	}
	now := l.now()
	if !l.keys.IsZero() && (l.renew.IsZero() || now.Before(l.renew)) {
		return l.keys, nil
	}
	making, cancel := context.WithTimeout(ctx, leaseBound)
	defer cancel()
	keys, err := l.make(making)
	if err != nil {
		if !l.keys.IsZero() && now.Before(l.keys.Expires) {
			klog.FromContext(ctx).Error(err, "A session could not be renewed; the present one is used on", "for", l.what, "until", l.keys.Expires)
			l.renew = now.Add(leasePause)
			return l.keys, nil
		}
		l.keys = credentials.Keys{}
		return credentials.Keys{}, err
	}
	l.keys, l.renew = keys, time.Time{}
	if !keys.Expires.IsZero() {
		left := keys.Expires.Sub(l.now())
		l.renew = keys.Expires.Add(-min(leaseMargin, left/5))
	}
	return keys, nil
}

// drop forgets the session with that access key id, which the service does not take any more.
func (l *lease) drop(accessKeyID string) {
	<-l.turn
	defer func() { l.turn <- struct{}{} }()
	if l.keys.AccessKeyID == accessKeyID {
		l.keys = credentials.Keys{}
	}
}
