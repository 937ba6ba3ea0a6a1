package driver

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
)

// maxConnections is how many connections a TCP listener has open at once.
const maxConnections = 256

// boundedListener closes its oldest connection without a running request when there are too many. So processes that only connect, or
// send slowly, use few descriptors and keep no other client out.
type boundedListener struct {
	net.Listener
	mu   sync.Mutex
	open []*boundedConn // the longest without a request first
}

type boundedConn struct {
	net.Conn
	lis      *boundedListener
	requests int
}

// Accept implements net.Listener.
func (l *boundedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &boundedConn{Conn: conn, lis: l}
	l.mu.Lock()
	var oldest *boundedConn
	if len(l.open) >= maxConnections {
		// If all have requests, the oldest of them.
		i := max(0, slices.IndexFunc(l.open, func(c *boundedConn) bool { return c.requests == 0 }))
		oldest = l.open[i]
		l.open = slices.Delete(l.open, i, i+1)
	}
	l.open = append(l.open, c)
	l.mu.Unlock()
	if oldest != nil {
		_ = oldest.Conn.Close()
	}
	return c, nil
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	c.lis.mu.Lock()
	c.lis.open = slices.DeleteFunc(c.lis.open, func(o *boundedConn) bool { return o == c })
	c.lis.mu.Unlock()
	return c.Conn.Close()
}

// request notes that a request from an address runs, until the returned function is called.
func (l *boundedListener) request(from string) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.open, func(c *boundedConn) bool { return c.RemoteAddr().String() == from })
	if i < 0 {
		return func() {}
	}
	c := l.open[i]
	c.requests++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		c.requests--
		if i := slices.Index(l.open, c); i >= 0 { // its answer is still to be sent
			l.open = append(slices.Delete(l.open, i, i+1), c)
		}
	}
}

// handler notes the requests of an HTTP handler.
func (l *boundedListener) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer l.request(r.RemoteAddr)()
		h.ServeHTTP(w, r)
	})
}

// intercept notes the requests of a gRPC server.
func (l *boundedListener) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if p, ok := peer.FromContext(ctx); ok {
		defer l.request(p.Addr.String())()
	}
	return handler(ctx, req)
}
