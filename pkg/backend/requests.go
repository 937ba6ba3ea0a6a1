package backend

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Requests are settings of all requests for a backend's buckets.
type Requests struct {
	// RequesterPays accepts the charges for requests.
	RequesterPays bool
	// SSE is the server-side encryption of new objects: "AES256", "aws:kms" or "aws:kms:dsse"; "" is the bucket's.
	SSE string
	// KMSKeyID is the key for it; "" is the service's default key.
	KMSKeyID string
}

// Names of the mount options for these settings. All clients that have them use the same names and values.
const (
	optionRequesterPays = "requester-pays"
	optionSSE           = "sse"
	optionKMSKeyID      = "sse-kms-key-id"
	optionDualStack     = "dual-stack"
)

// options returns the settings as mount options.
func (r Requests) options() (options []volume.Option) {
	if r.RequesterPays {
		options = append(options, volume.Option{Name: optionRequesterPays})
	}
	for _, o := range []volume.Option{{Name: optionSSE, Value: r.SSE}, {Name: optionKMSKeyID, Value: r.KMSKeyID}} {
		if o.HasValue = o.Value != ""; o.HasValue {
			options = append(options, o)
		}
	}
	return options
}

// For returns the backend with the settings that a volume's mount options have, for the driver's own requests for that volume.
func (b Backend) For(options []volume.Option) Backend {
	for _, o := range options {
		switch o.Name {
		case optionRequesterPays:
			b.Requests.RequesterPays = o.On()
		case optionSSE:
			if o.Value != b.Requests.SSE {
				b.Requests.SSE, b.Requests.KMSKeyID = o.Value, ""
			}
		}
	}
	if o, given := volume.FindOption(options, optionKMSKeyID); given {
		b.Requests.KMSKeyID = o.Value
	}
	return b
}

// RequestOptions returns those of a volume's mount options that For uses.
func RequestOptions(options []volume.Option) (of []string) {
	for _, o := range options {
		switch o.Name {
		case optionRequesterPays, optionSSE, optionKMSKeyID:
			of = append(of, o.String())
		}
	}
	return of
}

// ClientOptions returns the mount options of a volume's client: the volume's own, and those that its backend adds.
func (b Backend) ClientOptions(options []volume.Option) []volume.Option {
	all := slices.DeleteFunc(slices.Clone(options), func(o volume.Option) bool { return o.Name == optionDualStack && b.DualStack }) // see ClientEndpoint
	for _, o := range b.For(options).Requests.options() {
		if _, given := volume.FindOption(options, o.Name); !given {
			all = append(all, o)
		}
	}
	return all
}

// ClientEndpoint returns the endpoint of clients; "" is AWS's usual one of the region. Few clients can choose among AWS's endpoints by
// themselves.
func (b Backend) ClientEndpoint(ctx context.Context, region string) (string, error) {
	if !b.DualStack && !b.FIPS {
		return b.Endpoint, nil
	}
	at, err := s3.NewDefaultEndpointResolverV2().ResolveEndpoint(ctx, s3.EndpointParameters{Region: &region, UseFIPS: &b.FIPS, UseDualStack: &b.DualStack})
	if err != nil {
		return "", fault.Errorf(fault.Precondition, "%s: no such endpoint in region %s: %w", b, region, err)
	}
	return at.URI.Scheme + "://" + at.URI.Host, nil
}

// CheckClient refuses a volume whose client cannot have the backend's settings. options are the volume's. Errors are Precondition.
func (b Backend) CheckClient(cl client.Client, bucket string, options []volume.Option) error {
	if b.DualStack || b.FIPS {
		if strings.HasSuffix(bucket, directorySuffix) {
			return fault.Errorf(fault.Precondition, "%s: dualStack and fips cannot be used for the clients of directory buckets", b)
		}
		for _, o := range options {
			if o.Name == "transfer-acceleration" && o.On() || o.Name == optionDualStack && o.On() != b.DualStack {
				return fault.Errorf(fault.Precondition, "%s: the mount option %s cannot be combined with dualStack and fips of the backend; remove the option, or set "+
					"dualStack there", b, o)
			}
		}
	}
	if err := cl.Check(b.ClientOptions(options), "mountOptions"); err != nil {
		return fault.Errorf(fault.Precondition, "%s: client %s cannot apply sse or requesterPays of the backend; use another client or backend: %w", b, cl.Name, err)
	}
	return nil
}

// headers adds the headers of the settings, and the one with which S3 refuses (403) buckets of other accounts than owner, to every request
// that they are for. The SDK has them as inputs of each operation. They are set before signing.
func (r Requests) headers(owner string) func(*middleware.Stack) error {
	add := middleware.BuildMiddlewareFunc("RequestSettings", func(ctx context.Context, in middleware.BuildInput,
		next middleware.BuildHandler) (middleware.BuildOutput, middleware.Metadata, error) {
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			set(req.Header, "X-Amz-Expected-Bucket-Owner", owner)
			if r.RequesterPays {
				set(req.Header, "X-Amz-Request-Payer", "requester")
			}
			switch middleware.GetOperationName(ctx) {
			case "PutObject", "CopyObject", "CreateMultipartUpload":
				set(req.Header, "X-Amz-Server-Side-Encryption", r.SSE)
				set(req.Header, "X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id", r.KMSKeyID)
			}
		}
		return next.HandleBuild(ctx, in)
	})
	return func(s *middleware.Stack) error { return s.Build.Add(add, middleware.After) }
}

func set(h http.Header, name, value string) {
	if value != "" && h.Get(name) == "" {
		h.Set(name, value)
	}
}

// requests reads the settings.
func (f fileBackend) requests(b *Backend, place func(key string) string) error {
	b.Requests.RequesterPays = f.RequesterPays
	if !b.AWS() && (b.DualStack || b.FIPS) {
		return fault.Field(place("endpoint"), "cannot be combined with dualStack and fips, which choose endpoints of AWS; set the wanted endpoint")
	}
	if f.SSE == nil {
		return nil
	}
	if err := oneOf(place("sse.algorithm"), f.SSE.Algorithm, "AES256", "aws:kms", "aws:kms:dsse"); err != nil {
		return err
	}
	if key := f.SSE.KMSKeyID; key != "" {
		if f.SSE.Algorithm == "AES256" {
			return fault.Field(place("sse.kmsKeyID"), "needs sse.algorithm aws:kms or aws:kms:dsse")
		}
		if !kmsKeyID.MatchString(key) {
			return fault.Field(place("sse.kmsKeyID"), "is not the ARN or id of a key: at most 1000 printable ASCII characters without spaces")
		}
	}
	b.Requests.SSE, b.Requests.KMSKeyID = f.SSE.Algorithm, f.SSE.KMSKeyID
	return nil
}

// unsigned keeps headers out of the signature, and sends them. Front ends of services change Accept-Encoding, Google's by adding a value, and
// the service behind them would see another signature.
func unsigned(s *middleware.Stack) error {
	headers := []string{"Accept-Encoding", "Amz-Sdk-Invocation-Id", "Amz-Sdk-Request"}
	type keptHeaders struct{}
	hide := middleware.FinalizeMiddlewareFunc("HideFromSignature", func(ctx context.Context, in middleware.FinalizeInput,
		next middleware.FinalizeHandler) (middleware.FinalizeOutput, middleware.Metadata, error) {
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			kept := http.Header{}
			for _, name := range headers {
				kept[name] = req.Header.Values(name)
				req.Header.Del(name)
			}
			ctx = middleware.WithStackValue(ctx, keptHeaders{}, kept)
		}
		return next.HandleFinalize(ctx, in)
	})
	show := middleware.FinalizeMiddlewareFunc("ShowAfterSignature", func(ctx context.Context, in middleware.FinalizeInput,
		next middleware.FinalizeHandler) (middleware.FinalizeOutput, middleware.Metadata, error) {
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			kept, _ := middleware.GetStackValue(ctx, keptHeaders{}).(http.Header)
			for name, values := range kept {
				if len(values) > 0 {
					req.Header[name] = values
				}
			}
		}
		return next.HandleFinalize(ctx, in)
	})
	if err := s.Finalize.Insert(hide, "Signing", middleware.Before); err != nil {
		return err
	}
	return s.Finalize.Insert(show, "Signing", middleware.After)
}
