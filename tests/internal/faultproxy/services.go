package faultproxy

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Operation returns the name of the S3 operation that a request in path style is, as far as quirks need it.
func Operation(r *http.Request) string {
	q := r.URL.Query()
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	object := key != ""
	switch {
	case r.Method == http.MethodPut && q.Has("partNumber") && r.Header.Get("X-Amz-Copy-Source") != "":
		return "UploadPartCopy"
	case r.Method == http.MethodPut && q.Has("partNumber"):
		return "UploadPart"
	case r.Method == http.MethodPut && r.Header.Get("X-Amz-Copy-Source") != "":
		return "CopyObject"
	case r.Method == http.MethodPut && object:
		return "PutObject"
	case r.Method == http.MethodPut && q.Has("tagging"):
		return "PutBucketTagging"
	case r.Method == http.MethodPut && len(q) == 0:
		return "CreateBucket"
	case r.Method == http.MethodPost && q.Has("delete"):
		return "DeleteObjects"
	case r.Method == http.MethodPost && q.Has("uploads"):
		return "CreateMultipartUpload"
	case r.Method == http.MethodPost && q.Has("uploadId"):
		return "CompleteMultipartUpload"
	case r.Method == http.MethodGet && q.Has("list-type"):
		return "ListObjectsV2"
	case r.Method == http.MethodGet && q.Has("uploads"):
		return "ListMultipartUploads"
	case r.Method == http.MethodGet && q.Has("tagging") && !object:
		return "GetBucketTagging"
	case r.Method == http.MethodGet && object:
		return "GetObject"
	case r.Method == http.MethodHead && object:
		return "HeadObject"
	case r.Method == http.MethodDelete && q.Has("uploadId"):
		return "AbortMultipartUpload"
	case r.Method == http.MethodDelete && object:
		return "DeleteObject"
	}
	return r.Method
}

// Which selects requests by their operation, and by a condition that may be nil.
type Which struct {
	Operations []string
	If         func(*http.Request) bool
}

// Of selects all requests of operations.
func Of(operations ...string) Which { return Which{Operations: operations} }

// When adds a condition.
func (w Which) When(condition func(*http.Request) bool) Which {
	w.If = condition
	return w
}

func (w Which) matches(r *http.Request) bool {
	return (len(w.Operations) == 0 || slices.Contains(w.Operations, Operation(r))) && (w.If == nil || w.If(r))
}

// Answer is an answer that a quirk may change.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Replace replaces a pattern in the body.
func (a *Answer) Replace(pattern, by string) {
	a.Body = regexp.MustCompile(pattern).ReplaceAll(a.Body, []byte(by))
}

// Refusing answers requests with an error.
func Refusing(which Which, status int, code string) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if which.matches(r) {
			Refuse(w, r, status, code, "Quirk of a test.")
			return
		}
		forward.ServeHTTP(w, r)
	}
}

// Swallowing answers requests with success and a body, and does nothing.
func Swallowing(which Which, status int, body string) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if !which.matches(r) {
			forward.ServeHTTP(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// Changing changes answers.
func Changing(which Which, change func(r *http.Request, a *Answer)) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if !which.matches(r) {
			forward.ServeHTTP(w, r)
			return
		}
		recorder := httptest.NewRecorder()
		forward.ServeHTTP(recorder, r)
		a := &Answer{recorder.Code, recorder.Header(), recorder.Body.Bytes()}
		had := a.Header.Get("Content-Length")
		change(r, a)
		maps.Copy(w.Header(), a.Header)
		if r.Method != http.MethodHead && had != "" {
			w.Header().Set("Content-Length", strconv.Itoa(len(a.Body)))
		}
		w.WriteHeader(a.Status)
		_, _ = w.Write(a.Body)
	}
}

// Forgetting answers reads as if they had none of these headers: with the whole object, as it was stored last through the proxy.
func Forgetting(headers ...string) Quirk {
	var mu sync.Mutex
	stored := map[string][]byte{}
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		switch Operation(r) {
		case "PutObject":
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			mu.Lock()
			stored[r.URL.Path] = body
			mu.Unlock()
		case "GetObject":
			mu.Lock()
			body, ok := stored[r.URL.Path]
			mu.Unlock()
			if ok && slices.ContainsFunc(headers, func(h string) bool { return r.Header.Get(h) != "" }) {
				w.Header().Set("ETag", `"00112233445566778899aabbccddeeff"`)
				_, _ = w.Write(body)
				return
			}
		}
		forward.ServeHTTP(w, r)
	}
}
