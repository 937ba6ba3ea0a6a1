// Package faultproxy stands between a client and a server and misbehaves on demand: slow, gone, silent, cutting
// connections, or answering for an S3 server that wants less. It is controlled by the test, in its process.
package faultproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"time"
)

// Faults is what a proxy does wrong. The zero value is nothing.
type Faults struct {
	// Latency is added before each request is passed on.
	Latency time.Duration
	// Bandwidth bounds what each connection carries in each direction, in bytes per second. 0 is unlimited.
	Bandwidth int64
	// Refuse closes new connections and those that exist.
	Refuse bool
	// Blackhole takes connections and whatever is sent on them and never answers, on those that exist too.
	Blackhole bool
	// Reset answers each request with a TCP reset.
	Reset bool
	// DropAfter cuts a connection after so many bytes of answers. 0 is never.
	DropAfter int64
	// SlowDown answers so many requests with 503 SlowDown, as S3 throttles.
	SlowDown int
	// Deny answers with 403 AccessDenied.
	Deny bool
	// Match says which requests SlowDown, Deny, Reset and Quirk are for; nil is all.
	Match func(*http.Request) bool
	// Quirk answers requests in the way of another service; nil passes them on.
	Quirk Quirk
}

// Quirk answers one request. It may change the request and pass it on to forward, change forward's answer, or answer by itself.
type Quirk func(w http.ResponseWriter, r *http.Request, forward http.Handler)

// Proxy is an HTTP reverse proxy with faults. Requests keep their Host header, so that signatures hold.
type Proxy struct {
	listener net.Listener
	server   *http.Server
	upstream *http.Transport
	done     chan error

	mu       sync.Mutex
	faults   Faults
	requests int
	conns    map[*conn]struct{}
	changed  chan struct{} // closed when the faults change
}

// Start starts a proxy for the server at target ("http://host:port") on a free port of 127.0.0.1. It runs until Stop.
func Start(target string) (*Proxy, error) { return StartAt("127.0.0.1:0", target) }

// StartAt is Start on an address of the machine's.
func StartAt(addr, target string) (*Proxy, error) {
	u, err := url.Parse(target)
	if err != nil || u.Scheme != "http" || u.Host == "" {
		return nil, fmt.Errorf("faultproxy: target %q must be http://host:port", target)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("faultproxy: %w", err)
	}
	p := &Proxy{
		listener: l, done: make(chan error, 1), conns: map[*conn]struct{}{}, changed: make(chan struct{}),
		upstream: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64, IdleConnTimeout: 10 * time.Second},
	}
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", u.Host, r.In.Host
		},
		FlushInterval: -1,
		Transport:     p.upstream,
		// The client sees the connection end, as from a server that crashed.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	p.server = &http.Server{
		Handler:     p.handler(forward),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	go func() { p.done <- p.server.Serve(listener{l, p}) }()
	return p, nil
}

// Endpoint is the proxy's URL, to be used instead of the server's.
func (p *Proxy) Endpoint() string { return "http://" + p.listener.Addr().String() }

// Set replaces the faults, for what goes on as well as for what comes.
func (p *Proxy) Set(f Faults) {
	p.mu.Lock()
	p.faults = f
	close(p.changed)
	p.changed = make(chan struct{})
	var cut []*conn
	if f.Refuse {
		for c := range p.conns {
			cut = append(cut, c)
		}
	}
	p.mu.Unlock()
	for _, c := range cut {
		c.Close()
	}
}

// Requests counts the requests that came so far, answered or not.
func (p *Proxy) Requests() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.requests
}

// Stop ends the proxy and every connection through it.
func (p *Proxy) Stop() error {
	p.Set(Faults{Refuse: true})
	err := p.server.Close()
	p.upstream.CloseIdleConnections() // a server that stops waits for them
	if served := <-p.done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func (p *Proxy) get() (Faults, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.faults, p.changed
}

// take counts a request and says whether it is one of those to throttle.
func (p *Proxy) take(r *http.Request) (f Faults, throttle bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests++
	f = p.faults
	matches := f.Match == nil || f.Match(r)
	f.Reset, f.Deny = f.Reset && matches, f.Deny && matches
	if !matches {
		f.Quirk = nil
	}
	if f.SlowDown > 0 && matches {
		p.faults.SlowDown--
		return f, true
	}
	return f, false
}

type connKey struct{}

func (p *Proxy) handler(forward http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f, throttle := p.take(r)
		if f.Latency > 0 {
			select {
			case <-time.After(f.Latency):
			case <-r.Context().Done():
				return
			}
		}
		switch {
		case f.Reset:
			c, ok := r.Context().Value(connKey{}).(*conn)
			if ok {
				if tcp, ok := c.Conn.(*net.TCPConn); ok {
					_ = tcp.SetLinger(0) // close becomes a reset
				}
			}
			panic(http.ErrAbortHandler)
		case throttle:
			Refuse(w, r, http.StatusServiceUnavailable, "SlowDown", "Please reduce your request rate.")
		case f.Deny:
			Refuse(w, r, http.StatusForbidden, "AccessDenied", "Access Denied.")
		case f.Quirk != nil:
			f.Quirk(w, r, forward)
		default:
			forward.ServeHTTP(w, r)
		}
	})
}

// Refuse reads the request to its end and answers as S3 does with an error.
func Refuse(w http.ResponseWriter, r *http.Request, status int, code, message string) {
	_, _ = io.Copy(io.Discard, r.Body)
	body := `<?xml version="1.0" encoding="UTF-8"?>` + "\n" +
		"<Error><Code>" + code + "</Code><Message>" + message + "</Message><RequestId>faultproxy</RequestId></Error>"
	w.Header().Set("Content-Type", "application/xml")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}
