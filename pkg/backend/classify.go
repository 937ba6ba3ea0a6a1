package backend

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Classify adds a fault kind and a text for operators to an error of an S3 or STS request. what names the operation and its
// object: "reading the volume record .s3-csi/volumes/x of bucket b". The text keeps the S3 code and the request id, the chain
// the original error. An error that has a kind keeps it; nil stays nil.
//
// After Unavailable, Timeout and Busy a write may have happened; the other kinds mean that it did not. An unexpected failed
// condition (412) is Busy, because another writer made a change.
func Classify(err error, what string) error {
	if err == nil {
		return nil
	}
	kind, why := verdict(err)
	classified := fault.Errorf(kind, "%s: %w", what, &explained{why, err})
	if is[*fault.Error](err) {
		return classified // not of a service, or classified before
	}
	return fault.See(pageAnswers, classified)
}

// pageAnswers explains the answers of services, and why there is none.
const pageAnswers = "docs/reference/errors.md#answers-of-s3"

// MayArrive reports whether the service may still carry out a request that failed with err: it was sent, and the service has not answered it.
func MayArrive(err error) bool {
	if err == nil {
		return false
	}
	if a, ok := Answered(err); ok {
		return a.Status == http.StatusBadGateway || a.Status == http.StatusGatewayTimeout // answers of a proxy, not of the service
	}
	dial, _ := errors.AsType[*net.OpError](err)
	switch {
	case dial != nil && dial.Op == "dial", is[*net.DNSError](err), is[*tls.CertificateVerificationError](err), is[tls.RecordHeaderError](err),
		errors.Is(err, http.ErrSchemeMismatch):
		return false
	case is[*smithyhttp.RequestSendError](err), is[*smithy.DeserializationError](err), is[*awshttp.ResponseError](err):
		return true
	}
	return canceled(err)
}

// is reports whether err's chain has an error of type E.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// explained replaces the SDK's long text and keeps its error in the chain.
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
	if a, ok := Answered(err); ok {
		return a.verdict()
	}
	if canceled(err) {
		return fault.Timeout, "timed out waiting for the service"
	}
	return networkVerdict(err)
}

// canceled reports whether the caller's context ended. Timeouts of connections and responses also match context.DeadlineExceeded, so the
// SDK's own types come first: it uses RequestSendError only while the context is valid.
func canceled(err error) bool {
	switch {
	case is[*smithy.CanceledError](err), is[*aws.RequestCanceledError](err):
		return true
	case is[*smithyhttp.RequestSendError](err), is[*net.OpError](err):
		return false
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// networkVerdict explains an error without a response of the service.
func networkVerdict(err error) (fault.Kind, string) {
	endpoint := "the endpoint"
	if u, ok := errors.AsType[*url.Error](err); ok {
		if parsed, parseErr := url.Parse(u.URL); parseErr == nil && parsed.Host != "" {
			endpoint = parsed.Scheme + "://" + parsed.Host
		}
	}
	hint := ""
	if strings.HasPrefix(endpoint, "http://") {
		hint = "; " + adviceTLS
	}
	long, _ := errors.AsType[*answerTooLong](err)
	dns, _ := errors.AsType[*net.DNSError](err)
	hostname, otherHost := errors.AsType[x509.HostnameError](err)
	alert, alerted := errors.AsType[tls.AlertError](err)
	netErr, _ := errors.AsType[net.Error](err)
	switch {
	case long != nil:
		return fault.Unavailable, long.Error() + "; check that the endpoint is an S3 service"
	case dns != nil:
		return fault.Unavailable, fmt.Sprintf("%s: cannot resolve host name %s (%s); check the endpoint and this host's DNS", endpoint, Clip(dns.Name, 255),
			Clip(dns.Err, 200))
	case is[x509.UnknownAuthorityError](err):
		return fault.Unavailable, endpoint + ": its TLS certificate is signed by an untrusted authority; set caFile on the backend"
	case otherHost:
		return fault.Unavailable, endpoint + ": its TLS certificate is for another host name: " + Clip(hostname.Error(), 300)
	case is[x509.CertificateInvalidError](err), is[*tls.CertificateVerificationError](err):
		return fault.Unavailable, endpoint + ": its TLS certificate is invalid: " + Clip(err.Error(), 300)
	case is[tls.RecordHeaderError](err), errors.Is(err, http.ErrSchemeMismatch):
		return fault.Unavailable, endpoint + ": it does not use TLS; check whether it is an http:// endpoint"
	case alerted:
		return fault.Unavailable, endpoint + ": the TLS handshake failed: " + Clip(alert.Error(), 200)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fault.Unavailable, endpoint + ": connection refused"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF):
		return fault.Unavailable, endpoint + ": connection closed without an answer" + hint
	case netErr != nil && netErr.Timeout():
		return fault.Unavailable, endpoint + ": it did not respond in time (" + Clip(netErr.Error(), 300) + ")"
	case netErr != nil:
		return fault.Unavailable, endpoint + ": the connection failed: " + Clip(netErr.Error(), 300) + hint
	case is[*smithy.DeserializationError](err), is[*awshttp.ResponseError](err): // a response in an unknown format
		return fault.Unavailable, "the response is incomplete or not from S3; check that the endpoint is an S3 service (" + Clip(err.Error(), 300) + ")"
	}
	if s := (interface{ ConnectionError() bool })(nil); errors.As(err, &s) && s.ConnectionError() {
		return fault.Unavailable, endpoint + ": the connection failed: " + Clip(err.Error(), 300) + hint
	}
	return fault.Unknown, Clip(err.Error(), 500)
}
