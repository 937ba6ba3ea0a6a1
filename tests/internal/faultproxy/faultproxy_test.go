package faultproxy_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const size = 1 << 20

func setup(t *testing.T) (*faultproxy.Proxy, func() (int, []byte, error)) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.Host, "127.0.0.1:") || strings.Contains(r.Host, r.Context().Value(http.LocalAddrContextKey).(interface{ String() string }).String()) {
			t.Errorf("the server sees the host %s, not the client's", r.Host)
		}
		_, _ = w.Write(bytes.Repeat([]byte("x"), size))
	}))
	p, err := faultproxy.Start(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
		transport.CloseIdleConnections()
		server.CloseClientConnections()
		server.Close()
	})
	get := func() (int, []byte, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.Endpoint()+"/bucket/key", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: transport}).Do(req)
		if err != nil {
			return 0, nil, err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return resp.StatusCode, body, err
	}
	return p, get
}

func TestFaultsComeAndGo(t *testing.T) {
	p, get := setup(t)
	fine := func() {
		t.Helper()
		if code, body, err := get(); code != 200 || len(body) != size || err != nil {
			t.Fatalf("without a fault: %d, %d bytes, %v", code, len(body), err)
		}
	}
	fine()
	cases := map[string]struct {
		faults faultproxy.Faults
		want   func(code int, body []byte, err error, took time.Duration) bool
	}{
		"latency": {faultproxy.Faults{Latency: 200 * time.Millisecond}, func(code int, _ []byte, _ error, took time.Duration) bool {
			return code == 200 && took >= 200*time.Millisecond
		}},
		"bandwidth": {faultproxy.Faults{Bandwidth: 2 * size}, func(code int, body []byte, _ error, took time.Duration) bool {
			return code == 200 && len(body) == size && took >= 450*time.Millisecond
		}},
		"refuse": {faultproxy.Faults{Refuse: true}, func(_ int, _ []byte, err error, took time.Duration) bool {
			return err != nil && took < 2500*time.Millisecond
		}},
		"blackhole": {faultproxy.Faults{Blackhole: true}, func(_ int, _ []byte, err error, _ time.Duration) bool {
			return errors.Is(err, context.DeadlineExceeded)
		}},
		"reset": {faultproxy.Faults{Reset: true}, func(_ int, _ []byte, err error, _ time.Duration) bool { return errors.Is(err, syscall.ECONNRESET) }},
		"drop": {faultproxy.Faults{DropAfter: size / 2}, func(_ int, body []byte, err error, _ time.Duration) bool {
			return err != nil && len(body) > size/4 && len(body) < size/2
		}},
		"slow down": {faultproxy.Faults{SlowDown: 1}, func(code int, body []byte, _ error, _ time.Duration) bool {
			return code == 503 && strings.Contains(string(body), "<Code>SlowDown</Code>")
		}},
		"quirk": {faultproxy.Faults{Quirk: noContent}, func(code int, body []byte, _ error, _ time.Duration) bool {
			return code == http.StatusNoContent && len(body) == 0
		}},
		"quirk of other requests": {faultproxy.Faults{Quirk: noContent, Match: isPut}, func(code int, body []byte, err error, _ time.Duration) bool {
			return code == 200 && len(body) == size && err == nil
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p.Set(c.faults)
			start := time.Now()
			code, body, err := get()
			if !c.want(code, body, err, time.Since(start)) {
				t.Errorf("%d, %d bytes, %v, after %v", code, len(body), err, time.Since(start))
			}
			p.Set(faultproxy.Faults{})
			fine()
		})
	}
	p.Set(faultproxy.Faults{SlowDown: 2, Match: isPut})
	fine()
	before := p.Requests()
	fine()
	if n := p.Requests() - before; n != 1 {
		t.Errorf("counted %d requests, want 1", n)
	}
}

func noContent(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
	w.WriteHeader(http.StatusNoContent)
}

func isPut(r *http.Request) bool { return r.Method == http.MethodPut }

func TestAFaultReachesARequestUnderWay(t *testing.T) {
	p, get := setup(t)
	p.Set(faultproxy.Faults{Blackhole: true})
	done := make(chan error, 1)
	go func() {
		_, _, err := get()
		done <- err
	}()
	time.Sleep(100 * time.Millisecond)
	p.Set(faultproxy.Faults{})
	if err := <-done; err != nil {
		t.Errorf("after the black hole: %v", err)
	}
}
