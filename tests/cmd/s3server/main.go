// Command s3server runs the tests' S3 server as a process: for tests that need several, and for trying things by hand.
//
// It prints its endpoint as one line when it answers, and runs until SIGTERM or, with --control, until its standard input
// ends. The root keys come from S3SERVER_ROOT_ACCESS_KEY and S3SERVER_ROOT_SECRET_KEY.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "s3server:", err)
		os.Exit(1)
	}
}

func run() error {
	var opts s3server.Options
	var readyFile string
	var control bool
	flag.StringVar(&opts.Addr, "addr", "127.0.0.1:0", "address to listen on; port 0 chooses a free one")
	flag.StringVar(&opts.Dir, "dir", "", "directory for objects, versions and users (required)")
	flag.StringVar(&opts.STSAddr, "sts-addr", "", "address of the security token service; a free one without it")
	flag.StringVar(&opts.Region, "region", s3server.DefaultRegion, "region")
	flag.StringVar(&opts.CertFile, "cert-file", "", "PEM certificate: speak TLS")
	flag.StringVar(&opts.KeyFile, "key-file", "", "the certificate's PEM key")
	flag.StringVar(&readyFile, "ready-file", "", "file to write the endpoint to when the server answers")
	flag.BoolVar(&control, "control", false, "take control requests on standard input, and end with it")
	flag.Parse()
	if flag.NArg() != 0 {
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	opts.RootAccessKey, opts.RootSecretKey = os.Getenv(s3server.EnvRootAccessKey), os.Getenv(s3server.EnvRootSecretKey)
	if opts.RootAccessKey == "" || opts.RootSecretKey == "" {
		return fmt.Errorf("%s and %s must be set", s3server.EnvRootAccessKey, s3server.EnvRootSecretKey)
	}

	// Libraries print notes on standard output, which is for the endpoint and for answers.
	stdout := os.Stdout
	os.Stdout = os.Stderr

	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	server, err := s3server.Start(ctx, opts)
	if err != nil {
		return err
	}
	if readyFile != "" {
		if err := os.WriteFile(readyFile, []byte(server.Endpoint()+"\n"), 0o644); err != nil {
			return err
		}
	}
	fmt.Fprintln(stdout, server.Endpoint())
	if !control {
		fmt.Fprintln(os.Stderr, "security token service:", server.STS())
	}
	if control {
		ended := make(chan error, 1)
		go func() { ended <- server.ServeControl(ctx, os.Stdin, stdout) }()
		select {
		case err = <-ended:
		case <-ctx.Done():
		}
	} else {
		<-ctx.Done()
	}
	if stopErr := server.Stop(); err == nil {
		err = stopErr
	}
	return err
}
