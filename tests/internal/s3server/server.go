// Package s3server is a real S3 server for tests: the versitygw gateway with its IAM policy engine, in this process or in
// one of its own.
//
// The gateway keeps state in package variables, so one process can run one server at a time. Tests that need several use
// StartProcess.
package s3server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/versity/versitygw/backend"
	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
	"github.com/versity/versitygw/iamapi"
	"github.com/versity/versitygw/iamapi/private"
	"github.com/versity/versitygw/iamapi/storage"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
)

// DefaultRegion is the region that a server has when none is given.
const DefaultRegion = "us-east-1"

const (
	anyPort      = "127.0.0.1:0"
	healthPath   = "/s3server-health" // masks a bucket of that name, so it is not a likely one
	startTimeout = 20 * time.Second
	stopTimeout  = 20 * time.Second
	// maxCopyObject is S3's own limit for one CopyObject. Zero would refuse every copy.
	maxCopyObject = 5 << 30
)

// Options say what to start. Dir is required.
type Options struct {
	Addr          string // host:port to listen on; "" and port 0 choose a free port of 127.0.0.1
	Dir           string // where objects, versions and users are kept; must support extended attributes
	Region        string // "" is DefaultRegion
	RootAccessKey string // "": made up
	RootSecretKey string // "": made up
	CertFile      string // PEM certificate and key: the server speaks TLS
	KeyFile       string
	STSAddr       string // host:port of the security token service, as Addr
	STS           STS    // how the security token service behaves at first
}

// Server is a running gateway.
type Server struct {
	endpoint string
	region   string
	root     credentials.Keys
	users    *users
	sts      *front

	cancel  context.CancelFunc
	private *private.PrivateAPI
	sockDir string
	done    chan error // receives the gateway's end, once
	stop    sync.Once
	stopErr error
}

// Start starts a gateway and returns when it answers. It runs until Stop; ctx bounds only the start.
func Start(ctx context.Context, opts Options) (*Server, error) {
	if opts.Dir == "" {
		return nil, errors.New("s3server: Options.Dir is required")
	}
	if opts.Region == "" {
		opts.Region = DefaultRegion
	}
	root := credentials.Keys{AccessKeyID: opts.RootAccessKey, SecretAccessKey: opts.RootSecretKey}
	if root.IsZero() {
		root = newKeys()
	}
	addr, err := freeAddr(opts.Addr)
	if err != nil {
		return nil, err
	}
	files, buckets, err := openStores(opts.Dir)
	if err != nil {
		return nil, err
	}
	store := newStore(files)
	// A UNIX socket's path is short (108 bytes), a test's directory often is not.
	sockDir, err := os.MkdirTemp("", "s3server")
	if err != nil {
		return nil, err
	}
	sock := filepath.Join(sockDir, "iam")
	rootCreds := iamapi.RootCredentials{Access: root.AccessKeyID, Secret: root.SecretAccessKey}
	priv, err := private.New(store, rootCreds, private.WithPrivateQuiet())
	if err != nil {
		os.RemoveAll(sockDir)
		return nil, fmt.Errorf("s3server: IAM: %w", err)
	}

	sts, err := newFront(opts.STSAddr, opts.CertFile, opts.KeyFile, &service{store: store, region: opts.Region, root: root, roles: map[string]Role{}})
	if err == nil {
		err = sts.set(opts.STS)
	}
	if err != nil {
		os.RemoveAll(sockDir)
		return nil, err
	}
	scheme := "http://"
	if opts.CertFile != "" {
		scheme = "https://"
	}
	runCtx, cancel := context.WithCancel(context.Background())
	s := &Server{
		endpoint: scheme + addr, region: opts.Region, root: root, users: &users{store: store}, sts: sts,
		cancel: cancel, private: priv, sockDir: sockDir, done: make(chan error, 1),
	}
	iamDone := make(chan error, 1)
	go func() { iamDone <- servePrivate(priv.ServeMultiPort, []string{sock}) }()
	if err := waitSocket(ctx, sock, iamDone); err != nil {
		s.end()
		return nil, fmt.Errorf("s3server: IAM: %w", err)
	}
	go func() {
		s.done <- embedgw.RunVersityGW(runCtx, buckets, &embedgw.Config{
			RootUserAccess: root.AccessKeyID, RootUserSecret: root.SecretAccessKey, Region: opts.Region,
			Ports: []string{addr}, MaxConnections: 4096, MaxRequests: 1024, MultipartMaxParts: 10000,
			CertFile: opts.CertFile, KeyFile: opts.KeyFile,
			KeepAlive: true, Quiet: true, HealthPath: healthPath,
			// Without the cache a policy that a test changes holds for the next request.
			StandaloneIAMEndpoint: sock, IAMCacheDisable: true,
		})
	}()
	if err := s.waitHealthy(ctx); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// Endpoint is the server's URL.
func (s *Server) Endpoint() string { return s.endpoint }

// Region is the server's region.
func (s *Server) Region() string { return s.region }

// Keys are the root user's, who may do everything.
func (s *Server) Keys() credentials.Keys { return s.root }

// AddUser makes a user who may do what the IAM policy document says and nothing else ("" : nothing at all).
func (s *Server) AddUser(ctx context.Context, name, policy string) (credentials.Keys, error) {
	return s.users.add(ctx, name, policy)
}

// SetPolicy replaces a user's policy.
func (s *Server) SetPolicy(ctx context.Context, name, policy string) error {
	return s.users.setPolicy(ctx, name, policy)
}

// AddKey makes another key of a user, as for a rotation. A user has two at most.
func (s *Server) AddKey(ctx context.Context, name string) (credentials.Keys, error) {
	return s.users.addKey(ctx, name)
}

// RemoveKey takes a key away from a user, at once.
func (s *Server) RemoveKey(ctx context.Context, name, accessKeyID string) error {
	return s.users.removeKey(ctx, name, accessKeyID)
}

// STS is the URL of the server's security token service, which knows the actions AssumeRole, AssumeRoleWithWebIdentity,
// GetFederationToken and GetCallerIdentity.
func (s *Server) STS() string { return s.sts.url() }

// SetSTS changes how the security token service behaves, at once.
func (s *Server) SetSTS(_ context.Context, behaviour STS) error { return s.sts.set(behaviour) }

// STSCalls is what the security token service has been asked.
func (s *Server) STSCalls(context.Context) (STSCalls, error) { return s.sts.asked(), nil }

// SetRole makes a role, or replaces all that is known of one.
func (s *Server) SetRole(ctx context.Context, role Role) (arn string, err error) {
	return s.sts.service.setRole(ctx, role)
}

// AddIssuer makes the tokens known that an OpenID Connect issuer makes for these audiences. The issuer is asked for its keys
// over plain HTTP if its URL says so.
func (s *Server) AddIssuer(_ context.Context, url string, audiences ...string) error {
	s.sts.service.issuers.add(url, audiences)
	return nil
}

// RevokeSessions ends all sessions of a role, or of a user, that there are now.
func (s *Server) RevokeSessions(_ context.Context, arn string) error {
	s.sts.service.store.revoke(arn)
	return nil
}

// Stop ends the server. What it has stored stays in its directory, and a server started there again has it.
func (s *Server) Stop() error {
	s.stop.Do(func() {
		s.end()
		select {
		case s.stopErr = <-s.done:
		case <-time.After(stopTimeout):
			s.stopErr = fmt.Errorf("s3server: still running %v after it was told to stop", stopTimeout)
		}
	})
	return s.stopErr
}

func (s *Server) end() {
	s.cancel()
	s.sts.stop()
	_ = s.private.Shutdown() // its listener is closed with it; nothing is lost
	os.RemoveAll(s.sockDir)
}

func (s *Server) waitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return poll(ctx, "s3server at "+s.endpoint, func() (bool, error) {
		select {
		case err := <-s.done:
			return false, fmt.Errorf("s3server: the gateway ended at start: %w", err)
		default:
		}
		return Healthy(ctx, s.endpoint+healthPath), nil
	})
}

// Healthy reports whether a GET of the URL answers 200 within a second.
func Healthy(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	req.Close = true
	// Whether it answers is the question, not who it is.
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func openStores(dir string) (storage.Storer, backend.Backend, error) {
	data, versions, iam := filepath.Join(dir, "data"), filepath.Join(dir, "versions"), filepath.Join(dir, "iam")
	for _, d := range []string{data, versions, iam} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, nil, err
		}
	}
	store, err := storage.New(storage.Config{Dir: iam})
	if err != nil {
		return nil, nil, fmt.Errorf("s3server: user store: %w", err)
	}
	posix, err := posix.New(data, meta.XattrMeta{}, posix.PosixOpts{
		VersioningDir: versions, CopyObjectThreshold: maxCopyObject, Concurrency: 512,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("s3server: object store in %s (does its file system have extended attributes?): %w", data, err)
	}
	return store, objects{posix}, nil
}

// servePrivate calls private.PrivateAPI.ServeMultiPort, whose last parameter's type cannot be named here: inference can.
func servePrivate[T any](serve func([]string, T) error, addrs []string) error {
	var noTLS T
	return serve(addrs, noTLS)
}

func waitSocket(ctx context.Context, path string, ended <-chan error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return poll(ctx, "socket "+path, func() (bool, error) {
		select {
		case err := <-ended:
			return false, fmt.Errorf("ended at start: %w", err)
		default:
		}
		_, err := os.Stat(path)
		return err == nil, nil
	})
}

// poll waits until try says true or fails, or ctx ends.
func poll(ctx context.Context, what string, try func() (bool, error)) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := try(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not ready: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}

// freeAddr turns a wish into an address with a port: the gateway binds by itself, a moment later.
func freeAddr(addr string) (string, error) {
	if addr == "" {
		addr = anyPort
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("s3server: address %q: %w", addr, err)
	}
	switch {
	case addr == anyPort:
		return ports.Free()
	case port != "0":
		return addr, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", fmt.Errorf("s3server: %w", err)
	}
	defer l.Close()
	return l.Addr().String(), nil
}
