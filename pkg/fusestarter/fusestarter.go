// Package fusestarter parses the command line of s3-csi-fuse-starter, which starts a FUSE client in a pod with the descriptor of the
// volume's connection.
package fusestarter

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"time"
)

// FuseFD is the number of the FUSE descriptor in the client: its arguments name it as /dev/fd/3.
const FuseFD = 3

// DefaultTimeout is how long the driver may take to listen.
const DefaultTimeout = time.Minute

// Usage is the help text.
const Usage = `usage: s3-csi-fuse-starter [--fd-passing-socket-path PATH] [--timeout 1m] -- CLIENT [ARGUMENT...]

Receives the FUSE descriptor of a volume from the driver and executes CLIENT, which has it as /dev/fd/3: that is
its mount point. Without the flag, PATH is the value of FUSERMOUNT3PROXY_FDPASSING_SOCKPATH.`

// Command is what the arguments ask for.
type Command struct {
	Help, Version bool
	Socket        string
	Timeout       time.Duration
	Client        []string // its program and arguments
}

// Parse reads the arguments without the program's own name. socket is used if they name none. Flags have one dash or two, as with
// meta-fuse-csi-plugin's program.
func Parse(args []string, socket string) (Command, error) {
	var c Command
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.Socket, "fd-passing-socket-path", socket, "")
	flags.DurationVar(&c.Timeout, "timeout", DefaultTimeout, "")
	flags.BoolVar(&c.Version, "version", false, "")
	if end := slices.Index(args, "--"); end >= 0 {
		args, c.Client = args[:end], args[end+1:]
	}
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return Command{Help: true}, nil
	case err != nil:
		return Command{}, fmt.Errorf("%w: the client and its arguments follow after --", err)
	case c.Version:
		return Command{Version: true}, nil
	case flags.NArg() > 0:
		return Command{}, fmt.Errorf("%.60q is not a flag of this program: the client and its arguments follow after --", flags.Arg(0))
	case c.Timeout <= 0:
		return Command{}, fmt.Errorf("--timeout: %s is not a duration above 0, such as 30s", c.Timeout)
	case len(c.Client) == 0 || c.Client[0] == "":
		return Command{}, errors.New("the client is missing: it and its arguments follow after --")
	case c.Socket == "":
		return Command{}, errors.New("--fd-passing-socket-path is missing: it is the path of the socket in the emptyDir volume")
	}
	return c, nil
}
