package controller

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// target is a running S3 server.
type target struct {
	name     string
	endpoint string
	region   string
	keys     credentials.Keys // the controller's
	root     credentials.Keys // the test's own: versitygw looks users up for every request
	sts      string           // setting of a backend: how its token service is to be used; "": it is not declared
	skip     string           // why it is not there
}

// targets are started by TestMain. scoped are the same servers, with a user's keys and with the token service declared: there
// deletions run on sessions.
var targets, scoped []target

// everything is the policy of a user who may do everything.
const everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:*"],"Resource":["*"]}]}`

const (
	gatewaySTS = "{endpoint: %q, kinds: [assumeRole, webIdentity, federationToken]}"
	minioSTS   = "{roleOptional: true}"
)

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
	if err := add("versitygw", fmt.Sprintf(gatewaySTS, gateway.STS()), gateway); err != nil {
		return 0, err
	}
	second, err := minio.Start(ctx, dir+"/minio")
	switch {
	case errors.Is(err, minio.ErrMissing):
		missing := target{name: "minio", skip: err.Error()}
		targets, scoped = append(targets, missing), append(scoped, missing)
	case err != nil:
		return 0, err
	default:
		defer func() { err = errors.Join(err, second.Stop()) }()
		if err := add("minio", minioSTS, second); err != nil {
			return 0, err
		}
	}
	for _, t := range slices.Concat(targets, scoped) {
		canaries.add(t.keys)
	}
	return canaries.watch(m.Run)
}

// server is what a target needs of one.
type server interface {
	Endpoint() string
	Region() string
	Keys() credentials.Keys
	AddUser(ctx context.Context, name, policy string) (credentials.Keys, error)
}

// add makes targets of a server.
func add(name, sts string, s server) error {
	plain := target{name: name, endpoint: s.Endpoint(), region: s.Region(), keys: s.Keys(), root: s.Keys()}
	withSTS := plain
	withSTS.sts = sts
	var err error
	withSTS.keys, err = s.AddUser(context.Background(), "controller", everything)
	targets, scoped = append(targets, plain), append(scoped, withSTS)
	return err
}

// each runs a test on every server, with a bucket of its own, beside the other tests.
func each(t *testing.T, test func(t *testing.T, e *env)) { on(t, targets, test) }

// one runs a test on one server: what it proves does not depend on the server.
func one(t *testing.T, test func(t *testing.T, e *env)) { on(t, targets[:1], test) }

// eachWay runs a test on every server, with sessions and without.
func eachWay(t *testing.T, test func(t *testing.T, e *env)) {
	on(t, slices.Concat(targets, scoped), test)
}

// eachScoped runs a test on every server that can make sessions.
func eachScoped(t *testing.T, test func(t *testing.T, e *env)) { on(t, scoped, test) }

func on(t *testing.T, targets []target, test func(t *testing.T, e *env)) {
	t.Helper()
	t.Parallel()
	for _, target := range targets {
		label := target.name
		if target.sts != "" {
			label += "-scoped"
		}
		t.Run(label, func(t *testing.T) {
			t.Helper()
			if target.skip != "" {
				t.Skip(target.skip)
			}
			t.Parallel()
			test(t, newEnv(t, target))
		})
	}
}
