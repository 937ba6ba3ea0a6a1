// Command s3-csi-driver is a CSI driver for volumes in S3. Its modes are all, controller, node, check, status, volumes and session.
// Helpers run the mode session to get or renew a session.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// version is set with -ldflags "-X main.version=…".
var version string

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	info, _ := debug.ReadBuildInfo()
	version := driver.VersionFrom(version, info)
	// The mode session runs once per renewal of a mount's session. Its time limit starts before it reads any input.
	if len(os.Args) > 1 && os.Args[1] == session.Mode {
		time.AfterFunc(session.MainBound, func() { os.Exit(exitFailure) })
		if err := session.Main(context.Background(), version, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "s3-csi-driver session:", err)
			os.Exit(exitFailure)
		}
		os.Exit(exitOK)
	}
	os.Exit(run(os.Args[1:], version, os.Stdout, os.Stderr))
}

// run is main without os.Exit, except on a second signal.
func run(args []string, version string, stdout, stderr io.Writer) int {
	o, err := driver.Parse(args, driver.Environment{Lookup: os.LookupEnv, Hostname: os.Hostname})
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return printText(stdout, driver.Usage(o.Mode))
	case err != nil:
		return fail(stderr, err)
	case o.Common.Version:
		return printText(stdout, version+"\n")
	}
	if err := driver.SetupLogging(o.Common); err != nil {
		return fail(stderr, err)
	}
	defer klog.Flush()
	ctx, stop := driver.WithSignals(context.Background(), func(code int) {
		klog.Flush()
		os.Exit(code)
	})
	defer stop()
	switch o.Mode {
	case driver.ModeCheck:
		return checkAll(ctx, o, version, stdout, stderr)
	case driver.ModeStatus:
		return showStatus(ctx, o, stdout, stderr)
	case driver.ModeVolumes:
		return showVolumes(ctx, o, version, stdout, stderr)
	}
	if err := serve(ctx, o, version); err != nil {
		klog.FromContext(ctx).Error(err, "Driver failed")
		return codeOf(err)
	}
	klog.FromContext(ctx).Info("Shutdown complete")
	return exitOK
}

// printText writes text to stdout and returns the exit code.
func printText(stdout io.Writer, text string) int {
	if _, err := io.WriteString(stdout, text); err != nil {
		return exitFailure
	}
	return exitOK
}

// fail writes an error to stderr, for errors before logging is set up, and returns the exit code.
func fail(stderr io.Writer, err error) int {
	_, _ = fmt.Fprintln(stderr, "s3-csi-driver:", err)
	return codeOf(err)
}

func codeOf(err error) int {
	if usage := (*driver.UsageError)(nil); errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailure
}
