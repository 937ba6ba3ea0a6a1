// Package fusestarter parses the command line of s3-csi-fuse-starter, which starts a FUSE client in a pod with the descriptor of the
// volume's connection.
package fusestarter

import (
	"errors"
	"fmt"
	"strings"
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
	c := Command{Socket: socket, Timeout: DefaultTimeout}
	for i := 0; i < len(args); i++ {
		name, value, given := strings.Cut(args[i], "=")
		if args[i] == "--" {
			c.Client = args[i+1:]
			break
		}
		switch name {
		case "-h", "-help", "--help":
			return Command{Help: true}, nil
		case "-version", "--version":
			return Command{Version: true}, nil
		case "-fd-passing-socket-path", "--fd-passing-socket-path", "-timeout", "--timeout":
			if !given {
				if i++; i >= len(args) || args[i] == "--" {
					return Command{}, fmt.Errorf("%s needs a value", name)
				}
				value = args[i]
			}
		default:
			return Command{}, fmt.Errorf("%.60q is not a flag of this program: the client and its arguments follow after --", args[i])
		}
		if strings.HasSuffix(name, "path") {
			c.Socket = value
			continue
		}
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			return Command{}, fmt.Errorf("%s: %.30q is not a duration above 0, such as 30s", name, value)
		}
		c.Timeout = d
	}
	switch {
	case len(c.Client) == 0 || c.Client[0] == "":
		return Command{}, errors.New("the client is missing: it and its arguments follow after --")
	case c.Socket == "":
		return Command{}, errors.New("--fd-passing-socket-path is missing: it is the path of the socket in the emptyDir volume")
	}
	return c, nil
}
