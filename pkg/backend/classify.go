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
	if f := (*fault.Error)(nil); errors.As(err, &f) {
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
	var (
		dial     *net.OpError
		dns      *net.DNSError
		verify   *tls.CertificateVerificationError
		record   tls.RecordHeaderError
		sent     *smithyhttp.RequestSendError
		decode   *smithy.DeserializationError
		response *awshttp.ResponseError
	)
	switch {
	case errors.As(err, &dial) && dial.Op == "dial", errors.As(err, &dns), errors.As(err, &verify), errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return false
	case errors.As(err, &sent), errors.As(err, &decode), errors.As(err, &response):
		return true
	}
	return canceled(err)
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

// networkVerdict explains an error without a response of the service.
func networkVerdict(err error) (fault.Kind, string) {
	endpoint := "the endpoint"
	if u := (*url.Error)(nil); errors.As(err, &u) {
		if parsed, parseErr := url.Parse(u.URL); parseErr == nil && parsed.Host != "" {
			endpoint = parsed.Scheme + "://" + parsed.Host
		}
	}
	hint := ""
	if strings.HasPrefix(endpoint, "http://") {
		hint = "; " + adviceTLS
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
		long     *answerTooLong
		decode   *smithy.DeserializationError
		response *awshttp.ResponseError
	)
	switch {
	case errors.As(err, &long):
		return fault.Unavailable, long.Error() + "; check that the endpoint is an S3 service"
	case errors.As(err, &dns):
		return fault.Unavailable, fmt.Sprintf("%s: cannot resolve host name %s (%s); check the endpoint and this host's DNS", endpoint, Clip(dns.Name, 255), Clip(dns.Err, 200))
	case errors.As(err, &unknown):
		return fault.Unavailable, endpoint + ": its TLS certificate is signed by an untrusted authority; set caFile on the backend"
	case errors.As(err, &hostname):
		return fault.Unavailable, endpoint + ": its TLS certificate is for another host name: " + Clip(hostname.Error(), 300)
	case errors.As(err, &invalid), errors.As(err, &verify):
		return fault.Unavailable, endpoint + ": its TLS certificate is invalid: " + Clip(err.Error(), 300)
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return fault.Unavailable, endpoint + ": it does not use TLS; check whether it is an http:// endpoint"
	case errors.As(err, &alert):
		return fault.Unavailable, endpoint + ": the TLS handshake failed: " + Clip(alert.Error(), 200)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fault.Unavailable, endpoint + ": connection refused"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF):
		return fault.Unavailable, endpoint + ": connection closed without an answer" + hint
	case errors.As(err, &netErr) && netErr.Timeout():
		return fault.Unavailable, endpoint + ": it did not respond in time (" + Clip(netErr.Error(), 300) + ")"
	case errors.As(err, &netErr):
		return fault.Unavailable, endpoint + ": the connection failed: " + Clip(netErr.Error(), 300) + hint
	case errors.As(err, &decode), errors.As(err, &response): // a response in an unknown format
		return fault.Unavailable, "the response is incomplete or not from S3; check that the endpoint is an S3 service (" + Clip(err.Error(), 300) + ")"
	}
	if s := (interface{ ConnectionError() bool })(nil); errors.As(err, &s) && s.ConnectionError() {
		return fault.Unavailable, endpoint + ": the connection failed: " + Clip(err.Error(), 300) + hint
	}
	return fault.Unknown, Clip(err.Error(), 500)
}
