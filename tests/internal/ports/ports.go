// Package ports finds TCP ports for servers that bind them a moment later, or again.
package ports

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"

	"golang.org/x/sys/unix"
)

// The range lies below what Linux gives to connections and listeners that wish for none (ip(7), ip_local_port_range: 32768 and
// above), so that the kernel never assigns such a port.
const (
	first = 10000
	last  = 32000
	tries = 100
)

// Free returns an address of 127.0.0.1 whose port is unused. While this process runs, no other call in the same network namespace
// returns it again.
func Free() (string, error) {
	var err error
	for range tries {
		port := strconv.Itoa(first + rand.IntN(last-first)) //nolint:gosec // no secret
		if err = reserve(port); err != nil {
			continue
		}
		addr := net.JoinHostPort("127.0.0.1", port)
		var l net.Listener
		if l, err = new(net.ListenConfig).Listen(context.Background(), "tcp", addr); err == nil {
			return addr, l.Close()
		}
	}
	return "", fmt.Errorf("no port of 127.0.0.1 is free: %w", err)
}

// reserve binds an abstract Unix socket with the port's number in its name (unix(7)). Each network namespace has its own abstract
// names, and the kernel releases them when the process exits.
func reserve(port string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "@s3-csi-test-port-" + port}); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	return nil
}
