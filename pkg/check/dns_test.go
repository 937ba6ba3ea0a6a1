//go:build linux

package check

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
)

// Mounts resolve the name of a proxy instead of the service's, which the proxy resolves.
func TestDNS_NamesThatMountsResolve(t *testing.T) {
	proxy := backend.Proxy{URL: "http://proxy.lab:3128"}
	for want, b := range map[string]backend.Backend{
		"s3.lab":                        {Endpoint: "https://s3.lab:9000"},
		"proxy.lab":                     {Endpoint: "https://s3.lab:9000", Proxy: proxy},
		"127.0.0.1":                     {Endpoint: "http://127.0.0.1:9000", Proxy: proxy},
		"s3.eu-central-1.amazonaws.com": {Region: "eu-central-1"},
	} {
		if got := hostName(b); got != want {
			t.Errorf("%+v: %s, want %s", b, got, want)
		}
	}
	if got := hostName(backend.Backend{Proxy: proxy}); got != "proxy.lab" {
		t.Errorf("AWS through a proxy: %s", got)
	}
}
