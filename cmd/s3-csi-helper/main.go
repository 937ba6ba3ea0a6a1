// Command s3-csi-helper supervises the FUSE client of one mount. The driver starts one helper for each mount, from the driver's own
// directory. Pods wait for it to start, so it must not link libraries that it does not need: those of the driver (Kubernetes, gRPC,
// AWS) would take more time and memory than the rest of a publication.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

// version is set when the program is built.
var version = "devel"

const (
	exitFailure = 1
	exitUsage   = 2
)

// exitStatus returns the exit status for an error.
func exitStatus(err error) int {
	if errors.Is(err, sandbox.ErrUnsupported) {
		return sandbox.ExitUnsupported
	}
	return exitFailure
}

func main() {
	if len(os.Args) < 2 {
		os.Args = append(os.Args, "")
	}
	var err error
	switch os.Args[1] {
	case runas.Mode: // first: drop the privileges that systemd starts a unit with
		err = runas.Exec(os.Args, helper.Restrict)
	case "helper":
		exchange, _ := helper.ExchangeBeside() // "" if unknown: renewals then fail, and the helper's status shows the reason
		err = helper.Run(context.Background(), helper.Program{Version: version, Exchange: exchange}, os.Args[2:])
	case "--version": // the driver also uses it to test whether the host executes this program
		_, err = fmt.Println(version)
	default:
		fmt.Fprintln(os.Stderr, "s3-csi-helper: the driver starts it for each mount; do not run it by hand")
		os.Exit(exitUsage)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "s3-csi-helper:", err)
		os.Exit(exitStatus(err))
	}
}
