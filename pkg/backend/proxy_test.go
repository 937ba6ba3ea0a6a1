package backend

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func proxied(t *testing.T, proxy, login string) (config, file string) {
	t.Helper()
	dir := t.TempDir()
	config, file = filepath.Join(dir, "config.yaml"), filepath.Join(dir, "login")
	text := "backends:\n  lab:\n    endpoint: http://s3.lab.test\n    sts: {endpoint: http://sts.lab.test}\n    proxy: {url: " + proxy + ", credentialsFile: " +
		file + "}\n" +
		"  local:\n    endpoint: http://127.0.0.1:9\n    proxy: {url: " + proxy + "}\n"
	for path, content := range map[string]string{config: text, file: login} {
		check(t, os.WriteFile(path, []byte(content), 0o600))
	}
	return config, file
}

func TestRequestsGoThroughTheProxyOfTheirBackend(t *testing.T) {
	var asked atomic.Int64
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth()
		if strings.HasSuffix(r.URL.Host, ".lab.test") && user == "driver" && password == "canary" {
			asked.Add(1)
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(proxy.Close)
	path, _ := proxied(t, proxy.URL, "driver:canary\n")
	c, err := LoadConfig(path, "", "")
	check(t, err)
	clients, err := NewClients(c, withoutWaiting())
	check(t, err)
	t.Cleanup(clients.Close)
	lab, err := c.Backend("lab")
	check(t, err)
	if err := clients.Reach(t.Context(), lab); asked.Load() == 0 {
		t.Errorf("the proxy was not asked for the service: %v", err)
	}
	service, err := clients.STSService(t.Context(), lab)
	if err != nil || service.Proxy != strings.Replace(proxy.URL, "://", "://driver:canary@", 1) {
		t.Errorf("helpers reach the token service through %q: %v", service.Proxy, err)
	}
	if secrets := (credentials.Order{STS: service}).Secrets(); len(secrets) != 1 || secrets[0] != "canary" {
		t.Errorf("the order's secrets are %q", secrets)
	}
	if got := lab.ProxyFor(lab.Endpoint); got != proxy.URL {
		t.Errorf("clients use %q", got)
	}
	local, err := c.Backend("local")
	check(t, err)
	if got := local.ProxyFor(local.Endpoint); got != "" {
		t.Errorf("clients of a loopback endpoint use %q", got)
	}
	before := asked.Load()
	if err := clients.Reach(t.Context(), local); !fault.Is(err, fault.Unavailable) || asked.Load() != before {
		t.Errorf("a loopback endpoint was asked through the proxy: %v", err)
	}
}

// A mount whose proxy, or whose login there, has changed is replaced; the digest does not show the password.
func TestAProxyIsPartOfHowAMountReachesItsService(t *testing.T) {
	digests := map[string]string{}
	for _, tt := range []struct{ proxy, login string }{
		{"http://a.test:3128", "driver:canary"}, {"http://b.test:3128", "driver:canary"}, {"http://a.test:3128", "driver:other"},
	} {
		path, _ := proxied(t, tt.proxy, tt.login)
		c, err := LoadConfig(path, "", "")
		check(t, err)
		b, err := c.Backend("lab")
		check(t, err)
		digest := b.MountDigest()
		if other := digests[digest]; other != "" {
			t.Errorf("%v has the digest of %s", tt, other)
		}
		digests[digest] = tt.proxy + " " + tt.login
	}
	if len(digests) != 3 {
		t.Errorf("%d digests", len(digests))
	}
}

func TestProxiesThatAreRefused(t *testing.T) {
	for text, words := range map[string]string{
		"proxy: {}": "proxy.url: is missing", "proxy: http://p": "proxy: must be a map", "proxy: {url: socks5://p:1}": "proxy.url: must start with",
		"proxy: {url: 'https://p:1'}": "proxy.url: must start with http://",
		"proxy: {url: 'http://driver:canary@p:1'}": "proxy.url: must not contain a user or password; put user:password into the file of " +
			"proxy.credentialsFile",
		"proxy: {url: 'http://p:1/path'}":                       "proxy.url: must be scheme, host and port only",
		"proxy: {url: 'http://p:1', credentialsFile: relative}": "proxy.credentialsFile: must be an absolute path",
	} {
		_, err := ParseConfig([]byte("backends:\n  lab:\n    "+text+"\n"), "", "")
		if !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "backends.lab."+words) || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, login := range []string{"", "canary", "driver:can@ary", "driver:can%20ary", "driver:canary\nsecond:line"} {
		path, file := proxied(t, "http://p:1", login)
		_, err := LoadConfig(path, "", "")
		if !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "backends.lab.proxy.credentialsFile: "+file) || strings.Contains(err.Error(), "can") &&
			strings.Contains(err.Error(), "ary") {
			t.Errorf("%q: %v", login, err)
		}
	}
}

func TestTheDefaultClientOfABackendIsKnown(t *testing.T) {
	declared := "clients:\n  own: {program: own, fuse: path, args: ['${mountpoint}'], drain: exits, cache: none}\n"
	for _, name := range []string{"rclone", "own"} {
		c, err := ParseConfig([]byte("backends:\n  lab: {defaultClient: "+name+"}\n"+declared), "", "")
		check(t, err)
		if b, err := c.Backend("lab"); err != nil || b.DefaultClient != name {
			t.Errorf("%q: %v", b.DefaultClient, err)
		}
	}
	_, err := ParseConfig([]byte("backends:\n  lab: {defaultClient: rclon}\n"+declared), "", "")
	if !fault.Is(err, fault.Invalid) ||
		!strings.Contains(err.Error(), `backends.lab.defaultClient: there is no client "rclon"; this driver knows mountpoint-s3, rclone, own`) {
		t.Error(err)
	}
}
