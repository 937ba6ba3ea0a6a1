// Command s3-csi-rclone serves one prefix of an S3 bucket on an open FUSE descriptor.
//
// It is rclone's S3 backend, VFS and mount2 file system with a command line of its own, to be run by a supervisor:
//
//   - it runs in the foreground, needs no privileges and no fusermount, and reads no configuration file;
//   - credentials come from the AWS default chain, never from its command line;
//   - it writes "s3-csi-ready" to standard output when it is ready, and reports pending uploads as
//     `s3-csi-queue {"uploads":3,"bytes":1288490188}`;
//   - on SIGTERM it uploads what is pending at once and goes on. When the queue is empty it writes `s3-csi-flushed {"unsent":0}`, with
//     the number of changed files that are in no queue, because they are open for example;
//   - it exits after it was unmounted, with 0 only if all changes are stored in S3.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
)

// version is set when the program is built.
var version = "devel"

const (
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	collectAsUsualLater()
	cfg, err := parseArgs(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		printUsage(os.Stdout)
		return
	case errors.Is(err, errVersion):
		fmt.Println("s3-csi-rclone", version)
		return
	case err != nil:
		fail(exitUsage, err)
	}
	// Last: it may execute this program again, and a node asks for the version of every program.
	if err := leaveEnvironment(); err != nil {
		fail(exitFailure, err)
	}
	if err := run(context.Background(), cfg, os.Stdout); err != nil {
		fail(exitFailure, err)
	}
}

// collectAsUsualLater returns Go's garbage collector to its default after the next collection, if the driver has started this program:
// the initialization of rclone's packages allocates a multiple of what stays, and collections took a fifth of the start. For the heap of
// a large mount, startGC would be five times the memory.
func collectAsUsualLater() {
	if os.Getenv("GOGC") != startGC {
		return
	}
	runtime.AddCleanup(new([64]byte), func(struct{}) { debug.SetGCPercent(usualGC) }, struct{}{})
}

const (
	startGC = "400" // GOGC in the environment that the driver starts this program with
	usualGC = 100   // Go's default for GOGC
)

func fail(code int, err error) {
	fmt.Fprintln(os.Stderr, "s3-csi-rclone:", err)
	os.Exit(code)
}
