package helper

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// loggedLife is the shortest life of a session whose making is worth a line.
const loggedLife = 5 * time.Minute

// renew makes sessions, each ahead of the end of the one before, until ctx ends: as long as there is a client, or can be
// one again. It needs no driver.
func (h *helper) renew(ctx context.Context) {
	for {
		j, begin, wait := h.nextJob()
		if begin {
			keys, err := h.exchange(ctx, j.order)
			if ctx.Err() != nil {
				return
			}
			h.jobEnded(j, keys, err)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-h.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// nextJob notices the end of a session, and gives the attempt to begin now.
func (h *helper) nextJob() (j job, begin bool, wait time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	h.scrub.forget(now)
	if h.status.Ending && h.status.State != StateRunning {
		return job{}, false, lookAgain // nobody needs a session; a client that is started wakes us
	}
	if h.session.expire(now) {
		h.sayExpired()
		h.bump()
	}
	return h.session.next(now) // where nothing makes sessions, there is no order
}

// sayExpired logs that the client has no session any more. Call under mu.
func (h *helper) sayExpired() {
	s := &h.session
	at := s.ends.UTC().Format(time.RFC3339)
	switch {
	case s.order.IsZero():
		h.log.printf("the client's credentials expired at %s and nobody gave new ones: S3 refuses the client's requests until the driver brings some", at)
	case s.err != nil:
		h.log.printf("the client's session expired at %s: S3 refuses the client's requests until one can be made, which fails since %s: %v", at, s.since.UTC().Format(time.RFC3339), s.err)
	default:
		h.log.printf("the client's session expired at %s before a new one was made: S3 refuses the client's requests until then", at)
	}
}

// jobEnded takes the outcome of an attempt to make a session.
func (h *helper) jobEnded(j job, keys credentials.Keys, err error) {
	if err != nil {
		err = fault.Errorf(fault.KindOf(err), "%s", shorten(h.scrub.scrub(clean([]byte(err.Error())), false)))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	out := h.session.ended(now, j, keys, err)
	switch {
	case out.taken:
		h.scrub.hold(now, "session", keys.SecretAccessKey, keys.SessionToken)
		h.serveSession()
		if !out.failed.IsZero() {
			h.log.printf("the client has a new session, until %s; it could not be renewed since %s", keys.Expires.UTC().Format(time.RFC3339), out.failed.UTC().Format(time.RFC3339))
		} else if keys.Expires.IsZero() || keys.Expires.Sub(now) > loggedLife {
			h.log.printf("the client's session was renewed, until %s", keys.Expires.UTC().Format(time.RFC3339))
		}
	case out.news:
		h.log.printf("the client's session cannot be renewed, and that is tried again: %v", h.session.err)
	}
	if out.news {
		h.bump()
	}
	if !out.taken {
		h.endpoint.release()
	}
}

// give takes keys, an order, or both, from a request. Call under mu.
func (h *helper) give(keys credentials.Keys, order credentials.Order) error {
	if order.Kind == credentials.AsIs {
		return fault.Errorf(fault.Invalid, "an order of kind %s makes no session: its keys have to be given as they are", order.Kind)
	}
	if h.exchange == nil {
		order = credentials.Order{} // as helpers from before orders do, and the status says so
	}
	if keys.IsZero() && order.IsZero() {
		return fault.Errorf(fault.Invalid, "the request has no keys")
	}
	now := h.now()
	if !keys.IsZero() {
		h.scrub.hold(now, "session", keys.SecretAccessKey, keys.SessionToken)
	}
	h.scrub.hold(now, "order", order.Secrets()...)
	h.session.give(now, keys, order)
	h.serveSession()
	return nil
}

// serveSession gives the session of now to whoever asks, and wakes whoever makes the next. Call under mu.
func (h *helper) serveSession() {
	h.endpoint.set(h.session.keys, h.session.ends)
	h.poke()
}

// poke makes renew look again.
func (h *helper) poke() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// inVain notes that the client asked and there is no valid session, and tells whether one can be expected at once.
func (h *helper) inVain() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.poke()
	return h.session.asked(h.now())
}
