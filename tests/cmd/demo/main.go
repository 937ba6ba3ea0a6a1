// Command demo shows the whole way from nothing to files in S3 on this machine: a bucket on a real S3 server, a volume, a
// pod-like directory, a crash of the driver, one of a client, and the removal of everything. Every step is printed and checked; the exit code is 0
// only if each did what it should, and nothing is left behind either way.
//
// DEMO_S3_ENDPOINT, with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, optionally AWS_SESSION_TOKEN and AWS_REGION, runs it
// against a server of the user's; DEMO_BUCKET then names a bucket that exists. Without, a server is started here. CLIENT chooses the FUSE
// client.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := demo(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "\nThe demo failed: %v\n", err)
		os.Exit(1)
	}
	fmt.Println("\nThe demo worked, and nothing of it is left on this machine.")
}

func demo(ctx context.Context) (err error) {
	if err := rig.Usable(); err != nil {
		return fmt.Errorf("the demo %w", err)
	}
	place, err := prepare(ctx)
	if err != nil {
		return err
	}
	defer func() {
		// Not ctx: an interrupted demo cleans up all the same.
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, place.clean(cctx))
	}()
	if err := place.play(ctx); err != nil {
		if ctx.Err() != nil {
			return errors.New("it was interrupted")
		}
		return fmt.Errorf("%w\n\nThe end of the driver's log:\n%s", err, lastLines(place.rig.Logs(), 15))
	}
	return nil
}

// step prints what is done next.
func step(what string) { fmt.Printf("\n\033[1m== %s\033[0m\n", what) }

// say prints what was seen.
func say(format string, args ...any) { fmt.Printf("   %s\n", fmt.Sprintf(format, args...)) }

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
