package session

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// budget bounds making one session, with all attempts.
	budget = 10 * time.Second
	// answerBound is the timeout of one response, so that there is time for a second attempt.
	answerBound = 4 * time.Second
	dialBound   = 3 * time.Second
	// maxConcurrent is how many sessions of one service are made at a time. With 50 ms for a session that is more than a
	// hundred a second, and the start of a node does not look like an attack.
	maxConcurrent = 8
	// services is how many services are kept before all are dropped: each change of a CA file makes another.
	services = 32
	// defaultDuration is the usual validity of sessions without a requested duration.
	defaultDuration = time.Hour
)

// Maker makes sessions. It keeps connections to token services and bounds how many sessions of a service are made at a time. It
// is safe for concurrent use.
type Maker struct {
	userAgent string
	now       func() time.Time
	backoff   time.Duration

	mu       sync.Mutex
	services map[[sha256.Size]byte]*service
}

// service is shared by the orders for one token service.
type service struct {
	http  *http.Client
	slots chan struct{}
}

// NewMaker returns a Maker. version is the driver's, for the user agent.
func NewMaker(version string) *Maker {
	return &Maker{userAgent: version, now: time.Now, backoff: 2 * time.Second, services: map[[sha256.Size]byte]*service{}}
}

// Close closes idle connections. The Maker remains usable.
func (m *Maker) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.services {
		s.http.CloseIdleConnections()
	}
}

// Make makes a session from an order. The keys expire by this machine's clock, even if that is wrong. It takes about ten seconds
// at most, in addition to the wait for a free slot.
//
// Denied: the service refuses. Unauthenticated: the order's credentials have expired, are revoked or of another service. Busy:
// the service throttles requests. Unavailable: it did not respond. Timeout: ctx ended. Precondition: the order cannot work with
// the current configuration. Errors contain no secrets.
func (m *Maker) Make(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	if o.Kind == credentials.AsIs {
		return o.Keys, nil
	}
	if err := complete(o); err != nil {
		return credentials.Keys{}, err
	}
	s, err := m.service(o)
	if err != nil {
		return credentials.Keys{}, err
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return credentials.Keys{}, fault.Errorf(fault.Timeout, "%s: timed out waiting for other sessions of the same service", subject(o))
	}
	sent := m.now()
	keys, err := m.makeNow(ctx, s, o)
	if err == nil && keys.Expires.IsZero() { // the service named no expiry, and all sessions expire
		life := o.Duration
		if life == 0 {
			life = defaultDuration
		}
		keys.Expires = sent.Add(life).UTC().Round(0)
	}
	if ctx.Err() != nil && fault.Is(err, fault.Unavailable) {
		err = fault.Errorf(fault.Timeout, "%w", err) // the caller may have had too little time
	}
	return keys, err
}

// makeNow makes a session within the budget.
func (m *Maker) makeNow(ctx context.Context, s *service, o credentials.Order) (credentials.Keys, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	if o.Kind == credentials.PodIdentity {
		keys, err := m.askAgent(ctx, o)
		if err != nil || o.RoleARN == "" {
			return keys, err
		}
		o.Kind, o.Keys, o.Token = credentials.AssumeRole, keys, ""
	}
	return m.ask(ctx, s, o)
}

// complete refuses an order without the fields that its kind needs.
func complete(o credentials.Order) error {
	switch o.Kind {
	case credentials.AssumeRole, credentials.FederationToken:
		if o.Keys.AccessKeyID == "" || o.Keys.SecretAccessKey == "" {
			return fault.Errorf(fault.Unauthenticated, "%s: no keys", subject(o))
		}
	case credentials.WebIdentity, credentials.PodIdentity:
		if o.Token == "" {
			return fault.Errorf(fault.Unauthenticated, "%s: no token", subject(o))
		}
	default:
		return fault.Errorf(fault.Precondition, "%s: unknown kind of session, this program is older than its caller", subject(o))
	}
	return nil
}

// service returns the order's service.
func (m *Maker) service(o credentials.Order) (*service, error) {
	name, err := json.Marshal(o.STS)
	if err != nil {
		return nil, err
	}
	key := sha256.Sum256(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.services[key]; ok {
		return s, nil
	}
	var roots *x509.CertPool
	if o.STS.CA != "" {
		if roots = backend.Roots([]byte(o.STS.CA)); roots == nil {
			return nil, fault.Errorf(fault.Precondition, "%s: caFile of the backend has no PEM certificate", subject(o))
		}
	}
	if len(m.services) >= services {
		for key, old := range m.services {
			old.http.CloseIdleConnections()
			delete(m.services, key)
		}
	}
	var proxy func(*http.Request) (*url.URL, error)
	if o.STS.Proxy != "" {
		u, err := url.Parse(o.STS.Proxy)
		if err != nil {
			return nil, fault.Errorf(fault.Precondition, "%s: the proxy for the token service is not a URL", subject(o))
		}
		proxy = http.ProxyURL(u)
	}
	s := &service{http: newHTTPClient(roots, proxy), slots: make(chan struct{}, maxConcurrent)}
	m.services[key] = s
	return s, nil
}

func newHTTPClient(roots *x509.CertPool, proxy func(*http.Request) (*url.URL, error)) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                 proxy,
			DialContext:           (&net.Dialer{Timeout: dialBound, KeepAlive: 30 * time.Second}).DialContext,
			TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout:   dialBound,
			ResponseHeaderTimeout: answerBound,
			IdleConnTimeout:       90 * time.Second,
			MaxIdleConnsPerHost:   maxConcurrent,
			ForceAttemptHTTP2:     true,
		},
		// Following a redirect would send a token or a signature to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// WithBackoff sets the longest pause between two attempts, 2 s otherwise, and returns the Maker. It must be called before Make.
func (m *Maker) WithBackoff(longest time.Duration) *Maker {
	m.backoff = longest
	return m
}
