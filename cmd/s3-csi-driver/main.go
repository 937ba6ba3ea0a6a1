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
	"slices"
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
	os.Exit(run(os.Args[1:], version, output{os.Stdout, os.Stderr}))
}

// run is main without os.Exit, except on a second signal.
func run(args []string, version string, out output) int {
	o, err := driver.Parse(args, driver.Environment{Lookup: os.LookupEnv, Hostname: os.Hostname})
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return out.print(driver.Usage(o.Mode))
	case err != nil:
		return out.fail(err)
	case o.Common.Version:
		return out.print(version + "\n")
	}
	if err := driver.SetupLogging(o.Common); err != nil {
		return out.fail(err)
	}
	defer klog.Flush()
	ctx, stop := driver.WithSignals(context.Background(), func(code int) {
		klog.Flush()
		os.Exit(code)
	})
	defer stop()
	if slices.Contains(driver.Commands(), o.Mode) && o.Common.Verbosity == 0 { // the result already contains what would be logged
		ctx = klog.NewContext(ctx, klog.Logger{})
	}
	switch o.Mode {
	case driver.ModeCheck:
		return checkAll(ctx, o, version, out)
	case driver.ModeStatus:
		return showStatus(ctx, o, out)
	case driver.ModeVolumes:
		return showVolumes(ctx, o, version, out)
	}
	if err := serve(ctx, o, version); err != nil {
		klog.FromContext(ctx).Error(err, "Driver failed")
		return codeOf(err)
	}
	klog.FromContext(ctx).Info("Shutdown complete")
	return exitOK
}

// output is where a mode shows its result, and errors from before logging is set up.
type output struct{ stdout, stderr io.Writer }

// print writes text to stdout and returns the exit code.
func (o output) print(text string) int {
	if _, err := io.WriteString(o.stdout, text); err != nil {
		return exitFailure
	}
	return exitOK
}

// fail writes an error to stderr and returns the exit code.
func (o output) fail(err error) int {
	_, _ = fmt.Fprintln(o.stderr, "s3-csi-driver:", err)
	return codeOf(err)
}

func codeOf(err error) int {
	if usage := (*driver.UsageError)(nil); errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailure
}
