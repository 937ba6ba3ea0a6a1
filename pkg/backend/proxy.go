package backend

import (
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Proxy is the HTTP proxy through which the driver, its helpers and clients reach a backend and its token service. It is not used for
// loopback addresses, nor for EKS Pod Identity's agent.
type Proxy struct {
	// URL has the scheme, the host and the port, and no credentials; "": there is no proxy. The driver then uses that of its environment,
	// and clients use none.
	URL string `json:"url"`
	// CredentialsFile is the absolute path of a file with "user:password"; "": the proxy needs none.
	CredentialsFile string `json:"credentialsFile"`

	credentials string // the content of CredentialsFile once it was read
	sum         string // a hash of it that cannot be reversed in practice
}

const (
	maxCredentialsFileSize = 4 << 10 // bytes
	// proxyIterations makes guessing a password from the digest of a mount's settings expensive. One hash takes milliseconds.
	proxyIterations = 20000
)

// proxyCredentials are those that all clients send alike: not all decode percent-encoded characters.
var proxyCredentials = regexp.MustCompile(`^[A-Za-z0-9._~!$&'()*+,;=-]{1,128}:[A-Za-z0-9._~!$&'()*+,;=-]{1,256}$`)

// proxy checks the key proxy.
func (f fileBackend) proxy(b *Backend, place func(key string) string) (err error) {
	if f.Proxy == nil {
		return nil
	}
	b.Proxy = *f.Proxy
	if b.Proxy.URL == "" {
		return fault.Field(place("proxy.url"), "is missing; set the URL of the proxy, or remove proxy")
	}
	if b.Proxy.URL, err = checkURL(place("proxy.url"), b.Proxy.URL, "put user:password into the file of proxy.credentialsFile"); err != nil {
		return err
	}
	if strings.HasPrefix(b.Proxy.URL, "https://") {
		return fault.Field(place("proxy.url"), "must start with http://: not all clients can reach a proxy over TLS; what they send to an endpoint with "+
			"https:// is encrypted nevertheless")
	}
	return checkPath(place("proxy.credentialsFile"), b.Proxy.CredentialsFile)
}

// read reads CredentialsFile, if there is one. Errors do not show its content.
func (p Proxy) read() (Proxy, error) {
	if p.CredentialsFile == "" {
		return p, nil
	}
	content, err := readBounded(p.CredentialsFile, maxCredentialsFileSize)
	if err != nil {
		return p, err
	}
	p.credentials = strings.TrimRight(string(content), "\r\n")
	if !proxyCredentials.MatchString(p.credentials) {
		return p, fault.Errorf(fault.Invalid, "%s must have one line, user:password, of letters, digits and -._~!$&'()*+,;=", p.CredentialsFile)
	}
	key, err := pbkdf2.Key(sha256.New, p.credentials, []byte("s3-csi-driver proxy "+p.URL), proxyIterations, sha256.Size)
	if err != nil {
		return p, err
	}
	p.sum = hex.EncodeToString(key)
	return p, nil
}

// ProxyCredentials returns "user:password" for the proxy as of when the config was read, or "".
func (b Backend) ProxyCredentials() string { return b.Proxy.credentials }

// ProxyFor returns the URL of the proxy, without credentials, for requests to a URL ("" is AWS); "": there is none.
func (b Backend) ProxyFor(rawURL string) string {
	if u, err := url.Parse(rawURL); err == nil && loopback(u.Hostname()) {
		return ""
	}
	return b.Proxy.URL
}

// proxyFunc returns the proxy for each request, with its credentials: the backend's, or without one that of fallback.
func (b Backend) proxyFunc(fallback func(*http.Request) (*url.URL, error)) (func(*http.Request) (*url.URL, error), error) {
	if b.Proxy.URL == "" {
		return fallback, nil
	}
	u, err := url.Parse(b.Proxy.URL)
	if err != nil {
		return nil, fault.Errorf(fault.Invalid, "%s: proxy.url is not a URL", b)
	}
	if user, password, ok := strings.Cut(b.Proxy.credentials, ":"); ok {
		u.User = url.UserPassword(user, password)
	}
	return func(r *http.Request) (*url.URL, error) {
		if loopback(r.URL.Hostname()) {
			return nil, nil //nolint:nilnil // net/http's "no proxy"
		}
		return u, nil
	}, nil
}

// loopback reports whether a host is this machine.
func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.Unmap().IsLoopback()
}
