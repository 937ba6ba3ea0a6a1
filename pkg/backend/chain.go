package backend

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/logging"
	"github.com/aws/smithy-go/middleware"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// expiryWindow is how long before their expiry the process's own credentials are renewed.
const expiryWindow = 3 * time.Minute

// chainTimeout bounds a request to a service that issues them.
const chainTimeout = 10 * time.Second

// chain is the process's own credential chain, loaded on first use.
type chain struct{ clients *Clients }

// Retrieve implements aws.CredentialsProvider.
func (p chain) Retrieve(ctx context.Context) (aws.Credentials, error) {
	provider, err := p.clients.chainProvider(ctx)
	if err != nil {
		return aws.Credentials{}, err
	}
	got, err := provider.Retrieve(ctx)
	switch {
	case err == nil && got.HasKeys():
		return got, nil
	case err == nil:
		err = errors.New("the chain returned an empty key")
	case ctx.Err() != nil:
		return aws.Credentials{}, fault.Errorf(fault.Timeout, "get the driver's own AWS credentials: %w", err)
	case tokenServiceFailed(err):
		return aws.Credentials{}, fault.Errorf(fault.Unavailable, "get the driver's own AWS credentials: the service that issues them failed: %w", err)
	}
	return aws.Credentials{}, fault.Errorf(fault.Unauthenticated, "the driver has no AWS credentials of its own; supply some (AWS_ACCESS_KEY_ID and "+
		"AWS_SECRET_ACCESS_KEY, "+
		"a role for its service account, an instance profile), or give the volume a secret and, for the controller, set controllerCredentials: secret on the "+
		"backend: %w", err)
}

// tokenServiceFailed reports whether a credential service that the environment names did not respond. The instance metadata
// service does not count: outside of EC2 it never responds.
func tokenServiceFailed(err error) bool {
	var op *smithy.OperationError
	if errors.As(err, &op) && strings.EqualFold(op.ServiceID, "ec2imds") {
		return false
	}
	kind, _ := verdict(err)
	return kind == fault.Unavailable
}

// DriverKeys returns the current keys of the process's own chain. Unauthenticated: there are none.
func (c *Clients) DriverKeys(ctx context.Context) (credentials.Keys, error) {
	got, err := chain{c}.Retrieve(ctx)
	if err != nil {
		return credentials.Keys{}, err
	}
	keys := credentials.Keys{AccessKeyID: got.AccessKeyID, SecretAccessKey: got.SecretAccessKey, SessionToken: got.SessionToken}
	if got.CanExpire {
		keys.Expires = got.Expires
	}
	return keys, nil
}

func (c *Clients) chainProvider(ctx context.Context) (aws.CredentialsProvider, error) {
	c.mu.Lock()
	provider := c.provider
	c.mu.Unlock()
	if provider != nil {
		return provider, nil
	}
	cfg, err := c.sdkConfig(ctx)
	if err != nil {
		return nil, err
	}
	return cfg.Credentials, nil
}

// sdkConfig loads the SDK's config from the process's environment and files, without network access. It keeps the config as long
// as the default backend's settings for it stay the same.
func (c *Clients) sdkConfig(ctx context.Context) (aws.Config, error) {
	region, fips, dualStack := fallbackRegion, aws.FIPSEndpointStateUnset, aws.DualStackEndpointStateUnset
	if b, err := c.configs.Config().Backend(volume.DefaultBackend); err == nil {
		region = b.StartRegion()
		if b.AWS() {
			fips, dualStack = b.endpointOptions()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if from := (configFrom{region, fips, dualStack}); c.config == nil || c.configFrom != from {
		c.config, c.configFrom = nil, from
	} else {
		return *c.config, nil
	}
	cfg, err := config.LoadDefaultConfig(ctx,
		config.WithDefaultRegion(region), // web identity needs one
		config.WithUseFIPSEndpoint(fips),
		config.WithUseDualStackEndpoint(dualStack),
		config.WithLogger(logging.Nop{}),
		// The SDK shares a lookup among callers and detaches it from their contexts, so it needs a bound of its own. With
		// this type the SDK can set AWS_CA_BUNDLE and the short dial timeout of instance metadata.
		config.WithHTTPClient(awshttp.NewBuildableClient().WithTimeout(chainTimeout).WithTransportOptions(func(t *http.Transport) {
			t.MaxResponseHeaderBytes = maxHeaderBytes
		})),
		config.WithAPIOptions([]func(*middleware.Stack) error{BoundAnswers}),
		config.WithRetryer(func() aws.Retryer { return newRetryer(c.backoff) }),
		config.WithCredentialsCacheOptions(func(o *aws.CredentialsCacheOptions) { o.ExpiryWindow = expiryWindow }),
	)
	if err != nil {
		return aws.Config{}, fault.Errorf(fault.Precondition, "read the driver's own AWS configuration (AWS_* variables, shared config files): %w", err)
	}
	c.config = &cfg
	return cfg, nil
}
