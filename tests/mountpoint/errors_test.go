//go:build linux

package mountpoint

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// bound is how long a client may take to exit, below the time that the driver gives it. The runtime delays failed handshakes by up
// to 30 s.
const bound = 60 * time.Second

// A client that cannot serve its mount exits with 1. The last line of its output names the bucket, the prefix, the service, the
// cause with its code, and what to do.
func TestAClientThatCannotServeNamesTheCause(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	noPolicy, err := b.server.AddUser(ctx, "nobody", `{"Version":"2012-10-17","Statement":[{"Effect":"Deny","Action":"s3:*","Resource":"*"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	right := b.server.Keys()
	unknown := credentials.Keys{AccessKeyID: "AKIAUNKNOWNUNKNOWN00", SecretAccessKey: right.SecretAccessKey}
	wrong := credentials.Keys{AccessKeyID: right.AccessKeyID, SecretAccessKey: "not the secret key"}
	plain := answers(t, http.StatusOK, "", "<html>It works!</html>")
	tls := httptest.NewUnstartedServer(http.NotFoundHandler())
	tls.Config.ErrorLog = log.New(io.Discard, "", 0) // handshakes fail
	tls.StartTLS()
	t.Cleanup(tls.Close)
	otherCA, _, err := s3server.WriteCert(openDir(t))
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(openDir(t), "file")
	if err := os.WriteFile(text, []byte("no certificate"), 0o644); err != nil {
		t.Fatal(err)
	}
	port := func(url string) string { return url[strings.LastIndex(url, ":"):] }
	fails := func(status int, code, message string) func(*client.Invocation) {
		s := answers(t, status, "application/xml", fmt.Sprintf("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>%s</Message></Error>",
			code, message))
		return func(in *client.Invocation) { in.Endpoint = s.URL }
	}
	at := func(url string) func(*client.Invocation) { return func(in *client.Invocation) { in.Endpoint = url } }

	for name, tt := range map[string]struct {
		change   func(*client.Invocation)
		keys     credentials.Keys // of the session; zero: the right ones
		refuse   bool             // the credentials endpoint refuses the client
		want     []string         // parts of the line
		elapsed  bool             // waits for a timeout
		attempts string           // of a request; "": 2
	}{
		"host name not resolved": {change: at("http://no-such-host.invalid:9000"),
			want: []string{"host name not resolved", "(AWS_IO_DNS_", "at http://no-such-host.invalid:9000"}},
		"nothing listens": {change: at("http://127.0.0.1:1"), want: []string{"connection refused", "(AWS_IO_SOCKET_CONNECTION_REFUSED)"}},
		"no route":        {change: at("http://198.51.100.1"), want: []string{"no route", "(AWS_IO_SOCKET_"}},
		"unknown CA":      {change: at(tls.URL), want: []string{"TLS handshake failed", "(AWS_IO_TLS_", "certificate", "caFile"}, attempts: "8"},
		"certificate of another CA": {change: func(in *client.Invocation) { in.Endpoint, in.CAFile = tls.URL, otherCA },
			want: []string{"TLS handshake failed", "(AWS_IO_TLS_", "caFile"}},
		"no TLS at the endpoint":        {change: at("https://127.0.0.1" + port(plain.URL)), want: []string{"http or https", "(AWS_IO_"}},
		"TLS at the endpoint":           {change: at("http://127.0.0.1" + port(tls.URL)), want: []string{"HTTP error", "http or https"}},
		"no such CA file":               {change: func(in *client.Invocation) { in.CAFile = "/no/such/file" }, want: []string{"/no/such/file", "cannot be read"}},
		"no certificate in the CA file": {change: func(in *client.Invocation) { in.CAFile = text }, want: []string{"CA bundle", "PEM"}},
		"access denied":                 {keys: noPolicy, want: []string{"access denied", "(AccessDenied", "s3:ListBucket"}},
		"no such bucket": {change: func(in *client.Invocation) { in.Bucket = "no-such-bucket" },
			want: []string{"no such bucket", "(NoSuchBucket", `"no-such-bucket"`}},
		"unknown access key": {keys: unknown, want: []string{"unknown access key", "(InvalidAccessKeyId"}},
		"wrong secret key":   {keys: wrong, want: []string{"wrong signature", "(SignatureDoesNotMatch"}},
		"no credentials":     {refuse: true, want: []string{"no credentials", "(AWS_AUTH_SIGNING_NO_CREDENTIALS)"}},
		"clock skew": {change: fails(http.StatusForbidden, "RequestTimeTooSkewed",
			"The difference between the request time and the current time is too large."), want: []string{"clock skew", "(AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED)"}},
		"expired session": {change: fails(http.StatusBadRequest, "ExpiredToken", "The provided token has expired."),
			want: []string{"expired session", "(ExpiredToken"}},
		"throttled": {change: fails(http.StatusServiceUnavailable, "SlowDown", "Please reduce your request rate."),
			want: []string{"rate limit", "(SlowDown"}},
		"a code that the client lacks": {change: fails(http.StatusConflict, "Odd", "an\n odd&#x85;   text "+strings.Repeat("x", 2000)),
			want: []string{"refused by the service", "(Odd: an odd text xx"}},
		"another region": {change: at(redirects(t).URL), want: []string{"region eu-central-9"}},
		"a web server":   {change: at(plain.URL), want: []string{"not a list of objects", "S3"}},
		"a web server without the page": {change: at(answers(t, http.StatusNotFound, "text/html", "<html>not found</html>").URL),
			want: []string{"HTTP status 404", "S3"}},
		"forbidden without a code":        {change: at(answers(t, http.StatusForbidden, "text/plain", "").URL), want: []string{"HTTP status 403", "S3"}},
		"not a URL":                       {change: at("http://[::1"), want: []string{"endpoint", "http://[::1"}},
		"the cache's directory is a file": {change: func(in *client.Invocation) { in.CacheDir, in.Cache = text, true }, want: []string{"cache", text}},
		"parts too small for a service": {change: func(in *client.Invocation) {
			in.Options = []volume.Option{{Name: "read-part-size", Value: "5242879", HasValue: true}}
		}, want: []string{"part size", "5MiB"}},
		"the endpoint drops the handshake": {change: at("http://" + full(t)), want: []string{"connection timed out", "(AWS_IO_SOCKET_TIMEOUT)"}, elapsed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.elapsed && testing.Short() {
				t.Skip("waits for a timeout")
			}
			in := b.invocation(t)
			if tt.change != nil {
				tt.change(&in)
			}
			keys := b.keys
			if tt.keys != (credentials.Keys{}) {
				keys = newEndpoint(t, tt.keys)
			}
			started := pressure.Now()
			code, output := failed(t, in, keys, tt.refuse, "AWS_MAX_ATTEMPTS="+cmp.Or(tt.attempts, "2"))
			if took := started.Since(); isOwn() && took > bound {
				t.Errorf("it took %s", took)
			}
			if code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			lines := strings.Split(strings.TrimRight(output, "\n"), "\n")
			last := lines[len(lines)-1]
			t.Log(last)
			if !isOwn() {
				return
			}
			for _, part := range tt.want {
				if !strings.Contains(last, part) {
					t.Errorf("no %q in the last line of\n%s", part, output)
				}
			}
			if len(lines) != 1 {
				t.Errorf("there are %d lines of output", len(lines))
			}
			text, ok := strings.CutPrefix(last, "Error: ")
			if !ok || !unicode.IsLower([]rune(text)[0]) || strings.HasSuffix(text, ".") || len(text) > 800 || strings.ContainsFunc(text, unicode.IsControl) {
				t.Errorf("not one line as errors are written: %q", last)
			}
			for _, unclear := range []string{"Unknown", "Client error", "Service error", "CRT error", "None", "Some("} {
				if strings.Contains(last, unclear) {
					t.Errorf("the line has %q", unclear)
				}
			}
		})
	}
}

// failed starts a client that cannot serve, and returns its exit code and what it wrote to standard error.
func failed(t *testing.T, in client.Invocation, keys *endpoint, refuse bool, env ...string) (code int, output string) {
	t.Helper()
	fuse, err := host.OpenFuse() // not mounted: the client reaches the service first
	if err != nil {
		t.Fatal(err)
	}
	defer fuse.Close()
	cmd := command(t, in, keys, fuse)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Env = append(cmd.Env, env...)
	if refuse {
		cmd.Env = append(cmd.Env, "AWS_CONTAINER_AUTHORIZATION_TOKEN=another")
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(exitTimeout, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode(), stderr.String()
}

// answers is a server with one answer.
func answers(t *testing.T, status int, contentType, body string) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return s
}

// redirects is a service whose bucket is in another region, as AWS answers.
func redirects(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Amz-Bucket-Region", "eu-central-9")
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(http.StatusMovedPermanently)
		_, _ = w.Write([]byte("<Error><Code>PermanentRedirect</Code><Message>The bucket is elsewhere.</Message></Error>"))
	}))
	t.Cleanup(s.Close)
	return s
}

// full returns the address of a socket whose queue of connections is full, so that the kernel drops new ones.
func full(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", name.(*unix.SockaddrInet4).Port)
	for range 8 {
		conn, err := (&net.Dialer{Timeout: 200 * time.Millisecond}).Dial("tcp", address)
		if err != nil {
			return address
		}
		t.Cleanup(func() { conn.Close() })
	}
	t.Fatal("the queue is not full")
	return ""
}
