package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsconfig "github.com/aws/aws-sdk-go-v2/config"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/fshttp"
	"github.com/rclone/rclone/lib/encoder"
)

// heads reads the metadata of objects. rclone's S3 backend does not expose ETags, which conditions need.
type heads struct {
	client         *awss3.Client
	credentials    *credentialCache
	bucket, prefix string
	names          encoder.MultiEncoder
}

func newHeads(ctx context.Context, c config) (*heads, error) {
	info, err := fs.Find("s3")
	if err != nil {
		return nil, err
	}
	h := &heads{bucket: c.bucket, prefix: c.prefix}
	for i := range info.Options {
		if info.Options[i].Name == "encoding" {
			names, ok := info.Options[i].Default.(encoder.MultiEncoder)
			if !ok {
				return nil, fmt.Errorf("rclone's S3 backend: unexpected encoding of type %T", info.Options[i].Default)
			}
			h.names = names
		}
	}
	conf, err := awsconfig.LoadDefaultConfig(ctx)
	if err != nil {
		return nil, fmt.Errorf("AWS configuration: %w", err)
	}
	h.credentials = &credentialCache{from: conf.Credentials}
	conf.Credentials = h.credentials
	conf.HTTPClient, conf.RetryMaxAttempts = fshttp.NewClient(ctx), c.attempts
	if c.region != "" {
		conf.Region = c.region
	}
	if conf.Region == "" {
		conf.Region = "us-east-1" // as in rclone
	}
	h.client = awss3.NewFromConfig(conf, func(o *awss3.Options) {
		o.UsePathStyle = c.pathStyle
		if c.endpoint != "" {
			o.BaseEndpoint = aws.String(c.endpoint)
		}
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
	})
	return h, nil
}

func (h *heads) key(name string) string { return h.names.FromStandardPath(h.prefix + name) }

func (h *heads) url(name string) string { return "s3://" + h.bucket + "/" + h.key(name) }

// state returns the state of the current object.
func (h *heads) state(ctx context.Context, name string) (remoteState, error) {
	key := h.key(name)
	head, err := h.client.HeadObject(ctx, &awss3.HeadObjectInput{Bucket: &h.bucket, Key: &key})
	var answer *smithyhttp.ResponseError
	if errors.As(err, &answer) && answer.HTTPStatusCode() == http.StatusNotFound {
		return remoteState{}, nil
	}
	if err != nil {
		return remoteState{}, err
	}
	return stateOf(head), nil
}

// refreshInterval is the interval at which credentials are refreshed. The helper's endpoint issues them for up to fifteen minutes, so
// almost all of that is left if the helper crashes.
const refreshInterval = time.Minute

// refreshTimeout is the timeout for fetching credentials that uploads wait for.
const refreshTimeout = 10 * time.Second

// credentialCache refreshes credentials early. The SDK's own cache fetches new ones only when a request needs them: if the helper has
// crashed by then, late uploads could not be compared with their objects and would fail.
type credentialCache struct {
	from aws.CredentialsProvider

	mu      sync.Mutex
	last    aws.Credentials
	renewed time.Time // last attempt
}

// Retrieve returns the credentials of the last minute, or fetches new ones. If that fails, it returns the last ones until they expire.
func (l *credentialCache) Retrieve(ctx context.Context) (aws.Credentials, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	valid := l.last.HasKeys() && !l.last.Expired()
	if valid && time.Since(l.renewed) < refreshInterval {
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

// refresh fetches credentials, within a bound. If that fails, the request that needs them reports the error.
func (l *credentialCache) refresh(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	_, _ = l.Retrieve(bounded)
}

// keepFresh renews the credentials until ctx ends.
func (l *credentialCache) keepFresh(ctx context.Context) {
	tick := time.NewTicker(refreshInterval)
	defer tick.Stop()
	for {
		l.refresh(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
