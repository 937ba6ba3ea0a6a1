package backend

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"syscall"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Classify puts a fault kind and a text for an operator on an error of an S3 or STS request. what says what was tried and on
// which bucket: "reading the volume record .s3-csi/volumes/x of bucket b". The S3 code and the request id stay in the text,
// and the original error in the chain. An error that has a kind already keeps it; nil stays nil.
//
// Unavailable, Timeout and Busy leave open whether a write happened; the other kinds are the service's word that it did not.
// A failed condition (412) that the caller did not expect is Busy: somebody changed the same thing.
func Classify(err error, what string) error {
	if err == nil {
		return nil
	}
	kind, why := verdict(err)
	return fault.Errorf(kind, "%s: %w", what, &explained{why, err})
}

// explained shows a readable text in place of the SDK's long one, which stays reachable.
type explained struct {
	text string
	err  error
}

func (e *explained) Error() string { return e.text }
func (e *explained) Unwrap() error { return e.err }

func verdict(err error) (fault.Kind, string) {
	if f := (*fault.Error)(nil); errors.As(err, &f) {
		return f.Kind, f.Error()
	}
	if a, ok := answered(err); ok {
		return a.verdict()
	}
	if canceled(err) {
		return fault.Timeout, "the time ran out before the service answered"
	}
	return networkVerdict(err)
}

// canceled tells whether the caller's context ended. Timeouts of dials and of answers also claim to be
// context.DeadlineExceeded, so the SDK's own types are asked first: it says RequestSendError only while the context lives.
func canceled(err error) bool {
	if c := (*smithy.CanceledError)(nil); errors.As(err, &c) {
		return true
	}
	if c := (*aws.RequestCanceledError)(nil); errors.As(err, &c) {
		return true
	}
	if s := (*smithyhttp.RequestSendError)(nil); errors.As(err, &s) {
		return false
	}
	if n := (*net.OpError)(nil); errors.As(err, &n) {
		return false
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// networkVerdict explains an error without an answer of the service.
func networkVerdict(err error) (fault.Kind, string) {
	endpoint := "the endpoint"
	if u := (*url.Error)(nil); errors.As(err, &u) {
		if parsed, parseErr := url.Parse(u.URL); parseErr == nil && parsed.Host != "" {
			endpoint = parsed.Scheme + "://" + parsed.Host
		}
	}
	var (
		dns      *net.DNSError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		invalid  x509.CertificateInvalidError
		verify   *tls.CertificateVerificationError
		record   tls.RecordHeaderError
		alert    tls.AlertError
		netErr   net.Error
		decode   *smithy.DeserializationError
		response *awshttp.ResponseError
	)
	switch {
	case errors.As(err, &dns):
		return fault.Unavailable, fmt.Sprintf("%s: the host name %s cannot be resolved (%s): check the endpoint and this host's DNS", endpoint, Clip(dns.Name, 255), Clip(dns.Err, 200))
	case errors.As(err, &unknown):
		return fault.Unavailable, endpoint + ": its TLS certificate is signed by an authority that is not trusted here: set caFile on the backend"
	case errors.As(err, &hostname):
		return fault.Unavailable, endpoint + ": its TLS certificate is for another host name: " + Clip(hostname.Error(), 300)
	case errors.As(err, &invalid), errors.As(err, &verify):
		return fault.Unavailable, endpoint + ": its TLS certificate is refused: " + Clip(err.Error(), 300)
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return fault.Unavailable, endpoint + ": it does not speak TLS: is it an http:// endpoint?"
	case errors.As(err, &alert):
		return fault.Unavailable, endpoint + ": the TLS handshake failed: " + Clip(alert.Error(), 200)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fault.Unavailable, endpoint + ": connection refused: nothing listens there"
	case errors.As(err, &netErr) && netErr.Timeout():
		return fault.Unavailable, endpoint + ": it did not answer in time (" + Clip(netErr.Error(), 300) + ")"
	case errors.As(err, &netErr):
		return fault.Unavailable, endpoint + ": " + Clip(netErr.Error(), 300)
	case errors.As(err, &decode), errors.As(err, &response): // an answer, but none that answered could read
		return fault.Unavailable, "the answer was cut off or is not S3's: is the endpoint an S3 service? (" + Clip(err.Error(), 300) + ")"
	}
	if s := (interface{ ConnectionError() bool })(nil); errors.As(err, &s) && s.ConnectionError() {
		return fault.Unavailable, endpoint + ": " + Clip(err.Error(), 300)
	}
	return fault.Unknown, Clip(err.Error(), 500)
}
