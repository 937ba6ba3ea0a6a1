package helper

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// loggedLife is the shortest validity of a session whose renewal is logged.
const loggedLife = 5 * time.Minute

// renew makes sessions, each before the previous one expires, until ctx ends. It needs no driver.
func (h *helper) renew(ctx context.Context) {
	for {
		j, begin, wait := h.nextJob()
		if begin {
			keys, err := h.options.exchange(ctx, j.order)
			if ctx.Err() != nil {
				return
			}
			h.jobEnded(j, keys, err)
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
		case <-time.After(wait):
		}
	}
}

// nextJob records that a session has expired and returns the attempt to start now, if one is due.
func (h *helper) nextJob() (j job, begin bool, wait time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.options.now()
	h.scrub.dropRetired(now)
	if h.status.Ending && h.status.State != StateRunning {
		return job{}, false, maxWait // no client needs a session; a start wakes renew
	}
	if h.session.noteExpiry(now) {
		h.logExpired()
		h.changeStatus()
	}
	return h.session.nextAttempt(now)
}

// logExpired logs that the client's session has expired. Call under mu.
func (h *helper) logExpired() {
	s := &h.session
	at := stamp(s.ends)
	switch {
	case s.order.IsZero():
		h.log.printf("credentials expired: at=%s, no order to renew them", at)
	case s.err != nil:
		h.log.printf("session expired: at=%s, renewal failing since %s: %v", at, stamp(s.since), s.err)
	default:
		h.log.printf("session expired: at=%s, renewal in progress", at)
	}
}

func (h *helper) jobEnded(j job, keys credentials.Keys, err error) {
	if err != nil {
		err = fault.Errorf(fault.KindOf(err), "%s", shorten(h.scrub.scrub(clean([]byte(err.Error())))))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.options.now()
	out := h.session.recordAttempt(now, j, keys, err)
	switch {
	case out.taken:
		h.scrub.setSecrets(now, "session", keys.SecretAccessKey, keys.SessionToken)
		h.serveSession()
		if !out.failed.IsZero() {
			h.log.printf("session renewed: until=%s, renewal had failed since %s", stamp(keys.Expires), stamp(out.failed))
		} else if keys.Expires.IsZero() || keys.Expires.Sub(now) > loggedLife {
			h.log.printf("session renewed: until=%s", stamp(keys.Expires))
		}
	case out.changed:
		h.log.printf("session renewal failed, retrying: %v", h.session.err)
	}
	if out.changed {
		h.changeStatus()
	}
	if !out.taken {
		h.endpoint.wakeRequests()
	}
}

// updateSession uses the keys and the order of a request. Call under mu.
func (h *helper) updateSession(keys credentials.Keys, order credentials.Order) error {
	if order.Kind == credentials.AsIs {
		return fault.Errorf(fault.Invalid, "sessions cannot be made from an order of kind %s; send its keys instead", order.Kind)
	}
	if keys.IsZero() && order.IsZero() {
		return fault.Errorf(fault.Invalid, "the request has neither keys nor an order")
	}
	now := h.options.now()
	if !keys.IsZero() {
		h.scrub.setSecrets(now, "session", keys.SecretAccessKey, keys.SessionToken)
	}
	h.scrub.setSecrets(now, "order", order.Secrets()...)
	h.session.update(now, keys, order)
	h.serveSession()
	return nil
}

// serveSession passes the session to the endpoint and wakes renew. Call under mu.
func (h *helper) serveSession() {
	h.endpoint.setKeys(h.session.keys, h.session.ends)
	h.wakeRenewal()
}

func (h *helper) wakeRenewal() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// sessionMissing records that the client requested credentials without a valid session, and reports whether one is expected soon.
func (h *helper) sessionMissing() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.wakeRenewal()
	return h.session.noteDemand(h.options.now())
}
