// Package sockets makes and dials the sockets of helpers, which are on the host.
package sockets

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Peers returns a function that returns the helper of a mount.
func Peers(ns *host.Namespace, paths state.Paths) func(name string) *helper.Peer {
	return func(name string) *helper.Peer { return Peer(ns, paths.Socket(name)) }
}

// Peer returns the helper that listens at a path of the host.
func Peer(ns *host.Namespace, path string) *helper.Peer {
	return helper.NewPeer(func(ctx context.Context) (*net.UnixConn, error) {
		return host.Call(ctx, ns, "connecting to a helper", func(c *net.UnixConn) { c.Close() }, func() (*net.UnixConn, error) {
			return net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		})
	})
}

// Listen returns a helper's listening socket. An earlier one, of a helper that exited, is replaced.
func Listen(ctx context.Context, ns *host.Namespace, name, path string) (*os.File, error) {
	socket, err := host.Call(ctx, ns, "listening for helper "+name, func(f *os.File) { f.Close() }, func() (*os.File, error) {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return nil, err
		}
		return helper.Listen(path)
	})
	if err != nil {
		return nil, fmt.Errorf("making the helper's socket: %w", err)
	}
	return socket, nil
}
