package registry_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/registry"
)

// A registry with a user refuses requests without its login, and shows its certificate.
func TestAPrivateRegistry(t *testing.T) {
	other := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer other.Close()
	certificate := other.TLS.Certificates[0]
	r, err := registry.Start(t.Context(), registry.Options{Addr: "127.0.0.1:0", Dir: t.TempDir(), Certificate: &certificate, User: "alice", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(other.Certificate())
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	defer transport.CloseIdleConnections()
	for password, want := range map[string]int{"": http.StatusUnauthorized, "wrong": http.StatusUnauthorized, "secret": http.StatusOK} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+r.Host()+"/v2/", nil)
		if err != nil {
			t.Fatal(err)
		}
		if password != "" {
			req.SetBasicAuth("alice", password)
		}
		resp, err := (&http.Client{Transport: transport}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("with the password %q: %s", password, resp.Status)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
