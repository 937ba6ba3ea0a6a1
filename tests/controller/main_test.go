package controller

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/minio"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// target is a running S3 server.
type target struct {
	name     string
	endpoint string
	region   string
	keys     credentials.Keys
	skip     string // why it is not there
}

// targets are started by TestMain.
var targets []target

func TestMain(m *testing.M) {
	// Tests mostly wait: for servers, for deadlines, for a service to be less busy.
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code, err := runWithServers(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runWithServers(m *testing.M) (code int, err error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "controller-test")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	// A process of its own: in this one the race detector would watch it, too, and slow it down many times.
	gateway, err := s3server.StartProcess(ctx, s3server.Options{Dir: dir + "/versitygw"})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, gateway.Stop()) }()
	targets = append(targets, target{name: "versitygw", endpoint: gateway.Endpoint(), region: gateway.Region(), keys: gateway.Keys()})

	second, err := minio.Start(ctx, dir+"/minio")
	switch {
	case errors.Is(err, minio.ErrMissing):
		targets = append(targets, target{name: "minio", skip: err.Error()})
	case err != nil:
		return 0, err
	default:
		defer func() { err = errors.Join(err, second.Stop()) }()
		targets = append(targets, target{name: "minio", endpoint: second.Endpoint(), region: second.Region(), keys: second.Keys()})
	}
	return m.Run(), nil
}

// each runs a test on every server, with a bucket of its own, beside the other tests.
func each(t *testing.T, test func(t *testing.T, e *env)) {
	t.Helper()
	t.Parallel()
	for _, target := range targets {
		t.Run(target.name, func(t *testing.T) {
			t.Helper()
			if target.skip != "" {
				t.Skip(target.skip)
			}
			t.Parallel()
			test(t, newEnv(t, target))
		})
	}
}
