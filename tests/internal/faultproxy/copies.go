package faultproxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

const copySourceHeader = "X-Amz-Copy-Source"

// isCopy reports whether a request copies an object or a part.
func isCopy(r *http.Request) bool { return r.Header.Get(copySourceHeader) != "" }

// FindsNoSource answers copies of objects whose name has a text, as it is in the header, with NoSuchKey.
func FindsNoSource(text string) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if strings.Contains(r.Header.Get(copySourceHeader), text) {
			Refuse(w, r, http.StatusNotFound, "NoSuchKey", "The specified key does not exist.")
			return
		}
		forward.ServeHTTP(w, r)
	}
}

// CopiesNothing answers copies with success, and does not make them. body is that of the answer.
func CopiesNothing(body string) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if isCopy(r) {
			w.Header().Set("Content-Type", "application/xml")
			_, _ = io.WriteString(w, body)
			return
		}
		forward.ServeHTTP(w, r)
	}
}

// HidesCopies makes copies, and answers without their ETags.
func HidesCopies() Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if !isCopy(r) {
			forward.ServeHTTP(w, r)
			return
		}
		edited(w, r, forward, func(string) string { return `<CopyObjectResult></CopyObjectResult>` })
	}
}

// SlowCopies counts what it copied in time, and what not.
type SlowCopies struct{ Done, Left atomic.Int64 }

// Quirk takes a time for each MiB that is copied, in which it says nothing, and ends a copy without effect when the client leaves. whole is the size of
// objects that are copied in one request.
func (s *SlowCopies) Quirk(perMiB time.Duration, whole int64) Quirk {
	return func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if isCopy(r) {
			size := whole
			var first, last int64
			if n, _ := fmt.Sscanf(r.Header.Get(copySourceHeader+"-Range"), "bytes=%d-%d", &first, &last); n == 2 {
				size = last - first + 1
			}
			_, _ = io.Copy(io.Discard, r.Body) // so that the server notices when the client leaves
			select {
			case <-time.After(perMiB * time.Duration(size) >> 20):
				s.Done.Add(1)
			case <-r.Context().Done():
				s.Left.Add(1)
				panic(http.ErrAbortHandler)
			}
		}
		forward.ServeHTTP(w, r)
	}
}
