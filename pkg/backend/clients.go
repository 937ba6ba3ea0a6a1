package backend

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/smithy-go/logging"
	"github.com/aws/smithy-go/middleware"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// userAgent names the driver in a service's access logs.
const userAgent = "s3-csi-driver"

// Clients returns S3 clients that share connections and a retry budget per backend. Clients are cheap; use one per piece of
// work. All methods are safe for concurrent use.
type Clients struct {
	configs    Configured
	version    string
	apiOptions []func(*middleware.Stack) error
	transport  http.RoundTripper // nil: one for each backend
	proxy      func(*http.Request) (*url.URL, error)
	backoff    time.Duration
	silence    time.Duration // see maxSilence

	servicesMu sync.Mutex
	services   map[string]*service // by the backend's connection

	mu         sync.Mutex
	provider   aws.CredentialsProvider // the process's own chain, loaded on first use
	config     *aws.Config             // the SDK's config from environment and files, loaded on first use
	configFrom configFrom
}

// configFrom are the settings of the default backend in the SDK's config.
type configFrom struct {
	region    string
	fips      aws.FIPSEndpointState
	dualStack aws.DualStackEndpointState
}

// service is shared by the clients of one revision of a backend.
type service struct {
	http    *http.Client
	retryer aws.Retryer
}

// Option changes how Clients works.
type Option func(*Clients)

// WithVersion sets the driver's version in the user agent.
func WithVersion(version string) Option { return func(c *Clients) { c.version = version } }

// WithMiddleware adds to the middleware stack of every S3 and STS request.
func WithMiddleware(f func(*middleware.Stack) error) Option {
	return func(c *Clients) { c.apiOptions = append(c.apiOptions, f) }
}

// WithCredentials replaces the process's own credential chain.
func WithCredentials(provider aws.CredentialsProvider) Option {
	return func(c *Clients) { c.provider = aws.NewCredentialsCache(provider) }
}

// NewClients prepares the clients of all backends in the current config. It sends no requests.
func NewClients(configs Configured, opts ...Option) (*Clients, error) {
	c := &Clients{configs: configs, version: "dev", backoff: maxBackoff, silence: maxSilence, proxy: http.ProxyFromEnvironment, services: map[string]*service{}}
	for _, opt := range opts {
		opt(c)
	}
	for _, b := range configs.Config().Backends() {
		if _, err := c.service(b); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// newRetryer allows few attempts, because every RPC has a deadline and is repeated by its caller. The retry budget is shared per
// backend, so that a broken service does not get three times the requests.
func newRetryer(backoff time.Duration) aws.Retryer {
	return retry.NewStandard(func(o *retry.StandardOptions) {
		o.MaxAttempts = maxAttempts
		o.MaxBackoff = backoff
		throttled := retry.RetryableHTTPStatusCode{Codes: map[int]struct{}{http.StatusTooManyRequests: {}}} // under any code
		o.Retryables = append([]retry.IsErrorRetryable{retry.IsErrorRetryableFunc(wrongServer), throttled}, o.Retryables...)
	})
}

// Close closes idle connections. Existing clients remain usable.
func (c *Clients) Close() {
	c.servicesMu.Lock()
	defer c.servicesMu.Unlock()
	for _, s := range c.services {
		s.http.CloseIdleConnections()
	}
}

// service returns the shared part of the clients of b. A new one replaces those of backends that are no longer configured; their clients
// remain usable.
func (c *Clients) service(b Backend) (*service, error) {
	revision := b.connection()
	c.servicesMu.Lock()
	defer c.servicesMu.Unlock()
	if s, ok := c.services[revision]; ok {
		return s, nil
	}
	if _, err := c.configs.Config().Backend(b.Name); err != nil {
		return nil, err
	}
	proxy, err := b.proxyFunc(c.proxy)
	if err != nil {
		return nil, err
	}
	current := map[string]bool{}
	for _, other := range c.configs.Config().Backends() {
		current[other.connection()] = true
	}
	for other, old := range c.services {
		if !current[other] {
			old.http.CloseIdleConnections()
			delete(c.services, other)
		}
	}
	s := &service{http: newHTTPClient(b.roots, proxy, c.silence), retryer: newRetryer(c.backoff)}
	if c.transport != nil {
		s.http.Transport = c.transport
	}
	c.services[revision] = s
	return s, nil
}

// connection identifies the settings that clients share.
func (b Backend) connection() string {
	b.Requests = Requests{}
	return b.Revision()
}

// endpointOptions chooses among the endpoints of AWS, regardless of the environment's settings, which clients do not know.
func (b Backend) endpointOptions() (fips aws.FIPSEndpointState, dualStack aws.DualStackEndpointState) {
	fips, dualStack = aws.FIPSEndpointStateDisabled, aws.DualStackEndpointStateDisabled
	if b.FIPS {
		fips = aws.FIPSEndpointStateEnabled
	}
	if b.DualStack {
		dualStack = aws.DualStackEndpointStateEnabled
	}
	return fips, dualStack
}

// S3 returns a client that does not check the bucket owner, for requests that are not about one bucket and for CreateBucket. Zero
// keys are the process's own chain; region "" is the backend's. The error is a Precondition (unknown backend) or one of
// reading the process's own AWS configuration. Credentials are loaded with the first request.
func (c *Clients) S3(ctx context.Context, b Backend, keys credentials.Keys, region string) (*s3.Client, error) {
	return c.s3(ctx, b, c.credentials(keys), BucketInfo{Region: region})
}

// Bucket returns a client for a validated bucket. It uses the bucket's region and sends info.Owner as the expected bucket owner
// with every request.
func (c *Clients) Bucket(ctx context.Context, b Backend, keys credentials.Keys, info BucketInfo) (*s3.Client, error) {
	return c.s3(ctx, b, c.credentials(keys), info)
}

// KeySource returns the keys for a request. Its errors have a fault kind and become the request's.
type KeySource func(context.Context) (credentials.Keys, error)

// Retrieve implements aws.CredentialsProvider.
func (s KeySource) Retrieve(ctx context.Context) (aws.Credentials, error) {
	keys, err := s(ctx)
	return aws.Credentials{AccessKeyID: keys.AccessKeyID, SecretAccessKey: keys.SecretAccessKey, SessionToken: keys.SessionToken}, err
}

// Reach returns an error unless the service answers a request. Its answer does not matter: the request has no valid credentials.
func (c *Clients) Reach(ctx context.Context, b Backend) error {
	client, err := c.S3(ctx, b, credentials.Keys{AccessKeyID: "s3-csi-check", SecretAccessKey: "none"}, "")
	if err != nil {
		return err
	}
	if _, err = client.ListBuckets(ctx, &s3.ListBucketsInput{}); err == nil || ErrorCode(err) != "" {
		return nil
	}
	return Classify(err, b.String()+" cannot be reached")
}

// BucketWith is Bucket for work that may outlast a session: source is called for each request.
func (c *Clients) BucketWith(ctx context.Context, b Backend, source KeySource, info BucketInfo) (*s3.Client, error) {
	return c.s3(ctx, b, source, info)
}

// s3 returns a client for a bucket. Without its region and its owner it is for requests that are not about one.
func (c *Clients) s3(ctx context.Context, b Backend, provider aws.CredentialsProvider, bucket BucketInfo) (*s3.Client, error) {
	svc, err := c.service(b)
	if err != nil {
		return nil, err
	}
	set := func(o *s3.Options) {
		o.Region = cmp.Or(bucket.Region, b.StartRegion())
		o.BaseEndpoint = nil // AWS_ENDPOINT_URL applies to the default backend only, through the config
		if !b.AWS() {
			o.BaseEndpoint = aws.String(b.Endpoint)
			o.DisableS3ExpressSessionAuth = aws.Bool(true)
		}
		o.EndpointOptions.UseFIPSEndpoint, o.EndpointOptions.UseDualStackEndpoint = b.endpointOptions()
		o.UsePathStyle = b.PathStyle
		o.Credentials = provider
		o.HTTPClient = svc.http
		o.Retryer, o.RetryMaxAttempts = svc.retryer, 0
		// Many services refuse or ignore the newer checksums.
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
		o.DisableLogOutputChecksumValidationSkipped = true
		o.Logger = logging.Nop{}
		o.APIOptions = append(c.stack(), nameRegion, readListings, BoundAnswers, unsigned, b.Requests.headers(bucket.Owner))
	}
	if !b.AWS() {
		return s3.New(s3.Options{}, set), nil
	}
	cfg, err := c.sdkConfig(ctx)
	if err != nil {
		return nil, err
	}
	return s3.NewFromConfig(cfg, set), nil
}

// STS returns a client of the backend's security token service or, if none is declared, of a possible one at the backend's own
// endpoint. Zero keys are the process's own chain. Errors are those of S3.
func (c *Clients) STS(ctx context.Context, b Backend, keys credentials.Keys) (*sts.Client, error) {
	svc, err := c.service(b)
	if err != nil {
		return nil, err
	}
	endpoint, declared := b.Endpoint, STS{}
	if b.STS != nil {
		declared = *b.STS
		endpoint = cmp.Or(declared.Endpoint, endpoint)
	}
	set := func(o *sts.Options) {
		o.Region = cmp.Or(declared.Region, b.StartRegion())
		o.BaseEndpoint = nil
		if endpoint != "" {
			o.BaseEndpoint = aws.String(endpoint)
		} else {
			o.EndpointOptions.UseFIPSEndpoint, o.EndpointOptions.UseDualStackEndpoint = b.endpointOptions()
		}
		o.Credentials = c.credentials(keys)
		o.HTTPClient = svc.http
		o.Retryer, o.RetryMaxAttempts = svc.retryer, 0
		o.Logger = logging.Nop{}
		o.APIOptions = append(c.stack(), BoundAnswers)
	}
	if endpoint != "" {
		return sts.New(sts.Options{}, set), nil
	}
	cfg, err := c.sdkConfig(ctx)
	if err != nil {
		return nil, err
	}
	return sts.NewFromConfig(cfg, set), nil
}

// credentials returns a provider of the keys, or of the process's own if they are zero.
func (c *Clients) credentials(keys credentials.Keys) aws.CredentialsProvider {
	if keys.IsZero() {
		return chain{c}
	}
	return awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken)
}

// stack returns the additions to every client's middleware.
func (c *Clients) stack() []func(*middleware.Stack) error {
	return append([]func(*middleware.Stack) error{awsmiddleware.AddUserAgentKeyValue(userAgent, c.version)}, c.apiOptions...)
}

// Bounds of one request. The caller's context is the deadline; these detect an endpoint that does not respond early enough for a
// second attempt. Listings and deletions of a thousand keys may take long.
const (
	dialTimeout     = 4 * time.Second
	tlsTimeout      = 4 * time.Second
	responseTimeout = 30 * time.Second
	idleTimeout     = 90 * time.Second
	// maxSilence also bounds how long a response may stop in its middle. The read that waits for a response begins when the
	// connection becomes idle, so it includes that time.
	maxSilence  = idleTimeout + responseTimeout
	maxAttempts = 3
	maxBackoff  = 2 * time.Second

	maxCAFileSize = 512 << 10 // bytes; twice a system bundle. Orders for helpers contain it in one message.
)

type silentKey struct{}

// WithoutHeaderTimeout returns a context for requests that a service may work on without a word until their context ends, such as copies.
func WithoutHeaderTimeout(ctx context.Context) context.Context {
	return context.WithValue(ctx, silentKey{}, silentKey{})
}

// transports sends requests whose context is WithoutHeaderTimeout on connections of their own.
type transports struct{ normal, silent *http.Transport }

func (t transports) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Context().Value(silentKey{}) != nil {
		return t.silent.RoundTrip(r)
	}
	return t.normal.RoundTrip(r)
}

func (t transports) CloseIdleConnections() {
	t.normal.CloseIdleConnections()
	t.silent.CloseIdleConnections()
}

func newHTTPClient(roots *x509.CertPool, proxy func(*http.Request) (*url.URL, error), silence time.Duration) *http.Client {
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	normal := &http.Transport{
		Proxy:                 proxy,
		DialContext:           readsWithin(silence, dialer.DialContext),
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		TLSHandshakeTimeout:   tlsTimeout,
		ResponseHeaderTimeout: responseTimeout,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       idleTimeout,
		MaxIdleConns:          128,
		MaxIdleConnsPerHost:   64,
		ForceAttemptHTTP2:     true,
		// The SDK does not ask for compression, and a small answer could become a huge one.
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeaderBytes,
	}
	silent := normal.Clone()
	silent.ResponseHeaderTimeout, silent.DialContext = 0, dialer.DialContext
	return &http.Client{
		Transport: transports{normal, silent},
		// S3 redirects to a bucket's region. Following would send a signature to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// readsWithin returns a dialer whose connections fail after a read that received nothing for the limit. Not all work in the background
// bounds each request, and net/http has no bound for the body of a response.
func readsWithin(limit time.Duration, dial dialFunc) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &boundedConn{conn, limit}, nil
	}
}

type boundedConn struct {
	net.Conn
	limit time.Duration
}

func (c *boundedConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

// withFiles reads the backend's files. Errors are Invalid and name the key.
func (b Backend) withFiles() (_ Backend, err error) {
	at := "backends." + b.Name + "."
	if b, err = b.withCA(); err != nil {
		return b, fault.Field(at+"caFile", "%w", err)
	}
	if b.Proxy, err = b.Proxy.read(); err != nil {
		return b, fault.Field(at+"proxy.credentialsFile", "%w", err)
	}
	return b, nil
}

// withCA reads the backend's CA file, if it has one.
func (b Backend) withCA() (Backend, error) {
	if b.CAFile == "" {
		return b, nil
	}
	pem, err := readBounded(b.CAFile, maxCAFileSize)
	if err != nil {
		return b, err
	}
	if b.roots = Roots(pem); b.roots == nil {
		return b, fmt.Errorf("%s has no PEM certificate", b.CAFile)
	}
	sum := sha256.Sum256(pem)
	b.ca, b.caSum = string(pem), hex.EncodeToString(sum[:])
	return b, nil
}

// Roots returns the system's certificates and those in pem; nil: pem has none.
func Roots(pem []byte) *x509.CertPool {
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool() // a minimal image has none
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil
	}
	return roots
}

// WrongServer reports whether a request failed permanently because of the server: an untrusted certificate, no TLS, or an answer without end.
func WrongServer(err error) bool {
	return is[*tls.CertificateVerificationError](err) || errors.Is(err, http.ErrSchemeMismatch) || is[*answerTooLong](err) || is[tls.RecordHeaderError](err)
}

// wrongServer keeps such errors from being retried.
func wrongServer(err error) aws.Ternary {
	if WrongServer(err) {
		return aws.FalseTernary
	}
	return aws.UnknownTernary
}
