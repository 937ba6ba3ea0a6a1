package helper

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// The container-credentials protocol, as the AWS SDKs speak it ("Container credential provider" in the AWS SDKs and
// Tools Reference Guide): GET with the token as the whole Authorization header, answered by a JSON document.
const (
	envFullURI   = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
	envAuthToken = "AWS_CONTAINER_AUTHORIZATION_TOKEN" //nolint:gosec // a variable's name
	endpointPath = "/credentials"
)

const (
	// toldLifetime is how long a client is told that keys are good for, at most, so that changed keys reach it soon.
	// Mountpoint's SDK asks again from five minutes before.
	toldLifetime = 15 * time.Minute
	// connTimeout bounds one request.
	connTimeout = 5 * time.Second
	// maxReading bounds connections that have not shown a token yet; the oldest goes when a new one comes.
	maxReading = 32
	// Wrong tokens: so many at once, then one in wrongEvery, are told that they are wrong; more are told to wait.
	wrongBurst = 10
	wrongEvery = time.Second
)

// endpoint gives a client its credentials. The right token is never made to wait.
type endpoint struct {
	listener net.Listener
	token    string
	now      func() time.Time
	log      *logger

	mu         sync.Mutex
	keys       credentials.Keys
	reading    []net.Conn // the oldest first
	wrong      float64    // tokens left in the bucket
	wrongSince time.Time
	conns      sync.WaitGroup
}

// newEndpoint listens on a loopback port; serve answers there.
func newEndpoint(log *logger, now func() time.Time) (*endpoint, error) {
	var random [32]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, fmt.Errorf("make the credential endpoint's token: %w", err)
	}
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("listen for the client's credential requests: %w", err)
	}
	return &endpoint{listener: l, token: hex.EncodeToString(random[:]), now: now, log: log, wrong: wrongBurst, wrongSince: now()}, nil
}

// env is what a client has to be told, and what keeps it from looking for other credentials.
func (e *endpoint) env() []string {
	return []string{
		envFullURI + "=http://" + e.listener.Addr().String() + endpointPath,
		envAuthToken + "=" + e.token,
		"AWS_CONFIG_FILE=/dev/null",
		"AWS_SHARED_CREDENTIALS_FILE=/dev/null",
		"AWS_EC2_METADATA_DISABLED=true",
	}
}

func (e *endpoint) set(keys credentials.Keys) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.keys = keys
}

// serve answers until close.
func (e *endpoint) serve() {
	defer e.conns.Wait()
	for {
		conn, err := e.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			e.log.printf("credential endpoint: %v", err)
			time.Sleep(100 * time.Millisecond) // out of descriptors, as a rule
			continue
		}
		_ = conn.SetDeadline(time.Now().Add(connTimeout))
		e.admit(conn)
		e.conns.Go(func() {
			defer conn.Close()
			e.answer(conn)
		})
	}
}

func (e *endpoint) close() {
	_ = e.listener.Close()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.reading {
		_ = c.Close()
	}
}

func (e *endpoint) admit(conn net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.reading) == maxReading {
		_ = e.reading[0].Close()
		e.reading = e.reading[1:]
	}
	e.reading = append(e.reading, conn)
}

func (e *endpoint) haveRead(conn net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, c := range e.reading {
		if c == conn {
			e.reading = append(e.reading[:i], e.reading[i+1:]...)
			return
		}
	}
}

func (e *endpoint) answer(conn net.Conn) {
	head, err := readHead(conn)
	e.haveRead(conn)
	var status string
	var body []byte
	switch {
	case errors.Is(err, errHeadTooLong):
		status, body = "431 Request Header Fields Too Large", refusal("BadRequest", err.Error())
	case err != nil:
		return
	default:
		status, body = e.respond(head)
	}
	if _, err := conn.Write(httpAnswer(status, body)); err != nil {
		return
	}
	// Closing with unread bytes would reset the connection and could take the answer with it.
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
		_ = tcp.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.CopyN(io.Discard, tcp, 64<<10)
	}
}

// respond makes the answer to a request's head.
func (e *endpoint) respond(head []byte) (status string, body []byte) {
	req, err := parseHead(head)
	if err != nil {
		return "400 Bad Request", refusal("BadRequest", err.Error())
	}
	if subtle.ConstantTimeCompare([]byte(req.authorization), []byte(e.token)) != 1 {
		if !e.countWrong() {
			return "429 Too Many Requests", refusal("TooManyRequests", "too many requests with a wrong token")
		}
		e.log.printf("credential endpoint: refused a request without the right token; only the client of this mount may ask here")
		return "403 Forbidden", refusal("AccessDenied", "the authorization token is wrong")
	}
	if req.path != endpointPath {
		return "404 Not Found", refusal("NotFound", "credentials are at "+endpointPath)
	}
	if req.method != "GET" {
		return "405 Method Not Allowed", refusal("MethodNotAllowed", "only GET is answered")
	}
	e.mu.Lock()
	keys := e.keys
	e.mu.Unlock()
	now := e.now()
	// 503, because clients retry it and new keys may be on their way.
	if keys.IsZero() {
		return "503 Service Unavailable", refusal("NoCredentials", "this mount was given no credentials")
	}
	if !keys.Expires.IsZero() && !keys.Expires.After(now) {
		return "503 Service Unavailable", refusal("ExpiredCredentials", "the mount's credentials expired at "+keys.Expires.UTC().Format(time.RFC3339)+" and were not renewed")
	}
	return "200 OK", document(keys, now)
}

// countWrong takes one from the bucket of wrong tokens; false: it is empty.
func (e *endpoint) countWrong() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.now()
	e.wrong = min(wrongBurst, e.wrong+now.Sub(e.wrongSince).Seconds()/wrongEvery.Seconds())
	e.wrongSince = now
	if e.wrong < 1 {
		return false
	}
	e.wrong--
	return true
}

// document is the answer with credentials. Expiration is required by some SDKs, whole seconds by others.
func document(keys credentials.Keys, now time.Time) []byte {
	told := now.Add(toldLifetime)
	if !keys.Expires.IsZero() && keys.Expires.Before(told) {
		told = keys.Expires
	}
	body, _ := json.Marshal(struct { //nolint:errchkjson // strings only
		AccessKeyID     string `json:"AccessKeyId"`
		SecretAccessKey string
		Token           string `json:",omitempty"`
		Expiration      string
	}{keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken, told.UTC().Format(time.RFC3339)})
	return body
}

// refusal is an error as aws-sdk-go reads it.
func refusal(code, message string) []byte {
	body, _ := json.Marshal(struct { //nolint:errchkjson // strings only
		Code    string `json:"code"`
		Message string `json:"message"`
	}{code, message})
	return body
}
