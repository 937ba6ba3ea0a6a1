package faultproxy

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"regexp"
	"sync"
	"time"
)

// Throttled answers each request once with 429, with this code or, if it is "", a text, and then passes it on.
func Throttled(code string) Quirk {
	var mu sync.Mutex
	seen := map[string]bool{}
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		mu.Lock()
		id := r.Method + r.URL.String()
		again := seen[id]
		seen[id] = true
		mu.Unlock()
		switch {
		case again:
			forward.ServeHTTP(w, r)
		case code != "":
			Refuse(w, r, http.StatusTooManyRequests, code, "Too many requests.")
		default:
			http.Error(w, "slow down", http.StatusTooManyRequests)
		}
	}
}

// Unanswered passes requests on and closes the connection instead of answering.
func Unanswered(_ http.ResponseWriter, r *http.Request, forward http.Handler) {
	forward.ServeHTTP(httptest.NewRecorder(), r)
	panic(http.ErrAbortHandler)
}

// Late passes requests on and answers after a while, without a byte before.
func Late(after time.Duration) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		edited(w, r, forward, func(body string) string {
			select {
			case <-time.After(after):
			case <-r.Context().Done():
			}
			return body
		})
	}
}

// WithoutETag removes the ETag from answers, from headers and from XML.
func WithoutETag(w http.ResponseWriter, r *http.Request, forward http.Handler) {
	edited(w, r, forward, func(body string) string {
		w.Header().Del("ETag")
		return etagElement.ReplaceAllString(body, "")
	})
}

var etagElement = regexp.MustCompile(`<ETag>[^<]*</ETag>`)

// ListedAs changes the XML of listings.
func ListedAs(edit func(xml string) string) Quirk { return listings(edit) }

// Truncated returns the XML of a listing as one that goes on with a token, or without one if that is "".
func Truncated(xml, token string) string {
	more := "<IsTruncated>true</IsTruncated>"
	if token != "" {
		more += "<NextContinuationToken>" + token + "</NextContinuationToken>"
	}
	return rootElement.ReplaceAllString(truncation.ReplaceAllString(xml, ""), "$0"+more)
}

// Content answers GET of objects with content, whatever version is asked for, and with all of it unless ranges is true.
func Content(ranges bool, content func() (body []byte, etag string)) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if r.Method != http.MethodGet || r.URL.Query().Has("list-type") {
			forward.ServeHTTP(w, r)
			return
		}
		body, etag := content()
		r.Header.Del("If-Match")
		if !ranges {
			r.Header.Del("Range")
		}
		w.Header().Set("ETag", etag)
		http.ServeContent(w, r, "", time.Now(), bytes.NewReader(body))
	}
}

// FrontEnd changes requests as the front end of Google's services does.
func FrontEnd(w http.ResponseWriter, r *http.Request, forward http.Handler) {
	r.Header.Set("Accept-Encoding", "gzip(gfe)")
	r.Header.Set("Via", "1.1 google")
	forward.ServeHTTP(w, r)
}
