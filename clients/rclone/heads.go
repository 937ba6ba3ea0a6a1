package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"

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
	credentials    *lasting
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
	h.credentials = &lasting{from: conf.Credentials}
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
