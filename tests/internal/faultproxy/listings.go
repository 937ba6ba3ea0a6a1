package faultproxy

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// isListing reports whether a request lists objects, versions or uploads.
func isListing(r *http.Request) bool {
	q := r.URL.Query()
	return r.Method == http.MethodGet && (q.Get("list-type") == "2" || q.Has("versions") || q.Has("uploads"))
}

// edited passes a request on and changes the body of the answer.
func edited(w http.ResponseWriter, r *http.Request, forward http.Handler, edit func(body string) string) {
	rec := httptest.NewRecorder()
	forward.ServeHTTP(rec, r)
	for name, values := range rec.Header() {
		w.Header()[name] = values
	}
	body := rec.Body.String()
	if rec.Code == http.StatusOK {
		body = edit(body)
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(rec.Code)
	_, _ = io.WriteString(w, body)
}

// listings is a quirk that changes the bodies of listings.
func listings(edit func(body string) string) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if !isListing(r) {
			forward.ServeHTTP(w, r)
			return
		}
		edited(w, r, forward, edit)
	}
}

var (
	keyElement      = regexp.MustCompile(`(<Key>)([^<]*)(</Key>)`)
	encodingElement = regexp.MustCompile(`<EncodingType>[^<]*</EncodingType>`)
	contentsElement = regexp.MustCompile(`(?s)<Contents>.*?</Contents>`)
	truncation      = regexp.MustCompile(`<(IsTruncated|NextContinuationToken)>[^<]*</(IsTruncated|NextContinuationToken)>`)
	rootElement     = regexp.MustCompile(`<(List\w+Result)( [^>]*)?>`)
)

// withKeys changes each key of a listing.
func withKeys(body string, change func(key string) string) string {
	return keyElement.ReplaceAllStringFunc(body, func(element string) string {
		m := keyElement.FindStringSubmatch(element)
		return m[1] + change(m[2]) + m[3]
	})
}

// EncodesSilently lists keys URL-encoded and does not say so. Its server must list them as they are.
func EncodesSilently() Quirk {
	return listings(func(body string) string {
		return withKeys(encodingElement.ReplaceAllString(body, ""), func(key string) string {
			return strings.ReplaceAll(url.QueryEscape(key), "%2F", "/")
		})
	})
}

// ClaimsEncoding lists keys as they are and says that they are URL-encoded. Its server must list them as they are.
func ClaimsEncoding() Quirk {
	return listings(func(body string) string {
		return rootElement.ReplaceAllString(encodingElement.ReplaceAllString(body, ""), "$0<EncodingType>url</EncodingType>")
	})
}

// Replaces lists keys that have one text with another text instead.
func Replaces(text, by string) Quirk {
	return listings(func(body string) string {
		return withKeys(body, func(key string) string { return strings.ReplaceAll(key, text, by) })
	})
}

// Unsorted lists the objects of each page in the reverse order.
func Unsorted() Quirk {
	return listings(func(body string) string {
		all := contentsElement.FindAllString(body, -1)
		slices.Reverse(all)
		return contentsElement.ReplaceAllStringFunc(body, func(string) string {
			next := all[0]
			all = all[1:]
			return next
		})
	})
}

// RepeatsToken lists the first page again and again.
func RepeatsToken() Quirk {
	return listings(func(body string) string { return Truncated(body, "again") })
}

// ListsAs answers listings with a body that is not one, such as the page of a load balancer.
func ListsAs(body string) Quirk { return listings(func(string) string { return body }) }
