package main

import (
	"encoding/pem"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"testing"
)

func TestTrustsTheGivenAuthoritiesAndNoOthers(t *testing.T) {
	s := startS3(t)
	target, err := url.Parse(s.endpoint)
	check(t, err)
	front := httptest.NewTLSServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, r.In.Host
	}})
	t.Cleanup(front.Close)
	ca := filepath.Join(built.dir, "ca.pem")
	check(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw}), 0o644))

	trusting := startMount(t, mountOptions{s3: s, url: front.URL, prefix: "vol/", args: []string{"--ca-file=" + ca}})
	check(t, os.WriteFile(trusting.path("x"), []byte("x"), 0o644))
	trusting.finish()
	s.want("vol/x", []byte("x"))

	doubting := startMount(t, mountOptions{s3: s, url: front.URL, prefix: "vol/"})
	if names, err := os.ReadDir(doubting.dir); err == nil {
		t.Errorf("a server that nobody vouches for is read: %v", names)
	}
	doubting.finish()
}
