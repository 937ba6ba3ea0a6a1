package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

// minioProgram returns the path of MinIO: $MINIO_BIN, or the program that make test-parts builds.
func minioProgram() (string, error) {
	if program := os.Getenv("MINIO_BIN"); program != "" {
		return program, nil
	}
	cache := os.Getenv("S3CSI_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(user, "s3-csi-driver")
	}
	program := filepath.Join(cache, "bin", "minio")
	_, err := os.Stat(program)
	return program, err
}

// startMinio starts MinIO.
func startMinio(t *testing.T) *s3d {
	t.Helper()
	if built.skip != "" {
		t.Skip(built.skip)
	}
	program, err := minioProgram()
	if err != nil {
		t.Skipf("no MinIO program: make test-parts builds it: %v", err)
	}
	for range 3 {
		var s *s3d
		if s, err = tryMinio(t, program); err == nil {
			return s
		}
	}
	t.Fatalf("MinIO does not start: %v", err)
	return nil
}

// tryMinio fails when another process takes the port before MinIO does.
func tryMinio(t *testing.T, program string) (*s3d, error) {
	t.Helper()
	address := freeAddress(t)
	cmd := exec.Command(program, "server", "--quiet", "--address", address, t.TempDir())
	cmd.Env = append(os.Environ(), "MINIO_ROOT_USER="+rootKey, "MINIO_ROOT_PASSWORD="+rootSecret, "MINIO_BROWSER=off", "MINIO_UPDATE=off", "MINIO_CALLHOME_ENABLE=off")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	check(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	stop := func() {
		_ = cmd.Process.Kill()
		<-ended
	}
	t.Cleanup(stop)
	s := &s3d{t: t, endpoint: "http://" + address}
	deadline := time.After(60 * time.Second)
	for {
		_, err := s.client().CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(testBucket)})
		if _, made := errors.AsType[*types.BucketAlreadyOwnedByYou](err); err == nil || made { // made: by a call that failed
			return s, nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
			continue
		case <-ended:
		case <-deadline:
			stop()
		}
		return nil, fmt.Errorf("%w; its output:\n%s", err, &said)
	}
}

// freeAddress returns an address whose port is below those that Linux gives to connections (ip(7), ip_local_port_range), so that none
// takes it before a server does.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 10000+rand.IntN(20000)))
		if err == nil {
			check(t, l.Close())
			return l.Addr().String()
		}
	}
	t.Fatal("no port of 127.0.0.1 is free")
	return ""
}

// services returns how to start each service.
func services() map[string]func(*testing.T) *s3d {
	return map[string]func(*testing.T) *s3d{"versitygw": startS3, "minio": startMinio}
}

// eachService runs a test on every service, with conditional writes and without.
func eachService(t *testing.T, test func(t *testing.T, s *s3d, args ...string)) {
	t.Helper()
	t.Parallel() // it waits most of the time
	for name, start := range services() {
		for mode, arg := range map[string]string{"conditional": "--conditional-writes", "compare": "--conditional-writes=false"} {
			t.Run(name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				test(t, start(t), arg, "--write-back=100ms")
			})
		}
	}
}

// front forwards HTTP requests to an S3 server, with faults.
type front struct {
	url string

	mu       sync.Mutex
	down     bool
	latency  time.Duration
	requests []*http.Request
	answer   func(*http.Request) bool                      // false: the response is lost
	refuse   func(http.ResponseWriter, *http.Request) bool // true: it has responded
}

func startFront(t *testing.T, s *s3d) *front {
	t.Helper()
	target, err := url.Parse(s.endpoint)
	check(t, err)
	f := &front{}
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, r.In.Host // which is signed
		},
		ModifyResponse: func(r *http.Response) error {
			latency, answer := f.faults()
			time.Sleep(latency)
			if answer != nil && !answer(r.Request) {
				panic(http.ErrAbortHandler)
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.requests = append(f.requests, r)
		down, refuse := f.down, f.refuse
		f.mu.Unlock()
		if down {
			panic(http.ErrAbortHandler)
		}
		if refuse != nil && refuse(w, r) {
			return
		}
		forward.ServeHTTP(w, r)
	}))
	srv.Config.ErrorLog = nil
	t.Cleanup(srv.Close)
	f.url = srv.URL
	return f
}

func (f *front) faults() (time.Duration, func(*http.Request) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.latency, f.answer
}

// set changes the faults.
func (f *front) set(change func(*front)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

// seen returns the requests since the last call.
func (f *front) seen() []*http.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.requests
	f.requests = nil
	return r
}

func await(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > within {
			t.Fatalf("waited %v for %s", within, what)
		}
	}
}
