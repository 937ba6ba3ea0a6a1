package s3server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Faults of a security token service that tests switch on.
const (
	FaultDown        = "down"        // it does not listen
	FaultUnavailable = "unavailable" // every call is answered 503
	FaultThrottle    = "throttle"    // every call is answered Throttling
	FaultHang        = "hang"        // no call is answered
	FaultRefuse      = "refuse"      // every call is answered AccessDenied
)

// STS is how the security token service behaves. The zero value is a good one.
type STS struct {
	Fault string        `json:"fault,omitempty"`
	Delay time.Duration `json:"delay,omitempty"` // before each answer
	// ClockOffset is how far its clock is ahead of this machine's. Sessions last as long as asked for; only what it says
	// about times is by its clock, and what it thinks of the times of requests.
	ClockOffset time.Duration `json:"clockOffset,omitempty"`
	// MinDuration is the shortest session that can be had; 0: a second. AWS's is 15 minutes.
	MinDuration time.Duration `json:"minDuration,omitempty"`
	// MaxDuration is the longest of a role; 0: 12 hours.
	MaxDuration time.Duration `json:"maxDuration,omitempty"`
	// MaxPacked is the size in bytes of a session policy above which it is PackedPolicyTooLarge; 0: what AWS counts in
	// characters is the only limit. AWS does not tell how it packs.
	MaxPacked int `json:"maxPacked,omitempty"`
	// IgnorePolicies makes sessions without the session policy that was asked for, as a service does that knows none.
	IgnorePolicies bool `json:"ignorePolicies,omitempty"`
}

// STSCalls is what the service was asked.
type STSCalls struct {
	Calls   map[string]int `json:"calls"`   // by action, whatever the answer was
	Refused map[string]int `json:"refused"` // by error code
	// Sessions are the names of the sessions made, in order.
	Sessions []string `json:"sessions"`
}

// Made counts the sessions.
func (c STSCalls) Made() int { return len(c.Sessions) }

// front is the security token service: HTTP, faults, counts. What it answers is in actions.go.
type front struct {
	service *service
	addr    string
	scheme  string
	tls     *tls.Config // nil: plain HTTP

	mu      sync.Mutex
	state   STS
	changed chan struct{} // closed when the state changes
	server  *http.Server  // nil: it does not listen
	calls   STSCalls
}

// newFront makes a front that listens on addr ("": a free port of 127.0.0.1).
func newFront(addr, certFile, keyFile string, s *service) (*front, error) {
	f := &front{service: s, scheme: "http://", changed: make(chan struct{}), calls: STSCalls{Calls: map[string]int{}, Refused: map[string]int{}}}
	if certFile != "" {
		cert, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			return nil, fmt.Errorf("s3server: %w", err)
		}
		f.scheme, f.tls = "https://", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	}
	var err error
	if f.addr, err = freeAddr(addr); err != nil { // it is stopped and started again
		return nil, err
	}
	return f, f.listen()
}

func (f *front) url() string { return f.scheme + f.addr }

// listen starts listening, at the first time and again.
func (f *front) listen() error {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", f.addr)
	if err != nil {
		return fmt.Errorf("s3server: STS: %w", err)
	}
	f.addr = l.Addr().String()
	if f.tls != nil {
		l = tls.NewListener(l, f.tls)
	}
	server := &http.Server{Handler: f, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	f.server = server
	go func() { _ = server.Serve(l) }() // until set or stop close it
	return nil
}

// set changes the behaviour, for calls under way too.
func (f *front) set(state STS) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch state.Fault {
	case "", FaultDown, FaultUnavailable, FaultThrottle, FaultHang, FaultRefuse:
	default:
		return fmt.Errorf("s3server: no such fault: %q", state.Fault)
	}
	f.state = state
	close(f.changed)
	f.changed = make(chan struct{})
	switch down := state.Fault == FaultDown; {
	case down && f.server != nil:
		server := f.server
		f.server = nil
		return server.Close() // connections under way too
	case !down && f.server == nil:
		return f.listen()
	}
	return nil
}

func (f *front) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.server != nil {
		_ = f.server.Close()
		f.server = nil
	}
}

func (f *front) now() (STS, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state, f.changed
}

// asked is a copy of the counts.
func (f *front) asked() STSCalls {
	f.mu.Lock()
	defer f.mu.Unlock()
	return STSCalls{Calls: maps.Clone(f.calls.Calls), Refused: maps.Clone(f.calls.Refused), Sessions: slices.Clone(f.calls.Sessions)}
}

// maxBody is above all that the API allows in one call.
const maxBody = 64 << 10

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	state, changed := f.now()
	clock := func() time.Time { return time.Now().Add(state.ClockOffset) }
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return
	}
	call, fail := newCall(r, body)
	f.count(call.action())
	if state.Delay > 0 || state.Fault == FaultHang {
		wait := time.NewTimer(state.Delay)
		defer wait.Stop()
		over := wait.C
		if state.Fault == FaultHang {
			over = nil
		}
		select {
		case <-over:
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
	var answer any
	switch state.Fault {
	case FaultHang: // the caller is to see a connection that ended, not an answer
		panic(http.ErrAbortHandler)
	case FaultUnavailable:
		fail = &stsError{status: http.StatusServiceUnavailable, code: "ServiceUnavailable", message: "Service is unavailable"}
	case FaultThrottle:
		fail = &stsError{status: http.StatusBadRequest, code: "Throttling", message: "Rate exceeded"}
	case FaultRefuse:
		fail = denied("the test refuses every call")
	}
	if fail == nil {
		call.clock, call.state = clock, state
		answer, err = f.service.answer(r.Context(), call)
		if !errors.As(err, &fail) && err != nil {
			fail = &stsError{status: http.StatusInternalServerError, code: "InternalFailure", message: err.Error()}
		}
	}
	if fail != nil {
		f.countRefused(fail.code)
	} else if call.session != "" {
		f.countSession(call.session)
	}
	w.Header().Set("Date", clock().UTC().Format(http.TimeFormat))
	writeAnswer(w, call.action(), answer, fail)
}

func (f *front) count(action string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls.Calls[action]++
}

func (f *front) countRefused(code string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls.Refused[code]++
}

func (f *front) countSession(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls.Sessions = append(f.calls.Sessions, name)
}
