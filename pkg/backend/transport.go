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

// Bounds of one request. The caller's context is the real deadline; these tell a dead endpoint from a slow one early
// enough for a second attempt. Listings and deletions of a thousand keys may take long to answer.
const (
	dialTimeout     = 4 * time.Second
	tlsTimeout      = 4 * time.Second
	responseTimeout = 30 * time.Second
	maxAttempts     = 3
	maxBackoff      = 2 * time.Second

	maxCAFileSize = 512 << 10 // bytes; a whole system bundle is half of that. What sessions are made from brings it to helpers in one message.
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
		// S3 answers with redirects to say where a bucket is. A followed one would carry a signature for another host.
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
		return b, fmt.Errorf("%s holds no PEM certificate", b.CAFile)
	}
	sum := sha256.Sum256(pem)
	b.ca, b.caSum = string(pem), hex.EncodeToString(sum[:])
	return b, nil
}

// WrongServer tells whether a request failed in a way that no second attempt can change: a certificate that is not trusted, a
// server without TLS.
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
