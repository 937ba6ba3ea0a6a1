package controller

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"sync"

	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// hooks watch and disturb the requests of one process, at the place where they leave it.
type hooks struct {
	mu     sync.Mutex
	log    []string                              // operations, in the order in which they were sent
	strip  []string                              // headers that are not sent
	header func(operation string, h http.Header) // sees what is sent
	before func(n int, operation string) error
	after  func(n int, operation string) error // the request was answered, and the answer is lost
	answer func(n int, operation string) *http.Response
	wait   func(ctx context.Context, operation string) // holds a request up
}

func (h *hooks) set(f func(*hooks)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(h)
}

// reset forgets what was sent.
func (h *hooks) reset() { h.set(func(h *hooks) { h.log = nil }) }

func (h *hooks) sent() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]string{}, h.log...)
}

// errCut is a broken connection.
var errCut = errors.New("connection cut by the test")

func cut() error { return &smithyhttp.RequestSendError{Err: errCut} }

func (h *hooks) install(s *middleware.Stack) error {
	err := s.Build.Add(middleware.BuildMiddlewareFunc("testStrip", func(ctx context.Context, in middleware.BuildInput, next middleware.BuildHandler) (middleware.BuildOutput, middleware.Metadata, error) {
		h.mu.Lock()
		strip := h.strip
		h.mu.Unlock()
		if req, ok := in.Request.(*smithyhttp.Request); ok {
			for _, header := range strip {
				req.Header.Del(header)
			}
		}
		return next.HandleBuild(ctx, in)
	}), middleware.After)
	if err != nil {
		return err
	}
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("testHooks", func(ctx context.Context, in middleware.DeserializeInput, next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
		operation := awsmiddleware.GetOperationName(ctx)
		h.mu.Lock()
		h.log = append(h.log, operation)
		n := len(h.log)
		before, after, answer, wait, header := h.before, h.after, h.answer, h.wait, h.header
		h.mu.Unlock()
		if req, ok := in.Request.(*smithyhttp.Request); ok && header != nil {
			header(operation, req.Header)
		}
		var out middleware.DeserializeOutput
		if wait != nil {
			wait(ctx, operation)
		}
		if before != nil {
			if err := before(n, operation); err != nil {
				return out, middleware.Metadata{}, err
			}
		}
		if answer != nil {
			if r := answer(n, operation); r != nil {
				out.RawResponse = &smithyhttp.Response{Response: r}
				return out, middleware.Metadata{}, nil
			}
		}
		out, metadata, err := next.HandleDeserialize(ctx, in)
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
	body := `<?xml version="1.0" encoding="UTF-8"?><Error><Code>` + code + `</Code><Message>said the test</Message><RequestId>TEST</RequestId></Error>`
	return &http.Response{
		StatusCode: status, Status: http.StatusText(status), Header: http.Header{"Content-Type": {"application/xml"}},
		Body: io.NopCloser(bytes.NewReader([]byte(body))), ContentLength: int64(len(body)), Request: &http.Request{Method: http.MethodPost},
	}
}

func readCloser(s string) io.ReadCloser { return io.NopCloser(bytes.NewReader([]byte(s))) }
