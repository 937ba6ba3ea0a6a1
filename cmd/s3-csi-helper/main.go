// Command s3-csi-helper is the process beside each mount's FUSE client. The driver starts one for every mount, from its own
// directory. A pod waits for it to start, so nothing may be linked into it that it does not need: the driver's libraries
// (Kubernetes, gRPC, AWS) would take more time and memory than everything else that a publication does.
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
	case runas.Mode: // first: drop the privileges that systemd starts a unit with
		err = runas.Exec(os.Args)
	case "helper":
		exchange, _ := helper.ExchangeBeside() // "" if unknown: then renewals fail, and the status says why
		err = helper.Run(context.Background(), helper.Program{Version: version, Exchange: exchange}, os.Args[2:])
	case "--version": // the driver also uses it to test whether the host executes this program
		_, err = fmt.Println(version)
	default:
		fmt.Fprintln(os.Stderr, "s3-csi-helper: the driver starts it for each mount; do not run it by hand")
		os.Exit(exitUsage)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "s3-csi-helper:", err)
		os.Exit(exitFailure)
	}
}
