package backend

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/middleware"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Clients makes S3 clients.
type Clients struct{ version string }

// Option changes how Clients works.
type Option func(*Clients)

// WithVersion puts the driver's version into the user agent.
func WithVersion(version string) Option { return func(c *Clients) { c.version = version } }

// WithMiddleware adds to the middleware stack of every request, S3's and STS's; tests count requests with it.
func WithMiddleware(f func(*middleware.Stack) error) Option { panic("soon") }

// NewClients makes the clients' shared parts (transports); it starts nothing.
func NewClients(cfg *Config, opts ...Option) (*Clients, error) { panic("soon") }

// Close closes idle connections.
func (c *Clients) Close() {}

// S3 gives a client without any bucket owner check; region "" is the backend's. Zero keys are the process's own chain.
func (c *Clients) S3(ctx context.Context, b Backend, keys credentials.Keys, region string) (*s3.Client, error) {
	panic("soon")
}

// Bucket gives a client for a validated bucket: it works in its region and sends the expected bucket owner with
// every request.
func (c *Clients) Bucket(ctx context.Context, b Backend, keys credentials.Keys, info BucketInfo) (*s3.Client, error) {
	panic("soon")
}

// DriverKeys gives what the process's own chain gives right now.
func (c *Clients) DriverKeys(ctx context.Context) (credentials.Keys, error) { panic("soon") }
