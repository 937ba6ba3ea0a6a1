//go:build !lane || ordinary

package node

import (
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// forwardProxy is an HTTP proxy that wants credentials. It alone knows where the hosts are that it is asked for.
type forwardProxy struct {
	*httptest.Server
	hosts map[string]string // host:port → address
	plain http.Handler

	mu    sync.Mutex
	login string   // "user:password"
	asked []string // "METHOD host:port user-agent"
}

func startForwardProxy(t *testing.T, login string, hosts map[string]string) *forwardProxy {
	t.Helper()
	p := &forwardProxy{login: login, hosts: hosts}
	transport := &http.Transport{DisableCompression: true}
	p.plain = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", p.hosts[withPort(r.In.URL.Host)]
			r.Out.Host = strings.TrimSuffix(r.In.Host, ":80") // as usual: clients sign the host without a default port
		},
		FlushInterval: -1, Transport: transport,
	}
	p.Server = httptest.NewServer(p)
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
		transport.CloseIdleConnections()
	})
	return p
}

func withPort(host string) string {
	if strings.Contains(host, ":") {
		return host
	}
	return host + ":80"
}

// ServeHTTP implements http.Handler: requests for http URLs, and CONNECT.
func (p *forwardProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	login := p.login
	p.mu.Unlock()
	if r.Header.Get("Proxy-Authorization") != "Basic "+base64.StdEncoding.EncodeToString([]byte(login)) {
		w.WriteHeader(http.StatusProxyAuthRequired)
		return
	}
	host := withPort(r.URL.Host)
	p.mu.Lock()
	p.asked = append(p.asked, r.Method+" "+host+" "+r.UserAgent())
	p.mu.Unlock()
	switch {
	case p.hosts[host] == "":
		w.WriteHeader(http.StatusBadGateway)
	case r.Method == http.MethodConnect:
		p.tunnel(w, r, p.hosts[host])
	default:
		p.plain.ServeHTTP(w, r)
	}
}

func (p *forwardProxy) tunnel(w http.ResponseWriter, r *http.Request, address string) {
	to, err := new(net.Dialer).DialContext(r.Context(), "tcp", address)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer to.Close()
	from, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer from.Close()
	_, _ = io.WriteString(from, "HTTP/1.1 200 Connection established\r\n\r\n")
	go func() {
		_, _ = io.Copy(to, buffered)
		to.Close()
	}()
	_, _ = io.Copy(from, to)
}

// requests returns what has been asked for since the first n requests.
func (p *forwardProxy) requests(n int) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked[n:])
}

// change makes the proxy want other credentials, also of clients that are connected.
func (p *forwardProxy) change(login string) {
	p.mu.Lock()
	p.login = login
	p.mu.Unlock()
	p.CloseClientConnections()
}

// With a proxy, controller, node and both clients reach the backend and its token service through it and in no other way: only the proxy
// knows where these are, and the server counts no request but the proxy's.
func TestEverythingGoesThroughTheProxyOfABackend(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	const plain, secure, tokens = "s3.proxied.test", "tls.proxied.test", "sts.proxied.test"
	user, err := e.AddUser(t.Context(), "alice", `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	e.Rig.S3.Keys = user
	e.secrets = append(e.secrets, user.SecretAccessKey)
	cert, key, err := s3server.WriteCert(t.TempDir(), secure)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	upstream, err := url.Parse(e.proxy.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	var overTLS atomic.Int64
	front := httptest.NewUnstartedServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			overTLS.Add(1)
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", upstream.Host, r.In.Host
		},
		FlushInterval: -1, Transport: &http.Transport{DisableCompression: true},
	})
	front.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	front.StartTLS()
	t.Cleanup(front.Close)

	const password = "correct-horse$battery"
	p := startForwardProxy(t, "driver:"+password, map[string]string{
		plain + ":80": upstream.Host, tokens + ":80": strings.TrimPrefix(e.STS(), "http://"), secure + ":443": front.Listener.Addr().String(),
	})
	login := filepath.Join(t.TempDir(), "proxy")
	config := filepath.Join(e.Dir, "config.yaml")
	proxy := fmt.Sprintf("    region: %s\n    addressing: path\n    proxy:\n      url: %s\n      credentialsFile: %s\n", e.Rig.S3.Region, p.URL, login)
	text := "backends:\n  default:\n    endpoint: http://" + plain + "\n    sts: {endpoint: http://" + tokens + ", kinds: [federationToken]}\n" + proxy +
		"  secure:\n    endpoint: https://" + secure + "\n    caFile: " + cert + "\n" + proxy
	for path, content := range map[string]string{login: "driver:" + password + "\n", config: text} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e.secrets = append(e.secrets, password)
	e.Driver = e.Drive(t, "all", "--config="+config)

	for backend, host := range map[string]string{"default": plain, "secure": secure} {
		for _, client := range clients {
			name := backend + "-" + client
			before, tunnelled := len(p.requests(0)), overTLS.Load()
			created, err := e.CreateVolume(rigtest.Context(t, time.Minute), rigtest.CreateRequest(name, "backend", backend, "client", client))
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if len(p.requests(before)) == 0 && overTLS.Load() == tunnelled { // a tunnel is used again
				t.Errorf("%s: no request of CreateVolume went through the proxy", name)
			}
			before = len(p.requests(0))
			v := created.GetVolume()
			target := e.publish(v, name)
			file := filepath.Join(target, "file")
			if err := os.WriteFile(file, []byte(name), 0o644); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if content, err := os.ReadFile(file); err != nil || string(content) != name {
				t.Errorf("%s: read %q: %v", name, content, err)
			}
			process := e.client(client)
			if argv, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", process.PID)); err != nil || strings.Contains(string(argv), password) {
				t.Errorf("%s: the password is in the command line: %q: %v", name, argv, err)
			}
			e.noSecretInFiles(e.State)
			e.noSecretInFiles(e.Cache)
			e.unpublish(v, target)

			way, agent := "PUT "+host+":80 ", map[string]string{rclone: "s3-csi-rclone", mountpoint: "mountpoint"}[client]
			if backend == "secure" {
				way, agent = "CONNECT "+host+":443 ", ""
			}
			if asked := p.requests(before); !slices.ContainsFunc(asked, func(r string) bool { return strings.HasPrefix(r, way) && strings.Contains(r, agent) }) {
				t.Errorf("%s: the client's requests did not go through the proxy: %q", name, asked)
			}
		}
	}
	forwarded, sessions := int(overTLS.Load()), 0
	for _, r := range p.requests(0) {
		if !strings.Contains(r, ".proxied.test:") {
			t.Errorf("the proxy was asked for another host: %s", r)
		}
		switch {
		case strings.HasPrefix(r, "POST "+tokens):
			sessions++
		case !strings.HasPrefix(r, "CONNECT "):
			forwarded++
		}
	}
	if sessions < len(clients) {
		t.Errorf("%d sessions were made through the proxy", sessions)
	}
	if arrived := e.proxy.Requests(); arrived != forwarded {
		t.Errorf("the server got %d requests, and the proxy passed on %d", arrived, forwarded)
	}
}

// When the password of a proxy changes, the node reads the new one and replaces running mounts, whose pods then go on.
func TestAProxyWhosePasswordChanges(t *testing.T) {
	rigtest.ProcessOnly(t, "what a helper sends through a proxy does not depend on who started it")
	t.Parallel()
	e := newEnv(t)
	const host = "s3.proxied.test"
	upstream, err := url.Parse(e.proxy.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	p := startForwardProxy(t, "driver:first$password", map[string]string{host + ":80": upstream.Host})
	login, config := filepath.Join(t.TempDir(), "proxy"), filepath.Join(e.Dir, "config.yaml")
	text := fmt.Sprintf("backends:\n  default:\n    endpoint: http://%s\n    region: %s\n    addressing: path\n    proxy: {url: %q, credentialsFile: %q}\n", host,
		e.Rig.S3.Region, p.URL, login)
	for path, content := range map[string]string{login: p.login, config: text} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e.Driver = e.Drive(t, "node", "--config="+config)
	targets := map[string]string{}
	volumes := map[string]*csi.Volume{}
	for _, client := range clients {
		volumes[client] = static("proxy-"+client, client)
		targets[client] = e.publish(volumes[client], "proxy-"+client)
	}
	const second = "driver:second$password"
	e.secrets = append(e.secrets, "first$password", "second$password")
	p.change(second)
	if err := os.WriteFile(login, []byte(second), 0o600); err != nil {
		t.Fatal(err)
	}
	// A target shows the former client until the heal, which comes after the restart.
	e.await(time.Minute, "the mounts to be replaced at both targets", func() bool { return e.count("s3csi_mount_heals_total", "host", "replaced") >= 2 })
	for _, client := range clients {
		if n := e.count("s3csi_mount_restarts_total", client, `"backend"`); n != 1 {
			t.Errorf("%s: %v replaced mounts are counted", client, n)
		}
		if err := os.WriteFile(filepath.Join(targets[client], "after"), []byte(client), 0o644); err != nil {
			t.Errorf("%s: %v", client, err)
		}
		e.noSecretInFiles(e.State)
		e.unpublish(volumes[client], targets[client])
		if content, err := e.Stored(t, rigtest.Bucket, volumes[client].GetVolumeContext()["prefix"])("after"); err != nil || content != client {
			t.Errorf("%s: stored %q: %v", client, content, err)
		}
	}
}
