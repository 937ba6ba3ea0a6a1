// Command s3-csi-fusermount takes the place of libfuse's fusermount3 and fusermount for a FUSE client that cannot take a descriptor
// itself. The driver has mounted the file system and given the descriptor to the client; this program, which the client executes, hands
// it to the client's library. A client in a user's own pod does not have the descriptor: there, this program gets it from the driver, by the
// socket that the environment names.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fusermount"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// receiveTimeout is how long the driver may take to listen.
const receiveTimeout = time.Minute

// version is set when the program is built.
var version = "devel"

func main() {
	call, err := fusermount.Parse(os.Args[1:], os.Getenv(fusermount.EnvSocket))
	switch {
	case err != nil:
	case call.Version:
		// The driver tests with it whether the host executes this program, and libraries ask for it.
		_, err = fmt.Println("fusermount3 version: s3-csi-fusermount", version)
	case call.Mount:
		err = send(call.Socket)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "s3-csi-fusermount:", err)
		os.Exit(1)
	}
}

func send(socket int) error {
	path := os.Getenv(osfile.EnvFuseSocket)
	if path == "" {
		return fusermount.Send(socket)
	}
	ctx, cancel := context.WithTimeout(context.Background(), receiveTimeout)
	defer cancel()
	fd, err := osfile.ReceiveFuse(ctx, path)
	if err != nil {
		return err
	}
	return fusermount.SendFD(socket, fd)
}
