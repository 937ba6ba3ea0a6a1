package backend

import (
	"context"
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
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// userAgent names the driver in a service's access logs.
const userAgent = "s3-csi-driver"

// Clients makes S3 clients that share, for each backend, connections and a retry budget. A client is cheap: make one for
// a piece of work and drop it. All methods may be called concurrently.
type Clients struct {
	configs    Configured
	version    string
	apiOptions []func(*middleware.Stack) error
	transport  http.RoundTripper // nil: one for each backend
	proxy      func(*http.Request) (*url.URL, error)
	backoff    time.Duration

	servicesMu sync.Mutex
	services   map[string]*service // by the backend's revision

	mu       sync.Mutex
	provider aws.CredentialsProvider // the process's own chain, once it was needed
	config   *aws.Config             // the SDK's config from environment and files, once it was needed
	region   string                  // that config was made for
}

// service is what the clients of one revision of a backend share.
type service struct {
	http    *http.Client
	retryer aws.Retryer
}

// Option changes how Clients works.
type Option func(*Clients)

// WithVersion puts the driver's version into the user agent.
func WithVersion(version string) Option { return func(c *Clients) { c.version = version } }

// WithMiddleware adds to the middleware stack of every request, S3's and STS's. Tests count requests with it.
func WithMiddleware(f func(*middleware.Stack) error) Option {
	return func(c *Clients) { c.apiOptions = append(c.apiOptions, f) }
}

// WithCredentials stands in for the process's own credential chain.
func WithCredentials(provider aws.CredentialsProvider) Option {
	return func(c *Clients) { c.provider = aws.NewCredentialsCache(provider) }
}

// withTransport sends every backend's requests through rt; tests stand in for AWS with it.
func withTransport(rt http.RoundTripper) Option { return func(c *Clients) { c.transport = rt } }

// withoutWaiting retries at once.
func withoutWaiting() Option { return func(c *Clients) { c.backoff = time.Millisecond } }

// NewClients prepares the clients of all backends in the config as it is now. It reads CA files that were not read yet, sends
// nothing and starts nothing.
func NewClients(configs Configured, opts ...Option) (*Clients, error) {
	c := &Clients{configs: configs, version: "dev", backoff: maxBackoff, proxy: http.ProxyFromEnvironment, services: map[string]*service{}}
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

// newRetryer allows few attempts, because every RPC has a deadline and a caller that comes again. The budget of retries is
// one per backend, so that a broken service is not asked three times by everybody.
func newRetryer(backoff time.Duration) aws.Retryer {
	return retry.NewStandard(func(o *retry.StandardOptions) {
		o.MaxAttempts = maxAttempts
		o.MaxBackoff = backoff
		o.Retryables = append([]retry.IsErrorRetryable{retry.IsErrorRetryableFunc(wrongServer)}, o.Retryables...)
	})
}

// Close closes idle connections. Clients made before still work.
func (c *Clients) Close() {
	c.servicesMu.Lock()
	defer c.servicesMu.Unlock()
	for _, s := range c.services {
		s.http.CloseIdleConnections()
	}
}

// service finds or makes what the clients of b share. Making one drops those of backends that the config does not have any
// more: work that began with them goes on, and gets a new one if it must.
func (c *Clients) service(b Backend) (*service, error) {
	revision := b.Revision()
	c.servicesMu.Lock()
	defer c.servicesMu.Unlock()
	if s, ok := c.services[revision]; ok {
		return s, nil
	}
	if _, err := c.configs.Config().Backend(b.Name); err != nil {
		return nil, err
	}
	if b.roots == nil {
		var err error
		if b, err = b.withCA(); err != nil {
			return nil, fault.Field("backends."+b.Name+".caFile", "%w", err)
		}
	}
	current := map[string]bool{}
	for _, other := range c.configs.Config().Backends() {
		current[other.Revision()] = true
	}
	for other, old := range c.services {
		if !current[other] {
			old.http.CloseIdleConnections()
			delete(c.services, other)
		}
	}
	s := &service{http: newHTTPClient(b.roots), retryer: newRetryer(c.backoff)}
	if c.transport != nil {
		s.http.Transport = c.transport
	}
	c.services[revision] = s
	return s, nil
}

// S3 gives a client that checks no bucket owner: for what is not about one bucket, and for CreateBucket. keys' zero value is
// the process's own chain; region "" is the backend's. The error is a Precondition (unknown backend) or one of reading
// the process's own AWS configuration; credentials are only looked for when the first request is sent.
func (c *Clients) S3(ctx context.Context, b Backend, keys credentials.Keys, region string) (*s3.Client, error) {
	return c.s3(ctx, b, c.credentials(keys), region)
}

// Bucket gives a client for a validated bucket: it works in the bucket's region and sends info.Owner as the expected
// bucket owner with every request, so that no call can forget it.
func (c *Clients) Bucket(ctx context.Context, b Backend, keys credentials.Keys, info BucketInfo) (*s3.Client, error) {
	return c.s3(ctx, b, c.credentials(keys), info.Region, expectOwner(info.Owner)...)
}

// KeySource gives the keys for a request that is about to be sent. Its errors have a fault kind, and become the request's.
type KeySource func(context.Context) (credentials.Keys, error)

// Retrieve implements aws.CredentialsProvider.
func (s KeySource) Retrieve(ctx context.Context) (aws.Credentials, error) {
	keys, err := s(ctx)
	return aws.Credentials{AccessKeyID: keys.AccessKeyID, SecretAccessKey: keys.SecretAccessKey, SessionToken: keys.SessionToken}, err
}

// BucketWith is Bucket for work that may outlast a session: source is asked for each request.
func (c *Clients) BucketWith(ctx context.Context, b Backend, source KeySource, info BucketInfo) (*s3.Client, error) {
	return c.s3(ctx, b, source, info.Region, expectOwner(info.Owner)...)
}

func (c *Clients) s3(ctx context.Context, b Backend, provider aws.CredentialsProvider, region string, more ...func(*middleware.Stack) error) (*s3.Client, error) {
	svc, err := c.service(b)
	if err != nil {
		return nil, err
	}
	if region == "" {
		region = b.StartRegion()
	}
	set := func(o *s3.Options) {
		o.Region = region
		o.BaseEndpoint = nil // AWS_ENDPOINT_URL is the default backend's business, and came to it by the config
		if !b.AWS() {
			o.BaseEndpoint = aws.String(b.Endpoint)
			o.DisableS3ExpressSessionAuth = aws.Bool(true)
		}
		o.UsePathStyle = b.PathStyle
		o.Credentials = provider
		o.HTTPClient = svc.http
		o.Retryer, o.RetryMaxAttempts = svc.retryer, 0
		// Many services refuse or ignore the newer checksums.
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
		o.DisableLogOutputChecksumValidationSkipped = true
		o.Logger = logging.Nop{}
		o.APIOptions = append(append(c.stack(), nameRegion), more...)
	}
	if !b.AWS() {
		return s3.New(s3.Options{}, set), nil
	}
	// On AWS the environment's wishes count (FIPS and dual-stack endpoints, for example).
	cfg, err := c.sdkConfig(ctx)
	if err != nil {
		return nil, err
	}
	return s3.NewFromConfig(cfg, set), nil
}

// sts gives a client of the backend's security token service.
func (c *Clients) sts(ctx context.Context, b Backend, keys credentials.Keys) (*sts.Client, error) {
	svc, err := c.service(b)
	if err != nil {
		return nil, err
	}
	region, endpoint := b.StartRegion(), b.Endpoint
	if b.STS != nil && b.STS.Region != "" {
		region = b.STS.Region
	}
	if b.STS != nil && b.STS.Endpoint != "" {
		endpoint = b.STS.Endpoint
	}
	set := func(o *sts.Options) {
		o.Region = region
		o.BaseEndpoint = nil
		if endpoint != "" {
			o.BaseEndpoint = aws.String(endpoint)
		}
		o.Credentials = c.credentials(keys)
		o.HTTPClient = svc.http
		o.Retryer, o.RetryMaxAttempts = svc.retryer, 0
		o.Logger = logging.Nop{}
		o.APIOptions = c.stack()
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

// credentials are the given keys, or the process's own where there are none.
func (c *Clients) credentials(keys credentials.Keys) aws.CredentialsProvider {
	if keys.IsZero() {
		return chain{c}
	}
	return awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken)
}

// stack is a fresh list of what every client adds to its middleware.
func (c *Clients) stack() []func(*middleware.Stack) error {
	return append([]func(*middleware.Stack) error{awsmiddleware.AddUserAgentKeyValue(userAgent, c.version)}, c.apiOptions...)
}

// expectOwner adds the header that makes S3 refuse (403) where another account owns the bucket. The SDK has it as an input
// of each operation, where it can be forgotten. It is set before signing.
func expectOwner(owner string) []func(*middleware.Stack) error {
	if owner == "" {
		return nil
	}
	add := middleware.BuildMiddlewareFunc("ExpectedBucketOwner", func(ctx context.Context, in middleware.BuildInput, next middleware.BuildHandler) (middleware.BuildOutput, middleware.Metadata, error) {
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			req.Header.Set("X-Amz-Expected-Bucket-Owner", owner)
		}
		return next.HandleBuild(ctx, in)
	})
	return []func(*middleware.Stack) error{func(s *middleware.Stack) error { return s.Build.Add(add, middleware.After) }}
}
