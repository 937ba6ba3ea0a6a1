// Package minio runs a MinIO server as a process: a second S3 implementation, which differs from versitygw in just what
// the driver must find out instead of assume. MinIO is AGPL: it is run, never linked.
package minio

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
)

// EnvBinary names the MinIO program.
const EnvBinary = "MINIO_BIN"

// Region is the servers' region.
const Region = "us-east-1"

const (
	startTimeout = 60 * time.Second // cold, on a busy machine
	stopTimeout  = 15 * time.Second
)

// ErrMissing says that there is no MinIO program on this machine: a reason to skip a test.
var ErrMissing = errors.New("no MinIO program: set " + EnvBinary + ", or build one to $S3CSI_CACHE/bin/minio")

// Server is a running MinIO.
type Server struct {
	cmd      *exec.Cmd
	endpoint string
	root     credentials.Keys
	output   *tail
	ended    chan struct{}
	waitErr  error // of the process; read after ended is closed
}

// Start starts MinIO on a free port of 127.0.0.1 with its data in dir and waits until it is healthy. It runs until Stop;
// ctx bounds only the start. Extra environment ("K=V") is for features that are configured with it.
func Start(ctx context.Context, dir string, env ...string) (*Server, error) {
	bin, err := Binary()
	if err != nil {
		return nil, err
	}
	addr, err := ports.Free()
	if err != nil {
		return nil, err
	}
	root := credentials.Keys{AccessKeyID: "root" + random(8), SecretAccessKey: random(20)}
	s := &Server{
		cmd:      exec.Command(bin, "server", "--quiet", "--address", addr, filepath.Join(dir, "data")),
		endpoint: "http://" + addr, root: root, output: &tail{}, ended: make(chan struct{}),
	}
	s.cmd.Env = append([]string{
		"HOME=" + dir, "PATH=" + os.Getenv("PATH"), // HOME: it keeps certificates and configuration there
		"MINIO_ROOT_USER=" + root.AccessKeyID, "MINIO_ROOT_PASSWORD=" + root.SecretAccessKey,
		"MINIO_BROWSER=off", "MINIO_UPDATE=off", "MINIO_CALLHOME_ENABLE=off",
		// Nothing listens there: it lets SSE-S3 work without a key server.
		"MINIO_KMS_SECRET_KEY=test-key:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
	}, env...)
	s.cmd.Stdout, s.cmd.Stderr = s.output, s.output
	// Its own group, so that Ctrl-C reaches the test alone; and it does not outlive the test.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig comes when the starting thread ends, so that thread is kept for as long as the server runs.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(s.ended)
		err := s.cmd.Start()
		started <- err
		if err == nil {
			s.waitErr = s.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("minio: %w", err)
	}
	if err := s.waitHealthy(ctx); err != nil {
		_ = s.cmd.Process.Kill()
		<-s.ended
		return nil, fmt.Errorf("minio: not healthy: %w; its last output:\n%s", err, s.output)
	}
	return s, nil
}

// Endpoint is the server's URL.
func (s *Server) Endpoint() string { return s.endpoint }

// Region is the server's region.
func (s *Server) Region() string { return Region }

// Keys are the root user's.
func (s *Server) Keys() credentials.Keys { return s.root }

// PID is the process's id.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Output is the end of what the server has printed.
func (s *Server) Output() string { return s.output.String() }

// Stop ends the server, by force if it does not end by itself.
func (s *Server) Stop() error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.ended:
		return nil // its exit code after SIGTERM says nothing
	case <-time.After(stopTimeout):
	}
	_ = s.cmd.Process.Kill()
	<-s.ended
	return fmt.Errorf("minio: did not end within %v and was killed", stopTimeout)
}

func (s *Server) waitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.endpoint+"/minio/health/cluster", nil)
		if err != nil {
			return err
		}
		req.Close = true
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-s.ended:
			return fmt.Errorf("it ended: %w", s.waitErr)
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// Binary is the path of the MinIO program.
func Binary() (string, error) {
	candidates := []string{os.Getenv(EnvBinary)}
	if cache := os.Getenv("S3CSI_CACHE"); cache != "" {
		candidates = append(candidates, filepath.Join(cache, "bin", "minio"))
	}
	for _, path := range candidates {
		if path == "" {
			continue
		}
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", ErrMissing
}

func random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	return hex.EncodeToString(b)
}

// tail keeps the end of an output.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if extra := len(t.buf) - tailSize; extra > 0 {
		t.buf = bytes.Clone(t.buf[extra:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
