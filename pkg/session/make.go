package session

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// budget is what making one session may take, with all attempts.
	budget = 10 * time.Second
	// answerBound is what one answer may take, so that there is time for a second attempt.
	answerBound = 4 * time.Second
	dialBound   = 3 * time.Second
	// together is how many sessions of one service are made at a time. A service that issues a token within 50 ms serves more
	// than a hundred mounts a second this way, and a node's start does not look like an attack.
	together = 8
	// services is how many services are remembered before all are forgotten: each change of a CA file makes another.
	services = 32
	// usualLife is how long services make a session last that are not asked for a duration, as a rule.
	usualLife = time.Hour
	// maxServiceAnswer bounds what is read of an answer, in bytes: a session's has a few thousand.
	maxServiceAnswer = 1 << 20
)

// Maker makes sessions. It keeps connections to the services that it asks, and bounds how many sessions of one service are made
// at a time. All methods may be called concurrently.
type Maker struct {
	userAgent string
	now       func() time.Time
	backoff   time.Duration

	mu       sync.Mutex
	services map[[sha256.Size]byte]*service
}

// service is what the orders for one service share.
type service struct {
	http  *http.Client
	slots chan struct{}
}

// NewMaker makes a Maker that starts nothing. version is the driver's, for the services' logs.
func NewMaker(version string) *Maker {
	return &Maker{userAgent: version, now: time.Now, backoff: 2 * time.Second, services: map[[sha256.Size]byte]*service{}}
}

// Close closes idle connections. The Maker still works.
func (m *Maker) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.services {
		s.http.CloseIdleConnections()
	}
}

// Make asks for what the order says. The end of the keys is in the time of this machine's clock, however wrong that is. It takes
// at most some ten seconds, with all attempts, beside the wait for its turn.
//
// Denied: the service refuses. Unauthenticated: what the order holds is expired, revoked or not meant for this service. Busy: it
// asks to slow down. Unavailable: it did not answer. Timeout: ctx ended. Precondition: the order cannot work until somebody
// changes something. No text holds a secret.
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
		return credentials.Keys{}, fault.Errorf(fault.Timeout, "%s: the time ran out while other sessions of the same service were being made", subject(o))
	}
	asked := m.now()
	keys, err := m.makeNow(ctx, s, o)
	if err == nil && keys.Expires.IsZero() { // it is not told, and all sessions end
		life := o.Duration
		if life == 0 {
			life = usualLife
		}
		keys.Expires = asked.Add(life).UTC().Round(0)
	}
	if ctx.Err() != nil && fault.Is(err, fault.Unavailable) {
		err = fault.Errorf(fault.Timeout, "%w", err) // it may be the caller who had no time
	}
	return keys, err
}

// makeNow does what the order says, within the budget.
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

// Make is Maker.Make for a process that makes one session.
func Make(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	m := NewMaker("")
	defer m.Close()
	return m.Make(ctx, o)
}

// complete tells whether an order has what its kind needs.
func complete(o credentials.Order) error {
	switch o.Kind {
	case credentials.AssumeRole, credentials.FederationToken:
		if o.Keys.AccessKeyID == "" || o.Keys.SecretAccessKey == "" {
			return fault.Errorf(fault.Unauthenticated, "%s: there are no keys to make it with", subject(o))
		}
	case credentials.WebIdentity, credentials.PodIdentity:
		if o.Token == "" {
			return fault.Errorf(fault.Unauthenticated, "%s: there is no token to make it with", subject(o))
		}
	default:
		return fault.Errorf(fault.Precondition, "%s: this program does not know how to make such a session: it is older than what asks it", subject(o))
	}
	return nil
}

// service finds or makes what the order's service shares.
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
		if roots, err = x509.SystemCertPool(); err != nil {
			roots = x509.NewCertPool()
		}
		if !roots.AppendCertsFromPEM([]byte(o.STS.CA)) {
			return nil, fault.Errorf(fault.Precondition, "%s: the caFile of the backend holds no PEM certificate", subject(o))
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
			return nil, fault.Errorf(fault.Precondition, "%s: the proxy on the way to the token service is no URL", subject(o))
		}
		proxy = http.ProxyURL(u)
	}
	s := &service{http: newHTTPClient(roots, proxy), slots: make(chan struct{}, together)}
	m.services[key] = s
	return s, nil
}

func newHTTPClient(roots *x509.CertPool, proxy func(*http.Request) (*url.URL, error)) *http.Client {
	return &http.Client{
		Transport: boundedAnswers{&http.Transport{
			Proxy:                 proxy,
			DialContext:           (&net.Dialer{Timeout: dialBound, KeepAlive: 30 * time.Second}).DialContext,
			TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout:   dialBound,
			ResponseHeaderTimeout: answerBound,
			IdleConnTimeout:       90 * time.Second,
			MaxIdleConnsPerHost:   together,
			ForceAttemptHTTP2:     true,
		}},
		// A followed redirect would carry a token, or a signature, to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// boundedAnswers cuts answers off that are longer than any session's: whoever reads them keeps all of it.
type boundedAnswers struct{ *http.Transport }

// RoundTrip implements http.RoundTripper.
func (b boundedAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.Transport.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, maxServiceAnswer), resp.Body}
	}
	return resp, err
}
