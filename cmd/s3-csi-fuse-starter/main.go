// Command s3-csi-fuse-starter starts a FUSE client in a pod. The driver has mounted the volume; this program gets the descriptor of its
// FUSE connection from the driver and executes the client with it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fusestarter"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// version is set when the program is built.
var version = "devel"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "s3-csi-fuse-starter:", err)
		os.Exit(1)
	}
}

func run() error {
	// The client's number of the descriptor is taken before the runtime makes descriptors of its own, which it would replace.
	for fd := -1; fd < fusestarter.FuseFD; {
		var err error
		if fd, err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		if fd > fusestarter.FuseFD { // the parent has left it open
			unix.Close(fd)
		}
	}
	c, err := fusestarter.Parse(os.Args[1:], os.Getenv(osfile.EnvFuseSocket))
	switch {
	case err != nil:
		return fmt.Errorf("%w\n%s", err, fusestarter.Usage)
	case c.Help:
		fmt.Println(fusestarter.Usage)
		return nil
	case c.Version:
		fmt.Println("s3-csi-fuse-starter", version)
		return nil
	}
	program, err := exec.LookPath(c.Client[0])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	fd, err := osfile.ReceiveFuse(ctx, c.Socket)
	if err != nil {
		return err
	}
	if err := unix.Dup3(fd, fusestarter.FuseFD, 0); err != nil { // fd is another number, and close-on-exec
		return fmt.Errorf("descriptor %d: %w", fusestarter.FuseFD, err)
	}
	err = syscall.Exec(program, c.Client, os.Environ())
	return errors.Join(fmt.Errorf("executing %s", program), err)
}
