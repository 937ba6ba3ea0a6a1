package faultproxy

import (
	"net"
	"time"
)

// listener makes connections of a proxy.
type listener struct {
	net.Listener
	p *Proxy
}

// Accept drops connections while the proxy refuses them.
func (l listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, p: l.p, closed: make(chan struct{})}
		l.p.mu.Lock()
		refuse := l.p.faults.Refuse
		if !refuse {
			l.p.conns[c] = struct{}{}
		}
		l.p.mu.Unlock()
		if refuse {
			raw.Close()
			continue
		}
		return c, nil
	}
}

// conn is a client's connection, with the faults that are those of the wire.
type conn struct {
	net.Conn
	p       *Proxy
	closed  chan struct{}
	written int64
}

// burst is what is let through at once when the bandwidth is bounded.
const burst = 16 << 10

// Read reads what the client sends.
func (c *conn) Read(b []byte) (int, error) {
	f, _ := c.p.get()
	if f.Bandwidth > 0 && len(b) > burst {
		b = b[:burst]
	}
	n, err := c.Conn.Read(b)
	if waitErr := c.wait(n); waitErr != nil {
		return 0, waitErr
	}
	return n, err
}

// Write writes to the client.
func (c *conn) Write(b []byte) (int, error) {
	total := 0
	for len(b) > 0 {
		f, _ := c.p.get()
		part := b
		if f.Bandwidth > 0 && len(part) > burst {
			part = part[:burst]
		}
		drop := false
		if f.DropAfter > 0 && c.written+int64(len(part)) >= f.DropAfter {
			part, drop = part[:max(0, f.DropAfter-c.written)], true
		}
		if err := c.wait(len(part)); err != nil {
			return total, err
		}
		n, err := c.Conn.Write(part)
		total += n
		c.written += int64(n)
		if err != nil {
			return total, err
		}
		if drop {
			c.Close()
			return total, net.ErrClosed
		}
		b = b[n:]
	}
	return total, nil
}

// wait takes the time that n bytes need, and for as long as the proxy is a black hole.
func (c *conn) wait(n int) error {
	for {
		f, changed := c.p.get()
		var passed <-chan time.Time
		if !f.Blackhole {
			if f.Bandwidth <= 0 || n <= 0 {
				return nil
			}
			passed = time.After(time.Duration(n) * time.Second / time.Duration(f.Bandwidth))
		}
		select {
		case <-passed:
			return nil
		case <-changed: // look again; a wait that was nearly over starts again, at another speed
		case <-c.closed:
			return net.ErrClosed
		}
	}
}

// Close ends the connection and whatever waits on it.
func (c *conn) Close() error {
	c.p.mu.Lock()
	_, open := c.p.conns[c]
	delete(c.p.conns, c)
	c.p.mu.Unlock()
	if open {
		close(c.closed)
	}
	return c.Conn.Close()
}
