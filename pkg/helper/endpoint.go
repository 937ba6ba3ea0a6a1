package helper

import (
	"bytes"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
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
	// advertisedLifetime is the maximum validity that is reported to a client, so that changed keys reach it soon. Mountpoint's SDK
	// asks again five minutes before the end.
	advertisedLifetime = 15 * time.Minute
	// connTimeout bounds one request.
	connTimeout = 5 * time.Second
	// renewalWait is how long a request waits for a session that is being made, if there is no valid one. SDKs time out after
	// one or two seconds and ask again.
	renewalWait = 1500 * time.Millisecond
	// awaitedWait is how long a request waits for the first session of a client that was started before it. The clients set no
	// timeout for the answer: aws-c-auth (Mountpoint) bounds connecting only, aws-sdk-go-v2 (rclone) connecting and TLS. Both
	// take an error for final after three or four attempts, and then exit. The driver gives up earlier (--mount-timeout).
	awaitedWait = 10 * time.Minute
	// maxWaiting bounds how many requests wait for that at once.
	maxWaiting = 16
	// maxReading bounds connections that have not sent a token yet; a new one replaces the oldest.
	maxReading = 32
	// Rate limit for wrong tokens: a burst, then one per wrongEvery. Requests beyond it get 429.
	wrongBurst = 10
	wrongEvery = time.Second
)

// endpoint serves credentials to a client. Requests with the right token are never rate limited. Connections of other users are closed
// before they can take the place of the client's.
type endpoint struct {
	listener *net.TCPListener
	callers  *callers
	token    string
	now      func() time.Time
	log      *logger
	// sessionMissing is called if the client asks and there is no valid session. It reports whether one is expected soon.
	sessionMissing func() bool

	mu         sync.Mutex
	keys       credentials.Keys
	ends       time.Time     // of keys, by the clock now; zero: never
	awaited    bool          // the first keys are still to come
	changed    chan struct{} // closed and replaced after every attempt to renew the keys
	closed     chan struct{} // closed by close
	waiting    int           // requests that wait for changed
	reading    []net.Conn    // the oldest first
	wrong      float64       // tokens left in the bucket
	wrongSince time.Time
	conns      sync.WaitGroup
}

// newEndpoint listens on a loopback port; serve answers there.
func newEndpoint(log *logger, now func() time.Time, c *callers) (*endpoint, error) {
	var random [32]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, fmt.Errorf("create the token of the credential endpoint: %w", err)
	}
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("listen for the client's credential requests: %w", err)
	}
	return &endpoint{listener: l, callers: c, token: hex.EncodeToString(random[:]), now: now, log: log, changed: make(chan struct{}), closed: make(chan struct{}),
		sessionMissing: func() bool { return false }, wrong: wrongBurst, wrongSince: now()}, nil
}

// env returns the variables that point a client to the endpoint and keep it from other sources of credentials.
func (e *endpoint) env() []string {
	return append(noOtherSources(), envFullURI+"=http://"+e.listener.Addr().String()+endpointPath, envAuthToken+"="+e.token)
}

// noOtherSources returns the variables that keep SDKs from looking for credentials on the machine.
func noOtherSources() []string {
	return []string{"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null", "AWS_EC2_METADATA_DISABLED=true"}
}

// setKeys replaces the keys, which expire at ends by the clock now; zero: never.
func (e *endpoint) setKeys(keys credentials.Keys, ends time.Time) {
	e.mu.Lock()
	e.keys, e.ends = keys, ends
	e.awaited = e.awaited && keys.IsZero()
	e.mu.Unlock()
	e.wakeRequests()
}

const notAwaited = false

// setAwaited sets whether the client's first keys are still to come. Its requests wait for them.
func (e *endpoint) setAwaited(awaited bool) {
	e.mu.Lock()
	e.awaited = awaited
	e.mu.Unlock()
	e.wakeRequests()
}

// wakeRequests wakes requests that wait for new keys.
func (e *endpoint) wakeRequests() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.changed = make(chan struct{})
}

// served is what the endpoint has for the client at a moment.
type served struct {
	keys    credentials.Keys
	ends    time.Time
	valid   bool
	awaited bool
	changed <-chan struct{}
}

func (e *endpoint) current() served {
	e.mu.Lock()
	defer e.mu.Unlock()
	valid := !e.keys.IsZero() && (e.ends.IsZero() || e.now().Before(e.ends))
	return served{e.keys, e.ends, valid, e.awaited && !valid, e.changed}
}

// awaitKeys waits until there may be valid keys: for awaited ones until they come, otherwise for the end of an attempt to renew them.
func (e *endpoint) awaitKeys(now served) served {
	bound := renewalWait
	if now.awaited {
		bound = awaitedWait
	} else if !e.sessionMissing() {
		return e.current() // a renewal may have ended since
	}
	if !e.countWaiting(+1) {
		return e.current()
	}
	defer e.countWaiting(-1)
	expired := time.After(bound)
	for first := true; first || now.awaited; first = false {
		select {
		case <-now.changed:
			now = e.current()
		case <-expired:
			return e.current()
		case <-e.closed:
			return now
		}
	}
	return now
}

func (e *endpoint) countWaiting(n int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.waiting+n > maxWaiting {
		return false
	}
	e.waiting += n
	return true
}

func (e *endpoint) serve() {
	defer e.conns.Wait()
	for {
		conn, err := e.listener.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			e.log.printf("credential endpoint: %v", err)
			time.Sleep(100 * time.Millisecond) // usually out of descriptors
			continue
		}
		if uid, ok := e.callers.admits(addressOf(e.listener.Addr()), addressOf(conn.RemoteAddr())); !ok {
			_ = conn.Close()
			if e.countWrong() {
				e.log.printf("credential endpoint: refused connection of user %d", uid)
			}
			continue
		}
		_ = conn.SetDeadline(time.Now().Add(connTimeout))
		e.addReading(conn)
		e.conns.Go(func() {
			defer conn.Close()
			e.answer(conn)
		})
	}
}

func addressOf(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	return tcp.AddrPort()
}

func (e *endpoint) close() {
	_ = e.listener.Close()
	close(e.closed)
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.reading {
		_ = c.Close()
	}
}

func (e *endpoint) addReading(conn net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.reading) == maxReading {
		_ = e.reading[0].Close()
		e.reading = e.reading[1:]
	}
	e.reading = append(e.reading, conn)
}

func (e *endpoint) removeReading(conn net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reading = slices.DeleteFunc(e.reading, func(c net.Conn) bool { return c == conn })
}

func (e *endpoint) answer(conn net.Conn) {
	head, err := readHead(conn)
	e.removeReading(conn)
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
	_ = conn.SetDeadline(time.Now().Add(connTimeout)) // it may have waited for a session
	if _, err := conn.Write(httpAnswer(status, body)); err != nil {
		return
	}
	// Closing with unread bytes would reset the connection, and the answer could be lost.
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
		_ = tcp.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.CopyN(io.Discard, tcp, 64<<10)
	}
}

func (e *endpoint) respond(head []byte) (status string, body []byte) {
	req, err := parseHead(head)
	if err != nil {
		return "400 Bad Request", refusal("BadRequest", err.Error())
	}
	if subtle.ConstantTimeCompare([]byte(req.authorization), []byte(e.token)) != 1 {
		if !e.countWrong() {
			return "429 Too Many Requests", refusal("TooManyRequests", "too many requests with a wrong token")
		}
		e.log.printf("credential endpoint: refused request with wrong token")
		return "403 Forbidden", refusal("AccessDenied", "wrong authorization token")
	}
	if req.path != endpointPath {
		return "404 Not Found", refusal("NotFound", "credentials are at "+endpointPath)
	}
	if req.method != "GET" {
		return "405 Method Not Allowed", refusal("MethodNotAllowed", "only GET is supported")
	}
	now := e.current()
	if !now.valid {
		now = e.awaitKeys(now)
	}
	// 503, because clients retry it, and a session may be available then.
	switch {
	case now.keys.IsZero():
		return "503 Service Unavailable", refusal("NoCredentials", "this mount has no credentials")
	case !now.valid:
		return "503 Service Unavailable",
			refusal("ExpiredCredentials", "the mount's credentials expired at "+stamp(now.keys.Expires)+" and were not renewed")
	}
	return "200 OK", document(now.keys, now.ends, e.now())
}

// countWrong takes one from the rate limit for wrong tokens and reports whether there was one left.
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

// document returns the answer with keys that expire at ends by the clock now. Some SDKs require Expiration, others whole
// seconds.
func document(keys credentials.Keys, ends, now time.Time) []byte {
	left := advertisedLifetime
	if !ends.IsZero() {
		left = min(left, ends.Sub(now))
	}
	expires := now.Add(left)
	body, _ := json.Marshal(struct { //nolint:errchkjson // strings only
		AccessKeyID     string `json:"AccessKeyId"`
		SecretAccessKey string
		Token           string `json:",omitempty"`
		Expiration      string
	}{keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken, stamp(expires)})
	return body
}

// refusal returns an error in the format of aws-sdk-go.
func refusal(code, message string) []byte {
	body, _ := json.Marshal(struct { //nolint:errchkjson // strings only
		Code    string `json:"code"`
		Message string `json:"message"`
	}{code, message})
	return body
}

// maxHead bounds the head of a request to the credential endpoint, in bytes.
const maxHead = 8 << 10

// httpRequest is the part of an HTTP/1 request that the endpoint needs.
type httpRequest struct {
	method, path  string
	authorization string
}

var (
	errHeadTooLong = errors.New("request header too long")
	errBadRequest  = errors.New("malformed HTTP/1 request")
)

// readHead reads a request up to and including the empty line. Bytes after it are dropped: a connection carries one request
// without a body.
func readHead(r io.Reader) ([]byte, error) {
	buf := make([]byte, 0, 1024)
	for {
		if len(buf) == cap(buf) {
			if len(buf) >= maxHead {
				return nil, errHeadTooLong
			}
			buf = append(make([]byte, 0, min(4*cap(buf), maxHead)), buf...)
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		from := max(0, len(buf)-3)
		buf = buf[:len(buf)+n]
		if i := bytes.Index(buf[from:], []byte("\r\n\r\n")); i >= 0 {
			return buf[:from+i+4], nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// parseHead parses a request strictly (RFC 9112), because only SDKs send requests here.
func parseHead(head []byte) (httpRequest, error) {
	lines := strings.Split(strings.TrimSuffix(string(head), "\r\n\r\n"), "\r\n")
	parts := strings.Split(lines[0], " ")
	if len(parts) != 3 || !isToken(parts[0]) || !strings.HasPrefix(parts[1], "/") || !isVisible(parts[1]) ||
		(parts[2] != "HTTP/1.1" && parts[2] != "HTTP/1.0") {
		return httpRequest{}, errBadRequest
	}
	req := httpRequest{method: parts[0], path: parts[1]}
	seen := false
	for _, line := range lines[1:] {
		name, value, ok := strings.Cut(line, ":")
		if !ok || !isToken(name) { // also refuses folded lines, which begin with white space
			return httpRequest{}, errBadRequest
		}
		value = strings.Trim(value, " \t")
		for i := range len(value) {
			if value[i] < ' ' && value[i] != '\t' || value[i] == 0x7f {
				return httpRequest{}, errBadRequest
			}
		}
		switch strings.ToLower(name) {
		case "authorization":
			if seen {
				return httpRequest{}, errBadRequest
			}
			seen, req.authorization = true, value
		case "content-length":
			if n, err := strconv.ParseUint(value, 10, 32); err != nil || n != 0 {
				return httpRequest{}, errBadRequest
			}
		case "transfer-encoding":
			return httpRequest{}, errBadRequest
		}
	}
	return req, nil
}

// isToken: RFC 9110, section 5.6.2.
func isToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
	})
}

func isVisible(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f })
}

// httpAnswer returns a whole answer, after which the connection is closed.
func httpAnswer(status string, body []byte) []byte {
	var b bytes.Buffer
	b.WriteString("HTTP/1.1 " + status + "\r\n")
	b.WriteString("Content-Type: application/json\r\nCache-Control: no-store\r\nConnection: close\r\n")
	b.WriteString("Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n")
	b.Write(body)
	return b.Bytes()
}
