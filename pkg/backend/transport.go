package backend

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
)

// Bounds of one request. The caller's context is the deadline; these detect an endpoint that does not answer early enough for a
// second attempt. Listings and deletions of a thousand keys may take long.
const (
	dialTimeout     = 4 * time.Second
	tlsTimeout      = 4 * time.Second
	responseTimeout = 30 * time.Second
	maxAttempts     = 3
	maxBackoff      = 2 * time.Second

	maxCAFileSize = 512 << 10 // bytes; twice a system bundle. Orders for helpers contain it in one message.
)

func newHTTPClient(roots *x509.CertPool) *http.Client {
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           dialer.DialContext,
			TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout:   tlsTimeout,
			ResponseHeaderTimeout: responseTimeout,
			ExpectContinueTimeout: time.Second,
			IdleConnTimeout:       90 * time.Second,
			MaxIdleConns:          64,
			MaxIdleConnsPerHost:   32,
			ForceAttemptHTTP2:     true,
		},
		// S3 redirects to a bucket's region. Following would send a signature to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// withCA reads the backend's CA file, if it has one.
func (b Backend) withCA() (Backend, error) {
	if b.CAFile == "" {
		return b, nil
	}
	pem, err := readBounded(b.CAFile, maxCAFileSize)
	if err != nil {
		return b, err
	}
	if b.roots, err = x509.SystemCertPool(); err != nil {
		b.roots = x509.NewCertPool() // a minimal image has none
	}
	if !b.roots.AppendCertsFromPEM(pem) {
		return b, fmt.Errorf("%s has no PEM certificate", b.CAFile)
	}
	sum := sha256.Sum256(pem)
	b.ca, b.caSum = string(pem), hex.EncodeToString(sum[:])
	return b, nil
}

// WrongServer reports whether a request failed permanently because of the server: an untrusted certificate, or no TLS.
func WrongServer(err error) bool {
	if c := (*tls.CertificateVerificationError)(nil); errors.As(err, &c) || errors.Is(err, http.ErrSchemeMismatch) {
		return true
	}
	r := tls.RecordHeaderError{}
	return errors.As(err, &r)
}

// wrongServer keeps such errors from being retried.
func wrongServer(err error) aws.Ternary {
	if WrongServer(err) {
		return aws.FalseTernary
	}
	return aws.UnknownTernary
}
