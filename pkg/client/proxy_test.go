package client

import (
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Every client gets the proxy for its endpoint's scheme, and may connect to nothing else.
func TestAProxyReplacesTheService(t *testing.T) {
	own, err := declared().Client("geese", "clients.geese")
	must(t, err)
	for _, c := range append(All(), own) {
		for endpoint, variable := range map[string]string{"": "https_proxy", "https://s3.example:9000": "https_proxy", "http://s3.example:9000": "http_proxy"} {
			in := invocation()
			in.Endpoint, in.Proxy = endpoint, "http://proxy.example:3128"
			got := c.Command(in)
			proxies := slices.DeleteFunc(slices.Clone(got.Env), func(e string) bool { return !strings.Contains(e, "proxy") })
			if want := []string{variable + "=http://proxy.example:3128", "no_proxy=127.0.0.1,::1,localhost"}; !slices.Equal(proxies, want) {
				t.Errorf("%s at %q: %q, want %q", c.Name, endpoint, proxies, want)
			}
			if !slices.Equal(got.Ports, []uint16{3128}) {
				t.Errorf("%s at %q may connect to %d", c.Name, endpoint, got.Ports)
			}
			in.Proxy = ""
			if without := c.Command(in); strings.Contains(strings.Join(without.Env, " "), "proxy") || slices.Contains(without.Ports, 3128) {
				t.Errorf("%s without a proxy: %q, %d", c.Name, without.Env, without.Ports)
			}
		}
	}
}

func TestAClientDeclaresNoProxy(t *testing.T) {
	d := declared()
	d.Environment = map[string]string{"HTTPS_PROXY": "http://elsewhere"}
	if _, err := d.Client("geese", "clients.geese"); !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(),
		"clients.geese.environment.HTTPS_PROXY: cannot be declared; set proxy of the backend") {
		t.Error(err)
	}
}
