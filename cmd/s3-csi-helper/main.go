// Command s3-csi-helper is the process beside each mount's FUSE client: the driver's helper mode in a program of its own.
// The driver starts it instead of itself where both are in one directory. There is one for every mount, and it comes to
// life while a pod waits, so nothing may be linked into it that it does not need: in the driver's program the libraries of
// Kubernetes, gRPC and AWS take longer to initialise than everything else of a publication together, and most of the memory.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
)

// version is set when the program is built.
var version = "devel"

const (
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	if len(os.Args) < 2 {
		os.Args = append(os.Args, "")
	}
	var err error
	switch os.Args[1] {
	case runas.Mode: // first of all: it gives up the privileges that systemd starts a unit with
		err = runas.Exec(os.Args)
	case "helper":
		exchange, _ := helper.ExchangeBeside() // "" where it cannot be found, and that is said
		err = helper.Run(context.Background(), helper.Program{Version: version, Exchange: exchange}, os.Args[2:])
	case "--version": // also how the driver finds out whether the host lets this program run
		_, err = fmt.Println(version)
	default:
		fmt.Fprintln(os.Stderr, "s3-csi-helper: is started by the driver, one for each mount; there is nothing to do with it by hand")
		os.Exit(exitUsage)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "s3-csi-helper:", err)
		os.Exit(exitFailure)
	}
}
