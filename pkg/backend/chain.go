package backend

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/logging"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// expiryWindow is how long before their end the process's own credentials are renewed.
const expiryWindow = 3 * time.Minute

// chainTimeout bounds one request to a service that issues them.
const chainTimeout = 10 * time.Second

// chain is the process's own credential chain, loaded when it is first asked. Its errors say what an operator can do.
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
		err = errors.New("the chain gave an empty key")
	case ctx.Err() != nil:
		return aws.Credentials{}, fault.Errorf(fault.Timeout, "looking for the driver's own AWS credentials: %w", err)
	case tokenServiceFailed(err):
		return aws.Credentials{}, fault.Errorf(fault.Unavailable, "the service that issues the driver's own AWS credentials did not give any: %w", err)
	}
	return aws.Credentials{}, fault.Errorf(fault.Unauthenticated, "the driver has no AWS credentials of its own: give its process some (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "+
		"a role for its service account, an instance profile), or give the volume a secret and, for the controller, set controllerCredentials: secret on the backend: %w", err)
}

// tokenServiceFailed tells whether a credential service that the environment names did not answer. The instance metadata
// service is not meant: away from EC2 it never answers, and that is no outage.
func tokenServiceFailed(err error) bool {
	var op *smithy.OperationError
	if !errors.As(err, &op) || strings.EqualFold(op.ServiceID, "ec2imds") {
		return false
	}
	kind, _ := verdict(op.Err)
	return kind == fault.Unavailable
}

// DriverKeys gives what the process's own chain gives right now, for mounts that use the driver's credentials.
// Unauthenticated: the process has none.
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

// sdkConfig loads the SDK's config from the process's environment and files, which asks no network, and keeps it once that
// succeeded, as long as the default backend's region stays.
func (c *Clients) sdkConfig(ctx context.Context) (aws.Config, error) {
	region := fallbackRegion
	if b, err := c.configs.Config().Backend(volume.DefaultBackend); err == nil {
		region = b.StartRegion()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.config != nil && c.region == region {
		return *c.config, nil
	}
	cfg, err := config.LoadDefaultConfig(ctx,
		config.WithDefaultRegion(region), // web identity needs one
		config.WithLogger(logging.Nop{}),
		// The SDK shares one look-up among all that ask and detaches it from their contexts, so that it needs a bound of
		// its own. The type is one that the SDK can give AWS_CA_BUNDLE and the short dial time of instance metadata to.
		config.WithHTTPClient(awshttp.NewBuildableClient().WithTimeout(chainTimeout)),
		config.WithCredentialsCacheOptions(func(o *aws.CredentialsCacheOptions) { o.ExpiryWindow = expiryWindow }),
	)
	if err != nil {
		return aws.Config{}, fault.Errorf(fault.Precondition, "reading the driver's own AWS configuration (AWS_* variables, shared config files): %w", err)
	}
	c.config, c.region = &cfg, region
	return cfg, nil
}
