// Command helper is what the tests install on their host: a helper as the driver's programs are one in the modes that the
// launcher for systemd starts, and a stand-in for its client that tries what a sandbox forbids.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
)

func main() {
	var err error
	mode := append(os.Args, "")[1]
	switch mode {
	case runas.Mode:
		err = runas.Exec(os.Args)
	case "helper":
		err = helper.Run(context.Background(), "test", os.Args[2:])
	case "stand-in":
		os.Exit(standIn(os.Args[2:]))
	default:
		err = fmt.Errorf("there is no mode %q", mode)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "helper:", err)
		os.Exit(1)
	}
}
