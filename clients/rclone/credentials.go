package main

import (
	"context"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
)

// renewEvery is the interval at which credentials are refreshed. The helper's endpoint issues them for up to fifteen minutes, so
// almost all of that is left if the helper crashes.
const renewEvery = time.Minute

// renewBound is the timeout for fetching credentials that uploads wait for.
const renewBound = 10 * time.Second

// lasting refreshes credentials early. The SDK's own cache fetches new ones only when a request needs them: if the helper has
// crashed by then, late uploads could not be compared with their objects and would fail.
type lasting struct {
	from aws.CredentialsProvider

	mu      sync.Mutex
	last    aws.Credentials
	renewed time.Time // last attempt
}

// Retrieve returns the credentials of the last minute, or fetches new ones. If that fails, it returns the last ones until they expire.
func (l *lasting) Retrieve(ctx context.Context) (aws.Credentials, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	valid := l.last.HasKeys() && !l.last.Expired()
	if valid && time.Since(l.renewed) < renewEvery {
		return l.last, nil
	}
	if cached, ok := l.from.(interface{ Invalidate() }); ok {
		cached.Invalidate()
	}
	fresh, err := l.from.Retrieve(ctx)
	l.renewed = time.Now()
	switch {
	case err == nil:
		l.last = fresh
	case !valid:
		return aws.Credentials{}, err
	}
	return l.last, nil
}

// renew fetches credentials, within a bound. If that fails, the request that needs them reports the error.
func (l *lasting) renew(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, renewBound)
	defer cancel()
	_, _ = l.Retrieve(bounded)
}

// keep renews the credentials until ctx ends.
func (l *lasting) keep(ctx context.Context) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		l.renew(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
