package faultproxy

import (
	"net/http"
	"strings"
)

// Google changes requests as the front end of Google Cloud Storage's XML API does, and answers as that API where it differs from S3. A
// service that verifies signatures must be behind the proxy: it refuses requests that sign what the front end changes.
func Google(w http.ResponseWriter, r *http.Request, forward http.Handler) {
	switch {
	case r.Method == http.MethodPost && r.URL.Query().Has("delete"):
		Refuse(w, r, http.StatusBadRequest, "InvalidArgument", "Invalid argument.")
		return
	case strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-"), r.Header.Get("X-Amz-Trailer") != "":
		Refuse(w, r, http.StatusBadRequest, "InvalidArgument", "Invalid argument: aws-chunked is not supported.")
		return
	}
	r.Header.Set("Accept-Encoding", strings.TrimPrefix(strings.Join(r.Header.Values("Accept-Encoding"), ",")+",gzip(gfe)", ","))
	forward.ServeHTTP(w, r)
}
