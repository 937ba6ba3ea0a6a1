package main

import (
	"encoding/pem"
	"log"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestTrustsTheGivenAuthoritiesAndNoOthers(t *testing.T) {
	t.Parallel()
	s := startS3(t)
	target, err := url.Parse(s.endpoint)
	check(t, err)
	front := httptest.NewUnstartedServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, r.In.Host
	}})
	handshakes := &errorLog{failed: make(chan string, 1)}
	front.Config.ErrorLog = log.New(handshakes, "", 0)
	front.StartTLS()
	t.Cleanup(front.Close)
	ca := filepath.Join(built.dir, "ca.pem")
	check(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw}), 0o644))

	trusting := startMount(t, mountOptions{s3: s, url: front.URL, prefix: "vol/", args: []string{"--ca-file=" + ca}})
	check(t, os.WriteFile(trusting.path("x"), []byte("x"), 0o644))
	trusting.finish()
	s.want("vol/x", []byte("x"))

	doubting := startMount(t, mountOptions{s3: s, url: front.URL, prefix: "vol/"})
	read := make(chan error)
	go func() {
		_, err := os.ReadDir(doubting.dir)
		read <- err
	}()
	if reason := <-handshakes.failed; !strings.Contains(reason, "bad certificate") {
		t.Errorf("the handshake failed with %q, want a bad certificate", reason)
	}
	doubting.kill() // or it would try again for some time
	if err := <-read; err == nil {
		t.Error("a server with an unknown certificate is read")
	}
}

// errorLog passes on the first line that a server logs.
type errorLog struct {
	once   sync.Once
	failed chan string
}

func (l *errorLog) Write(p []byte) (int, error) {
	l.once.Do(func() { l.failed <- string(p) })
	return len(p), nil
}
