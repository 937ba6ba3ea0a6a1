package main

import (
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// proxy forwards TCP connections to an S3 server, with a rate limit or not at all.
type proxy struct {
	url    string
	target string
	rate   atomic.Int64 // bytes per second towards the server; 0 is unlimited
	down   atomic.Bool

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

func startProxy(t *testing.T, endpoint string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	p := &proxy{url: "http://" + l.Addr().String(), target: strings.TrimPrefix(endpoint, "http://"), conns: map[net.Conn]struct{}{}}
	t.Cleanup(func() {
		l.Close()
		p.closeAll()
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(c)
		}
	}()
	return p
}

// setDown closes all connections and rejects new ones, or accepts new ones again.
func (p *proxy) setDown(down bool) {
	p.down.Store(down)
	if down {
		p.closeAll()
	}
}

func (p *proxy) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) track(c net.Conn) func() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = struct{}{}
	return func() {
		c.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, c)
	}
}

func (p *proxy) serve(c net.Conn) {
	defer p.track(c)()
	if p.down.Load() {
		return
	}
	s, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer p.track(s)()
	go func() {
		_, _ = io.Copy(c, s)
		c.Close()
	}()
	buf := make([]byte, 16<<10)
	for {
		n, err := c.Read(buf)
		if rate := p.rate.Load(); rate > 0 && n > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
		if n > 0 {
			if _, err := s.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
