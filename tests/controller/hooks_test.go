package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// hooks watch and disturb the requests of one process, at the place where they leave it.
type hooks struct {
	mu     sync.Mutex
	log    []string // operations, in the order in which they were sent
	strip  []string // headers that are not sent
	before func(n int, operation string) error
	after  func(n int, operation string) error // the request was answered, and the answer is lost
	// answer sees what is sent, and may answer for the service.
	answer func(operation string, h http.Header) *http.Response
	// edit changes the service's answer.
	edit     func(operation string, r *http.Response)
	counts   bool // requests are counted, not logged
	count    int
	current  bool // versions are copied as if the current object were asked for
	pageSize int  // of listings; 0: the service's choice
	// rounds is how many requests were answered one after the other: one that is sent after another was answered counts one more.
	rounds int
	took   time.Duration                                          // all requests together
	wait   func(ctx context.Context, operation string, done bool) // holds a request up, before it is sent and after it is done
}

func (h *hooks) set(f func(*hooks)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(h)
}

// reset forgets what was sent.
func (h *hooks) reset() { h.set(func(h *hooks) { h.log, h.rounds, h.took = nil, 0, 0 }) }

func (h *hooks) sent() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]string{}, h.log...)
}

// errCut is a broken connection.
var errCut = errors.New("connection cut by the test")

func cut() error { return &smithyhttp.RequestSendError{Err: errCut} }

func (h *hooks) install(s *middleware.Stack) error {
	err := s.Build.Add(middleware.BuildMiddlewareFunc("testStrip", func(ctx context.Context, in middleware.BuildInput,
		next middleware.BuildHandler) (middleware.BuildOutput, middleware.Metadata, error) {
		h.mu.Lock()
		strip, pageSize, current := h.strip, h.pageSize, h.current
		h.mu.Unlock()
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			if q := req.URL.Query(); (q.Get("list-type") == "2" || q.Has("versions")) && pageSize > 0 {
				q.Set("max-keys", fmt.Sprint(pageSize))
				req.URL.RawQuery = q.Encode()
			}
			if from := req.Header.Get("X-Amz-Copy-Source"); current && from != "" {
				from, _, _ = strings.Cut(from, "?")
				req.Header.Set("X-Amz-Copy-Source", from)
			}
			for _, header := range strip {
				req.Header.Del(header)
			}
		}
		return next.HandleBuild(ctx, in)
	}), middleware.After)
	if err != nil {
		return err
	}
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("testHooks", func(ctx context.Context, in middleware.DeserializeInput,
		next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
		operation := awsmiddleware.GetOperationName(ctx)
		h.mu.Lock()
		if h.count++; !h.counts {
			h.log = append(h.log, operation)
		}
		n := len(h.log)
		before, after, answer, edit, wait := h.before, h.after, h.answer, h.edit, h.wait
		round, began := h.rounds+1, time.Now()
		h.mu.Unlock()
		defer h.set(func(h *hooks) {
			h.rounds = max(h.rounds, round)
			h.took += time.Since(began)
		})
		var header http.Header
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			header = req.Header
		}
		var out middleware.DeserializeOutput
		if wait != nil {
			wait(ctx, operation, false)
		}
		if before != nil {
			if err := before(n, operation); err != nil {
				return out, middleware.Metadata{}, err
			}
		}
		if answer != nil {
			if r := answer(operation, header); r != nil {
				out.RawResponse = &smithyhttp.Response{Response: r}
				return out, middleware.Metadata{}, nil
			}
		}
		out, metadata, err := next.HandleDeserialize(ctx, in)
		if r, ok := out.RawResponse.(*smithyhttp.Response); ok && edit != nil {
			edit(operation, r.Response)
		}
		if wait != nil {
			wait(ctx, operation, true)
		}
		if after != nil {
			if lost := after(n, operation); lost != nil {
				return middleware.DeserializeOutput{}, metadata, lost
			}
		}
		return out, metadata, err
	}), middleware.After)
}

// refusal is an answer of S3.
func refusal(status int, code string) *http.Response {
	return answer(status, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>`+code+`</Code><Message>said the test</Message><RequestId>TEST</RequestId></Error>`)
}

func answer(status int, body string) *http.Response {
	return &http.Response{
		StatusCode: status, Status: http.StatusText(status), Header: http.Header{"Content-Type": {"application/xml"}},
		Body: io.NopCloser(bytes.NewReader([]byte(body))), ContentLength: int64(len(body)), Request: &http.Request{Method: http.MethodPost},
	}
}

// answers lets f see what the process sends and answer for the service; nil ends that.
func (p *process) answers(f func(operation string, h http.Header) *http.Response) {
	p.hooks.set(func(h *hooks) { h.answer = f })
}

// refuse refuses some operations for the service.
func (p *process) refuse(status int, code string, operations ...string) {
	p.refuseFirst(math.MaxInt, status, code, operations...)
}

// refuseFirst refuses the first n requests of each of the operations.
func (p *process) refuseFirst(n, status int, code string, operations ...string) {
	var mu sync.Mutex
	seen := map[string]int{}
	p.answers(func(operation string, _ http.Header) *http.Response {
		mu.Lock()
		defer mu.Unlock()
		if seen[operation]++; slices.Contains(operations, operation) && seen[operation] <= n {
			return refusal(status, code)
		}
		return nil
	})
}

// says answers an operation for the service with these bodies, in turn.
func (p *process) says(operation string, bodies ...string) {
	var mu sync.Mutex
	n := 0
	p.answers(func(o string, _ http.Header) *http.Response {
		if o != operation {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		n++
		return answer(http.StatusOK, bodies[(n-1)%len(bodies)])
	})
}

// stops holds all requests of an operation up, from the first one on, until resume is called.
func (p *process) stops(operation string) (reached <-chan struct{}, resume func()) {
	held, gate := make(chan struct{}), make(chan struct{})
	reach := sync.OnceFunc(func() { close(held) })
	p.hooks.set(func(h *hooks) {
		h.wait = func(ctx context.Context, o string, done bool) {
			if o != operation || done {
				return
			}
			reach()
			select {
			case <-gate:
			case <-ctx.Done():
			}
		}
	})
	return held, func() { close(gate) }
}

// holds holds up the n-th request of an operation, before it is sent or when it is done, until resume is called or its context ends.
func (p *process) holds(n int, operation string, done bool) (reached <-chan struct{}, resume func()) {
	held, gate := make(chan struct{}), make(chan struct{})
	var mu sync.Mutex
	seen := 0
	nth := func() bool {
		mu.Lock()
		defer mu.Unlock()
		seen++
		return seen == n
	}
	p.hooks.set(func(h *hooks) {
		h.wait = func(ctx context.Context, o string, d bool) {
			if o == operation && d == done && nth() {
				close(held)
				select {
				case <-gate:
				case <-ctx.Done():
				}
			}
		}
	})
	return held, func() { close(gate) }
}
