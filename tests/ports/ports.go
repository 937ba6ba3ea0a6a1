// Package ports finds TCP ports for servers that bind them a moment later, or once more.
package ports

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// The range lies below what Linux gives to connections and listeners that wish for none (ip(7), ip_local_port_range: 32768 and
// above), so that nobody gets such a port by chance.
const (
	first = 10000
	last  = 32000
	tries = 100
)

// Free is an address of 127.0.0.1 that nobody listens on. It stays free until somebody asks for this very port.
func Free() (string, error) {
	var err error
	for range tries {
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(first+rand.IntN(last-first))) //nolint:gosec // no secret
		var l net.Listener
		if l, err = new(net.ListenConfig).Listen(context.Background(), "tcp", addr); err == nil {
			return addr, l.Close()
		}
	}
	return "", fmt.Errorf("no port of 127.0.0.1 is free: %w", err)
}
