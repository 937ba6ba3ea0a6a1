package copier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// busy is a service that throttles all requests.
type busy struct{ requests atomic.Int64 }

func (b *busy) RoundTrip(r *http.Request) (*http.Response, error) {
	b.requests.Add(1)
	return &http.Response{
		StatusCode: http.StatusServiceUnavailable, Header: http.Header{"Content-Type": {"application/xml"}}, Request: r,
		Body: io.NopCloser(strings.NewReader("<Error><Code>SlowDown</Code></Error>")),
	}, nil
}

// placeAt returns a place of a service.
func placeAt(service http.RoundTripper) Place {
	return Place{Prefix: "p/", Bucket: buckets.Bucket{Info: backend.BucketInfo{Name: "bucket"}, Client: s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: aws.String("http://127.0.0.1:1"), UsePathStyle: true, HTTPClient: &http.Client{Transport: service},
		Credentials: credentials.NewStaticCredentialsProvider("a", "b", ""),
	})}}
}

// A request that is repeated can come long after the check that the copy is still wanted. By then another process may have taken over, and
// waits no longer than Lag.
func TestCopy_RequestsAreNotRepeatedWhenTheCopyIsNoLongerWanted(t *testing.T) {
	service := &busy{}
	place := placeAt(service)
	taken := fault.Errorf(fault.Busy, "another process copies")
	r := New(Options{Workers: 1, CheckEvery: time.Nanosecond}).newRun(Task{
		Source: Current{place}, Target: place, Progress: &Progress{},
		Still: func(context.Context) error {
			if service.requests.Load() > 0 {
				return taken
			}
			return nil
		},
	})
	if err := r.requests.checkOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]Object{"in one request": {Key: "a"}, "in parts": {Key: "a", Size: 2 * DefaultThreshold}} {
		service.requests.Store(0)
		if _, _, err := r.copyObject(t.Context(), o); !errors.Is(err, taken) || service.requests.Load() != 1 {
			t.Errorf("%s: %d requests, %v", name, service.requests.Load(), err)
		}
	}
}

// multipart is a service that copies parts. It notes the requests, and refuses the part with the number refused as one of a changed object.
type multipart struct {
	mu       sync.Mutex
	requests []string
	refused  string
}

func (m *multipart) RoundTrip(r *http.Request) (*http.Response, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	query := r.URL.Query()
	what, status, body := r.Method, http.StatusOK, ""
	header := http.Header{"Content-Type": {"application/xml"}, "Etag": {`"one"`}, "Content-Length": {"0"}}
	switch {
	case query.Has("uploads"):
		what, body = "create", "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
	case query.Has("partNumber"):
		what = fmt.Sprintf("part %s if %s", r.Header.Get("X-Amz-Copy-Source-Range"), r.Header.Get("X-Amz-Copy-Source-If-Match"))
		body = "<CopyPartResult><ETag>part</ETag></CopyPartResult>"
		if query.Get("partNumber") == m.refused {
			status, body = http.StatusPreconditionFailed, "<Error><Code>PreconditionFailed</Code></Error>"
		}
	case r.Method == http.MethodPost:
		what = "complete if not " + r.Header.Get("If-None-Match")
		body = "<CompleteMultipartUploadResult><ETag>whole</ETag></CompleteMultipartUploadResult>"
	case r.Method == http.MethodDelete:
		what, status = "abort "+query.Get("uploadId"), http.StatusNoContent
	}
	m.requests = append(m.requests, what)
	header.Set("Content-Length", strconv.Itoa(len(body)))
	return &http.Response{StatusCode: status, Header: header, Request: r, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body))}, nil
}

// A part of an object that has changed since would make a copy of an object that never existed.
func TestCopyParts_CopiesOneVersionOrAborts(t *testing.T) {
	const part = 5 << 20
	parts := []string{fmt.Sprintf("part bytes=0-%d if one", part-1), fmt.Sprintf("part bytes=%d-%d if one", part, 2*part-1)}
	for name, c := range map[string]struct {
		refused string
		want    []string
	}{
		"all parts are copied": {"", append([]string{"HEAD", "create"}, append(slices.Clone(parts), "complete if not *")...)},
		"the object changed":   {"2", append([]string{"HEAD", "create"}, append(slices.Clone(parts), "abort u")...)},
	} {
		service := &multipart{refused: c.refused}
		place := placeAt(service)
		r := New(Options{Workers: 1, Threshold: part}).newRun(Task{Source: Current{place}, Target: place, Progress: &Progress{}})
		etag, err := r.copyParts(t.Context(), Object{Key: "a", ETag: "one", Size: 2 * part}, 0)
		if c.refused == "" && (err != nil || etag != "whole") || c.refused != "" && !backend.IsPreconditionFailed(err) {
			t.Errorf("%s: %q, %v", name, etag, err)
		}
		if !slices.Equal(service.requests, c.want) {
			t.Errorf("%s: %q, want %q", name, service.requests, c.want)
		}
	}
}
