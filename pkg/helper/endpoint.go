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
	// renewalPatience is how long a client that has no valid session is made to wait for one that is being made. SDKs wait
	// for two seconds at most before they ask again, some for one.
	renewalPatience = 1500 * time.Millisecond
	// maxPatient bounds how many requests wait for that at once.
	maxPatient = 16
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
	// inVain is told that the client asked and there is no valid session, and tells whether one can be expected at once.
	inVain func() bool

	mu         sync.Mutex
	keys       credentials.Keys
	ends       time.Time     // of keys, by now's clock; zero: never
	changed    chan struct{} // closed and replaced with every attempt to renew keys that ended
	patient    int           // requests that wait for that
	reading    []net.Conn    // the oldest first
	wrong      float64       // tokens left in the bucket
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
	return &endpoint{listener: l, token: hex.EncodeToString(random[:]), now: now, log: log, changed: make(chan struct{}), inVain: func() bool { return false }, wrong: wrongBurst, wrongSince: now()}, nil
}

// env is what a client has to be told, and what keeps it from looking for other credentials.
func (e *endpoint) env() []string {
	return append(noOtherSources(), envFullURI+"=http://"+e.listener.Addr().String()+endpointPath, envAuthToken+"="+e.token)
}

// noOtherSources keeps SDKs from looking for credentials on the machine.
func noOtherSources() []string {
	return []string{"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null", "AWS_EC2_METADATA_DISABLED=true"}
}

// set replaces the keys, which end at a moment of now's clock; zero: never.
func (e *endpoint) set(keys credentials.Keys, ends time.Time) {
	e.mu.Lock()
	e.keys, e.ends = keys, ends
	e.mu.Unlock()
	e.release()
}

// release answers requests that wait for new keys: there are none to be had now.
func (e *endpoint) release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.changed = make(chan struct{})
}

// current gives the keys, and whether they are valid.
func (e *endpoint) current() (keys credentials.Keys, ends time.Time, valid bool, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.keys, e.ends, !e.keys.IsZero() && (e.ends.IsZero() || e.now().Before(e.ends)), e.changed
}

// wait waits for an attempt to renew the keys, and for a while only.
func (e *endpoint) wait(changed <-chan struct{}) {
	if !e.inVain() || !e.countPatient(+1) {
		return
	}
	defer e.countPatient(-1)
	timer := time.NewTimer(renewalPatience)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	}
}

func (e *endpoint) countPatient(n int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.patient+n > maxPatient {
		return false
	}
	e.patient += n
	return true
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
	keys, ends, valid, changed := e.current()
	if !valid {
		e.wait(changed)
		keys, ends, valid, _ = e.current()
	}
	// 503, because clients retry it and new keys may be on their way.
	switch {
	case keys.IsZero():
		return "503 Service Unavailable", refusal("NoCredentials", "this mount has no credentials")
	case !valid:
		return "503 Service Unavailable", refusal("ExpiredCredentials", "the mount's credentials expired at "+keys.Expires.UTC().Format(time.RFC3339)+" and were not renewed")
	}
	return "200 OK", document(keys, ends, e.now())
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

// document is the answer with keys that end at a moment of now's clock. Expiration is required by some SDKs, whole seconds
// by others.
func document(keys credentials.Keys, ends, now time.Time) []byte {
	left := toldLifetime
	if !ends.IsZero() {
		left = min(left, ends.Sub(now))
	}
	told := now.Add(left)
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
