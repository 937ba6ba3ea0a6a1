package driver

import (
	"context"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// TestServer_IdleAndSlowConnectionsAreBounded opens many connections to both TCP endpoints while a request runs. The request goes on,
// others are answered, and few descriptors are used.
func TestServer_IdleAndSlowConnectionsAreBounded(t *testing.T) {
	free := func() string {
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer lis.Close()
		return lis.Addr().String()
	}
	web, csiAddress := free(), free()
	r := start(t, func(cfg *Config, m *fakeMounter) {
		cfg.Endpoint, cfg.HTTPEndpoint = "tcp://"+csiAddress, web
		m.block, m.entered = make(chan struct{}), make(chan struct{}, 1)
	})
	defer r.conn.Close()
	published := make(chan error, 1)
	go func() {
		_, err := csi.NewNodeClient(r.conn).NodePublishVolume(context.Background(), publishRequest())
		published <- err
	}()
	<-r.mounter.entered
	probe := func() {
		t.Helper()
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" + web + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%s, %v", resp.Status, err)
		}
		if _, err := csi.NewIdentityClient(dial(t, "tcp://"+csiAddress)).Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Error(err)
		}
	}
	before, flood := descriptors(t), 0
	for range 4 * maxConnections {
		for address, text := range map[string]string{web: "GET /healthz HTTP/1.1\r\nHost: " + strings.Repeat("x", 3000), csiAddress: ""} {
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, _ = conn.Write([]byte(text)) // the server may have closed it
			flood++
		}
	}
	probe()
	if used := descriptors(t) - before - flood; used > 2*maxConnections+10 {
		t.Errorf("the server has %d descriptors more", used)
	}
	close(r.mounter.block)
	if err := <-published; err != nil {
		t.Error(err)
	}
	if resp, err := http.DefaultClient.Do(mustRequest(t, "http://"+web+"/healthz", strings.Repeat("x", 3*maxHeader))); err != nil {
		t.Error(err)
	} else if _ = resp.Body.Close(); resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Error(resp.Status)
	}
}

func mustRequest(t *testing.T, url, header string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Test", header)
	return req
}

func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}
